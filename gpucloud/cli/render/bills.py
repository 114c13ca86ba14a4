"""A job's money as text for people, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, ROUND_UP, Decimal
from typing import Any

from gpucloud.cli.render.words import as_argument, pool_json, quarantine_json, table, usd
from gpucloud.domain import codec
from gpucloud.domain.job.quantities import counted, format_moment, format_most, format_span, format_usd, in_cents
from gpucloud.domain.money.budget import LET_GO, Spend
from gpucloud.domain.money.costs import Row
from gpucloud.domain.money.ledger import ZERO, Charge, ChargeKind, total
from gpucloud.domain.state.state import JobStatus, UsageInterval
from gpucloud.domain.supervision.strays import may_live_to
from gpucloud.usecases.job.jobs import Prepaid
from gpucloud.usecases.jobstore.report import JobReport

_SECOND = timedelta(seconds=1)


def cost_text(report: JobReport, heads: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a job's money: its sums in groups, and what is left of the budget."""
    return "\n\n".join([*([rows_text(heads, rows)] if rows else []), spend_text(report.spend, for_later(report))])


def rows_text(heads: Sequence[str], rows: Sequence[Row]) -> str:
    """Return sums as a table, with a last row for all of them; a kind that nothing was paid for has no column."""
    paid = {kind for row in rows for kind, spent in row.usd_by_kind.items() if spent}
    kinds = [kind for kind in ChargeKind if kind in paid]
    shown = kinds if len(kinds) > 1 else []
    places = 2 if sum(row.usd for row in rows) >= 100 else 6
    told = ["machine hours", *(kind.value for kind in shown), "USD"]
    whole = [_hours(rows), *(_sum(rows, kind, places) for kind in shown), f"{sum(row.usd for row in rows):.{places}f}"]
    numbers, *cells, sums = _right([told, *(_cells(row, shown, places) for row in rows), whole])
    lines = [(*heads, "from (UTC)", *numbers, "")]
    lines += [
        (*row.name, f"{row.start:%Y-%m-%d %H:%M}", *own, "partly estimated" if row.estimated else "")
        for row, own in zip(rows, cells, strict=True)
    ]
    if len(rows) > 1:
        lines.append(("total", *[""] * len(heads), *sums, ""))
    return table(lines, ("from (UTC)",))


def charges_text(charges: Sequence[Charge]) -> str:
    """Return charges as a table, one a row, and below it what the marks behind them mean."""
    notes = list(dict.fromkeys(charge.note for charge in charges if charge.note))
    marks = {note: "*" * number for number, note in enumerate(notes, 1)}
    rows = [("node", "attempt", "what", "from (UTC)", "billed s", "USD/h each", "USD", "")]
    moment = "%H:%M:%S" if len({charge.start.date() for charge in charges}) == 1 else "%m-%d %H:%M:%S"
    rows += [
        (
            charge.node_id or "-",
            str(charge.attempt or "-"),
            str(charge.pool) if charge.kind is ChargeKind.COMPUTE else charge.kind.value,
            f"{charge.start:{moment}}",
            f"{(charge.end - charge.start).total_seconds():.0f}",
            usd(charge.usd_per_hour),
            f"{charge.usd:.6f}",
            marks.get(charge.note, ""),
        )
        for charge in charges
    ]
    return "\n".join([table(rows, ("from (UTC)", "billed s")), *(f"{mark} {note}" for note, mark in marks.items())])


def used_rows(spend: Spend) -> list[tuple[str, str]]:
    """Return the rows of what is neither shown as spent nor left; none for nothing.

    It was paid while machines drove the job, and nobody can show it any more; or machines that were let go may cost it.
    """
    why = "counted as used: more may have been paid while its machines drove it than their own ledger tells"
    unproven = [("unproven", f"{format_usd(spend.unproven_usd)}: {why}")] if spend.unproven_usd else []
    let_go = [("let go", f"{format_most(spend.let_go_usd)} {LET_GO} from here")] if spend.let_go_usd else []
    return [*unproven, *let_go]


_EVER = datetime.min.replace(tzinfo=timezone.utc)  # of a report without a time of its own


def prepaid_line(found: Prepaid, now: datetime) -> str:
    """Return the line before the question; no machine and no price that may come passes what it says."""
    sums = f"{in_cents(found.usd)} of {format_usd(found.budget_usd)} are spent at the most"
    most = f"{sums}; they end sooner with the job{', unless it succeeds (`--keep`)' if found.keep else ''}"
    if not found.asked_for:
        until = format_moment(whole_minute(found.until), now, seconds=False)
        return f"a detach prepays the machines until {until} at the latest, when {most}"
    which, are = (
        ("the machine that the job asks for", "it is")
        if found.asked_for == 1
        else (f"the {found.asked_for} machines that the job asks for", "they are")
    )
    lasts = format_span(timedelta(minutes=math.ceil(found.lasts / timedelta(minutes=1))))
    return f"a detach prepays {which}, at any price, for {lasts} at the most from when {are} there, when {most}"


def let_go_words(intervals: Iterable[UsageInterval], now: datetime | None, most_usd: Decimal | None = None) -> str:
    """Return that machines which were let go may live, until when, and what more they cost; nothing without such."""
    ends = [until for one in intervals if (until := may_live_to(one, now or _EVER)) is not None]
    if not ends:
        return ""
    cost = f", and cost {format_most(most_usd)} more at the most" if most_usd is not None else ""
    unseen = f"{counted(len(ends), 'machine')} that could not be ended from here may be alive"
    return f"{unseen} until {format_moment(max(ends), now)}{cost}"


_MORE_TIME = "for more time after that"


def for_later(report: JobReport) -> str:
    """Return what that is for which is left behind the paid time of the job's machines: nobody prolongs it of some."""
    if report.status is JobStatus.SUCCEEDED:
        return "unused"
    if report.buyer is None or not report.spend.free_usd:
        return _MORE_TIME
    return f"{_MORE_TIME}, which they cannot buy: once they are off, gpucloud train {report.buyer} does"


def left_rows(spend: Spend, later: str = _MORE_TIME) -> list[tuple[str, str]]:
    """Return the row of what is left, in its parts, so that they sum up; none where no machine could use it now."""
    if spend.off_at is None:
        return []
    left, promised, kept, free = _summing_up(spend)
    parts = [
        f"{promised} for the machines until then",
        f"{kept} kept aside for the last save and the machines' end",
        f"{free} {later}",
    ]
    return [("left", f"{left} USD: {', '.join(parts)}")]


def _summing_up(spend: Spend) -> tuple[Decimal, ...]:
    """Return what is left and its parts, rounded so that these make it up, as it does the budget with what is spent."""
    sums = (spend.spent_usd, spend.promised_usd, spend.kept_usd, spend.free_usd)
    one = Decimal(1).scaleb(-max(len(plain_amount(usd).partition(".")[2]) for usd in sums))
    left = spend.left_usd.quantize(one, ROUND_HALF_DOWN)  # of two halves, what is spent has the larger
    promised, kept = (usd.quantize(one, ROUND_HALF_UP) for usd in (spend.promised_usd, spend.kept_usd))
    return left, promised, kept, max(left - promised - kept, ZERO.quantize(one))


def money_line(spend: Spend, width: int | None = None) -> str:
    """Return what is spent of the budget, the rate, and the latest time and sum at which everything is off.

    For so many columns it is said in fewer words, then without the rate, so that no figure is cut.
    """
    parts = [f"{plain_amount(spend.spent_usd)} of {plain_amount(spend.budget_usd)} USD"]
    rate = [f"{plain_amount(spend.usd_per_hour)} USD/h in all"] if spend.usd_per_hour else []
    if spend.all_off_at is None:
        return " · ".join([*parts, *rate])
    off = f"off by {format_moment(whole_minute(spend.all_off_at), spend.as_of, seconds=False)}"
    most = f"{plain_amount(spend.off_usd, ROUND_UP)} USD"
    short = f"{off} (≤{most})"
    told = ([*parts, *rate, f"{off} at the latest, at {most}"], [*parts, *rate, short], [*parts, short])
    lines = [" · ".join(words) for words in told]
    return next((line for line in lines if width is None or len(line) <= width), lines[-1])


def plain_amount(usd: Decimal, rounding: str = ROUND_HALF_UP) -> str:
    """Return a sum without its unit: two digits after the point, three where it has thousandths and is below one."""
    if usd and abs(usd) < Decimal("0.0005"):
        return "<0.001"
    places = "0.01" if abs(usd) >= 1 or not (usd * 100) % 1 else "0.001"
    return f"{usd.quantize(Decimal(places), rounding):f}"


def left_amount(spend: Spend) -> str:
    """Return what is left of the budget, with as many places as what is spent, so that both make it up."""
    _, _, places = plain_amount(spend.spent_usd).partition(".")
    return f"{spend.left_usd.quantize(Decimal(1).scaleb(-len(places)), ROUND_HALF_DOWN):f}"


Ends = Sequence[tuple[timedelta | None, str, str]]
"""What may end a job before its last step: in how long, how that is said before it comes, and once it has."""


def to_go_words(left: timedelta | None, spend: Spend, alone: Ends = ()) -> list[str]:
    """Return how long a job has to its last step, and what ends it before, where something does.

    `alone` is what ends one that nobody supervises: its budget and its deadline end it no more.
    """
    if not left:
        return []
    ends = alone or [
        (spend.lasts, "budget ends", "budget is used up"),
        (spend.deadline_in, "deadline comes", "deadline is over"),
        (spend.prepaid_in, "paid time ends", "paid time is over"),
    ]
    first = min((one for one in ends if one[0] is not None and one[0] < left), key=_length, default=None)
    return [f"{format_span(left)} to go", *([_end_words(*first)] if first is not None else [])]


def _length(end: tuple[timedelta | None, str, str]) -> timedelta:
    return end[0] or timedelta(0)


def _end_words(ends_in: timedelta | None, comes: str, over: str) -> str:
    """Return when a job ends before its last step, and for what; once that is so, that it is being ended."""
    whole = (ends_in or timedelta(0)) // _SECOND * _SECOND
    return f"its {comes} first, in {format_span(whole)}" if whole else f"its {over}: it is being ended"


def _forecast_of(spend: Spend) -> str:
    if spend.is_short and spend.lasts is not None:
        before = "" if spend.is_used_up else ": it ends then, and saves first if its script does"
        return f"at today's price and pace: {_end_words(spend.lasts, 'budget ends', 'budget is used up')}{before}"
    if spend.prepaid_in is not None and (spend.deadline_in is None or spend.prepaid_in < spend.deadline_in):
        return (
            f"at today's price, when its paid time ends, in {format_span(spend.prepaid_in)}: its own machines buy none"
        )
    if spend.deadline_in is not None and spend.deadline_in < _SECOND:
        return "at its end: its deadline is over, and it is being ended"
    if spend.deadline_in is not None:
        when = f"at today's price, at its deadline, in {format_span(spend.deadline_in)}"
        return f"{when}: it ends then, done or not, and saves first if its script does"
    if spend.unattended_until is None:
        return "at the end, at today's price and pace"
    until = format_moment(spend.unattended_until, spend.as_of)
    return f"at today's price, at {until}, when its machines switch themselves off, unless somebody ends them sooner"


def whole_minute(at: datetime) -> datetime:
    """Return the minute by which that moment is over: a latest time is never said too early."""
    begun = at.replace(second=0, microsecond=0)
    return begun if begun == at else begun + timedelta(minutes=1)


def spend_text(spend: Spend, later: str = _MORE_TIME) -> str:
    """Return the sums, one a line."""
    rows = [("spent", money_line(spend)), *used_rows(spend), *left_rows(spend, later)]
    if spend.forecast_usd is not None:
        rows.append(("forecast", f"{format_usd(spend.forecast_usd)} {_forecast_of(spend)}"))
    if spend.outside_budget_usd:
        what = "storage, requests, transfer, data from other regions and drills"
        rows.append(("outside", f"{format_usd(spend.outside_budget_usd)}, not in the budget: {what}"))
    return table(rows)


def cost_json(report: JobReport) -> dict[str, Any]:
    """Return a job's money as an object: the sums, and every charge; `charges` are those that the budget counts."""
    budgeted = [charge for charge in report.charges if charge.kind.in_budget]
    return {
        **money_json(report),
        "tags": dict(report.tags),
        "by_attempt": [{"attempt": key, "usd": usd(total(c))} for key, c in _grouped(budgeted, "attempt")],
        "by_node": [{"node": key, "usd": usd(total(c))} for key, c in _grouped(budgeted, "node_id")],
        "by_kind": [{"kind": key.value, "usd": usd(total(c))} for key, c in _grouped(report.charges, "kind")],
        "charges": [charge_json(charge) for charge in budgeted],
        "outside_budget": [charge_json(charge) for charge in report.charges if not charge.kind.in_budget],
        "quarantined": [quarantine_json(one) for one in report.quarantined],
    }


def rows_json(heads: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return sums as objects: the grouping's own keys below `group`."""
    return [
        {
            "group": dict(zip(heads, row.name, strict=True)),
            "start": codec.plain(row.start),
            "end": codec.plain(row.end),
            "machine_seconds": int(row.machine_time.total_seconds()),
            **{kind.value: usd(row.usd_by_kind[kind]) for kind in ChargeKind if kind in row.usd_by_kind},
            "usd": usd(row.usd),
            "estimated": row.estimated,
        }
        for row in rows
    ]


def money_json(report: JobReport) -> dict[str, Any]:
    """Return what `cost` and `budget` say of a job as every command does: its name, how it stands, its money."""
    return {
        "job": as_argument(report.job),
        "name": report.name,
        "status": report.status.value,
        "condition": report.condition.value,
        "spend": spend_json(report.spend),
        "paid_until": codec.plain(report.paid_until),
    }


def spend_json(spend: Spend) -> dict[str, Any]:
    """Return the money as decimal strings; `budget_ends_at` only where that is before the job's last step."""
    return {
        "spent_usd": usd(spend.spent_usd),
        "promised_usd": usd(spend.promised_usd),
        "let_go_usd": usd(spend.let_go_usd),
        "unproven_usd": usd(spend.unproven_usd),
        "left_usd": usd(spend.left_usd),
        "kept_usd": usd(spend.kept_usd),
        "usd_per_hour": usd(spend.usd_per_hour),
        "budget_usd": usd(spend.budget_usd),
        "forecast_usd": usd(spend.forecast_usd) if spend.forecast_usd is not None else None,
        "budget_ends_at": codec.plain(spend.ends_at),
        "outside_budget_usd": usd(spend.outside_budget_usd),
    }


def charge_json(charge: Charge) -> dict[str, Any]:
    """Return a charge as an object; a pool's words are missing where it is no node's."""
    return {
        "node": charge.node_id,
        "attempt": charge.attempt,
        **(pool_json(charge.pool) if charge.pool else {}),
        "kind": charge.kind.value,
        "start": codec.plain(charge.start),
        "end": codec.plain(charge.end),
        "usd_per_hour": usd(charge.usd_per_hour),
        "usd": usd(charge.usd),
        "note": charge.note,
        "estimated": charge.estimated,
    }


def _grouped(charges: Sequence[Charge], key: str) -> list[tuple[Any, list[Charge]]]:
    groups: dict[Any, list[Charge]] = {}
    for charge in charges:
        groups.setdefault(getattr(charge, key), []).append(charge)
    return list(groups.items())


def _cells(row: Row, kinds: Sequence[ChargeKind], places: int) -> list[str]:
    return [_hours([row]), *(f"{row.usd_of(kind):.{places}f}" for kind in kinds), f"{row.usd:.{places}f}"]


def _sum(rows: Sequence[Row], kind: ChargeKind, places: int) -> str:
    return f"{sum(row.usd_of(kind) for row in rows):.{places}f}"


def _hours(rows: Sequence[Row]) -> str:
    return f"{sum(row.machine_time.total_seconds() for row in rows) / 3600:.2f}"


def _right(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) for cell in column])
    return list(zip(*columns, strict=True))
