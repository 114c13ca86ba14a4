"""`status` and `cost`: where jobs stand and what they cost; both ask, and supervise nothing."""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpucloud.cli.render.bills import charge_json, cost_json, cost_text, rows_json, rows_text
from gpucloud.cli.render.reports import jobs_text, newest_first, report_json, report_text
from gpucloud.cli.render.use import history_json, history_rows
from gpucloud.cli.render.words import error_fields, say, say_json, say_words, table, tell, usd
from gpucloud.cli.target import Unread, known_job, report_of, reports_of_all, say_what_costs_on
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.money.costs import (
    LAG,
    BillDifference,
    Billed,
    Grouping,
    Item,
    Row,
    after,
    bill_differences,
    grouped,
    grouping,
)
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.money.spend import Reconciler
from gpucloud.usecases.supervise.usage import read_history
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.jobs import asker_of


def status(target: str | None, *, history: bool, rehearsals: bool, as_json: bool) -> int:
    """Say where one job stands, or all that are known; return the exit code.

    With `history`, how its machines were used from the first attempt on. The short runs of `--verify-resume` are listed
    with `rehearsals` alone.
    """
    cloud = Gpucloud()
    if history:
        return _history(cloud, known_job(cloud, target), as_json=as_json)
    if target is None:
        return _status_of_all(cloud, rehearsals=rehearsals, as_json=as_json)
    known = known_job(cloud, target)
    report = report_of(cloud, known, visits=True)
    if as_json:
        say_json(report_json(report))
    else:
        say_words(report_text(report))
    if report.status.ended:
        say_what_costs_on(asker_of(cloud, known), report.job)
    return 0


def _status_of_all(cloud: Gpucloud, *, rehearsals: bool, as_json: bool) -> int:
    found, unread = reports_of_all(cloud)
    reports = newest_first([report for report in found if rehearsals or not report.rehearses])
    if as_json:
        say_json({"jobs": [report_json(report) for report in reports], "unread": _unread_json(unread)})
    else:
        say(jobs_text(reports, unread=[one.job for one in unread]))
    if hidden := len(found) - len(reports):
        tell(f"not shown: {counted(hidden, 'rehearsal')} of --verify-resume: gpucloud status --rehearsals")
    return _worst(unread)


def _unread_json(unread: Sequence[Unread]) -> list[dict[str, object]]:
    return [{"job": one.job, **error_fields(one.error)} for one in unread]


def _worst(unread: Sequence[Unread]) -> int:
    return max((one.error.exit_code for one in unread), default=0)


def _history(cloud: Gpucloud, known: KnownJob, *, as_json: bool) -> int:
    asker = asker_of(cloud, known)
    asker.stored_state()  # UsageError when there is no such job
    kept = read_history(asker.jobs)
    if as_json:
        say_json({"job": known.name, "history": history_json(kept)})
    elif kept:
        say(table(history_rows(kept)))
    else:
        say_words(
            f"{known.name}: nothing is recorded yet; the use is recorded every few minutes, and when an attempt ends"
        )
    return 0


# `cost`: what jobs have cost, summed by what people ask for, and beside the cloud's own bill.


_COLUMNS = (
    *("attempt", "node", "instance_type", "zone", "market", "kind"),
    *("start", "end", "usd_per_hour", "usd", "estimated", "note"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked of `cost`: `by` a way of summing, `since` a day, `to` a file for CSV, or `-`."""

    by: str | None = None
    since: str | None = None
    to: str | None = None
    every: bool = False


def cost(targets: Sequence[str], asked: Asked, *, as_json: bool) -> int:
    """Say what jobs have cost; return the exit code."""
    # All that is read lives to the end: of a long job's charges, looking for garbage takes a fifth of the time.
    gc.disable()
    try:
        return _cost(targets, asked, as_json=as_json)
    finally:
        gc.enable()


def require_one(targets: Sequence[str], asked: Asked) -> None:
    """Refuse what does not go with one job's bill. UsageError."""
    if len(targets) > 1 or asked != Asked():
        raise UsageError("--bill is about one job, by day and kind", hint="gpucloud cost JOB --bill")


def _cost(targets: Sequence[str], asked: Asked, *, as_json: bool) -> int:
    since = _day(asked.since)
    if as_json and asked.to is not None:
        raise UsageError("--json and --csv are two answers", hint="one of them")
    cloud = Gpucloud()
    reports, unread = _reports(cloud, targets, asked)
    many = asked.every or len(reports) > 1
    by = grouping(asked.by or ("job" if many else "attempt"), many_jobs=many)
    items = [Item(job=r.job, tags=r.tags, charge=charge) for r in reports for charge in r.charges]
    counted = items if since is None else list(after(items, since))
    if asked.to is not None:
        _write_csv(asked.to, _charge_lines(counted) if asked.by is None else _row_lines(by, grouped(counted, by)))
    elif as_json:
        one = {"jobs": [cost_json(report) for report in reports]} if many else cost_json(reports[0])
        missing = {"unread": _unread_json(unread)} if asked.every else {}
        say_json({**one, "rows": rows_json(by.heads, grouped(counted, by)), **missing})
    elif many:
        say_words(_costs_text(by, grouped(counted, by), unread))
    else:
        say_words(cost_text(reports[0], by.heads, grouped(counted, by)))
    return _worst(unread)


def _costs_text(by: Grouping, rows: Sequence[Row], unread: Sequence[Unread]) -> str:
    """Return the sums of many jobs, and which known jobs are not in them."""
    missing = f"what {', '.join(one.job for one in unread)} spent is not known" if unread else ""
    if not rows:
        return missing or "nothing was spent"
    return "\n\n".join(part for part in (rows_text(by.heads, rows), missing) if part)


def _reports(cloud: Gpucloud, targets: Sequence[str], asked: Asked) -> tuple[list[JobReport], list[Unread]]:
    if asked.every:
        if targets:
            raise UsageError("--all is every known job", hint="name some, or leave the names out")
        return reports_of_all(cloud)
    known = [known_job(cloud, target) for target in targets] if targets else [known_job(cloud, None)]
    jobs = tuple({one.name: one for one in known}.values())
    return [report_of(cloud, one, visits=len(jobs) == 1) for one in jobs], []


def _day(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError:
        raise UsageError(f"{text!r} is no day", hint="--since 2026-11-01: from midnight on, UTC") from None


def _charge_lines(items: Iterable[Item]) -> list[dict[str, object]]:
    """Return a line for each charge, tags in columns of their own."""
    return [
        {
            "job": item.job,
            **{column: told.get(column, "") for column in _COLUMNS},
            "seconds": int((item.charge.end - item.charge.start).total_seconds()),
            "in_budget": item.charge.kind.in_budget,
            **{f"tag:{key}": value for key, value in item.tags},
        }
        for item in items
        for told in (charge_json(item.charge),)
    ]


def _row_lines(by: Grouping, rows: Sequence[Row]) -> list[dict[str, object]]:
    lines = []
    for told, row in zip(rows_json(by.heads, rows), rows, strict=True):
        told.pop("group")
        lines.append({**dict(zip(by.heads, row.name, strict=True)), **told, "usd": usd(row.usd)})
    return lines


def _write_csv(to: str, lines: Sequence[dict[str, object]]) -> None:
    """Write the lines with every column that any of them has. UsageError when the file cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(head for line in lines for head in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if to == "-":
        say(text.getvalue().removesuffix("\n"))
        return
    try:
        Path(to).write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror}", hint="--csv names a file, or -") from error
    tell(f"{to} has {counted(len(lines), 'line')}")


# `cost --bill`: a job's ledger beside the cloud's own bill.


_USD_PER_REQUEST = Decimal("0.01")


def bill(target: str | None, *, as_json: bool) -> int:
    """Say our sum and the cloud's for each day and kind, and how far they are apart; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    billing = cloud.cloud_of(known).billing()
    if billing is None:
        raise UsageError(f"nobody sends a bill for {known.name}: it does not run on a rented cloud")
    asker = asker_of(cloud, known)
    report, now = asker.report(), cloud.clock.now()
    billed = Reconciler(jobs=asker.jobs, billing=billing).billed(report.charges, now)
    _tell_of(billed, fresh=billed.asked_at == now)
    rows = bill_differences(report.charges, billed)
    if as_json:
        say_json(_bill_json(known.name, billed, rows))
    else:
        say_words(_bill_text(rows) if rows else "neither side knows of a cost")
    return 0


def _tell_of(billed: Billed, *, fresh: bool) -> None:
    paid = f"{_USD_PER_REQUEST * billed.requests} USD for {billed.requests} requests"
    when = f"{billed.asked_at:%Y-%m-%d %H:%M} UTC"
    tell(f"AWS's figures of {when}, {'which cost' if fresh else 'asked for at most once a day; they cost'} {paid}")
    tell(
        f"AWS's bill is about a day late: the last {LAG.days} days are not final. The bucket is all jobs' and not in it"
    )
    if not billed.lines:
        tell(
            "AWS knows of nothing with the tag gpucloud:job. Activate it in the billing console as a cost allocation"
            " tag: it counts from the next day on"
        )


def _bill_text(rows: Sequence[BillDifference]) -> str:
    lines = [("day", "kind", "ours USD", "AWS USD", "drift USD", "")]
    lines += [
        (
            row.day,
            row.kind.value if row.kind else "other",
            *_bill_sums(row.ours_usd, row.billed_usd),
            "" if row.final else "not final",
        )
        for row in rows
    ]
    final = [row for row in rows if row.final]
    if final:
        lines.append(
            (
                "final",
                "",
                *_bill_sums(_bill_total(final, "ours_usd"), _bill_total(final, "billed_usd")),
                _bill_percent(final),
            )
        )
    lines.append(("all", "", *_bill_sums(_bill_total(rows, "ours_usd"), _bill_total(rows, "billed_usd")), ""))
    return table(lines)


def _bill_sums(ours: Decimal, billed: Decimal) -> tuple[str, str, str]:
    return f"{ours:.4f}", f"{billed:.4f}", f"{billed - ours:+.4f}"


def _bill_total(rows: Sequence[BillDifference], name: str) -> Decimal:
    return sum((getattr(row, name) for row in rows), Decimal(0))


def _bill_percent(rows: Sequence[BillDifference]) -> str:
    ours = _bill_total(rows, "ours_usd")
    return f"{(_bill_total(rows, 'billed_usd') / ours - 1) * 100:+.1f} %" if ours else ""


def _bill_json(job: str, billed: Billed, rows: Sequence[BillDifference]) -> dict[str, Any]:
    return {
        "job": job,
        "asked_at": billed.asked_at.isoformat(),
        "ours_usd": usd(_bill_total(rows, "ours_usd")),
        "billed_usd": usd(_bill_total(rows, "billed_usd")),
        "rows": [
            {
                "day": row.day,
                "kind": row.kind.value if row.kind else None,
                "ours_usd": usd(row.ours_usd),
                "billed_usd": usd(row.billed_usd),
                "drift_usd": usd(row.drift_usd),
                "final": row.final,
            }
            for row in rows
        ],
    }
