"""`budget`: what a job may cost, shown, raised and lowered; also while it runs."""

from __future__ import annotations

import uuid
from contextlib import suppress
from decimal import Decimal
from typing import Any

from gpucloud.cli.bills import spend_json
from gpucloud.cli.passes import reconcile_known
from gpucloud.cli.render import say, say_json, table, tell, usd
from gpucloud.cli.target import known_job
from gpucloud.domain import codec
from gpucloud.domain.errors import BudgetTooSmall, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.quantities import format_usd, parse_usd
from gpucloud.domain.state import BudgetChange, BudgetWish, JobState
from gpucloud.domain.supervision.budget import plain_usd, refusal
from gpucloud.usecases.budgeting import least_usd, standing, take_up_here
from gpucloud.usecases.jobs import Asker, caller
from gpucloud.usecases.lease import take
from gpucloud.usecases.report import JobReport
from gpucloud.usecases.story import budget_line
from gpucloud.wiring import Gpucloud, KnownJob

_LOOK_S = 0.1


def sum_of(text: str | None) -> Decimal | None:
    """Return the sum that is written on the command line, None for none. UsageError says the right form."""
    try:
        return None if text is None else parse_usd(text)
    except ValueError as error:
        raise UsageError(str(error), hint="gpucloud budget JOB 40 USD") from error


def budget(target: str, wanted: Decimal | None, *, as_json: bool) -> int:
    """Show the job's budget, or have it changed and wait until that is taken up; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = cloud.asker(known)
    if wanted is not None and wanted != asker.state().budget_usd:
        tell(budget_line(_change(cloud, known, asker, wanted)))
    report, state = asker.report(), asker.state()
    if as_json:
        say_json(_json(report, state))
    else:
        say(_text(report, state))
    return 0


def _change(cloud: Gpucloud, known: KnownJob, asker: Asker, wanted: Decimal) -> BudgetChange:
    rules, state = cloud.cloud_of(known).manners.rules, asker.state()
    why = refusal(state, wanted, standing(asker, state), rules)
    if why is not None:
        raise _too_small(asker, known, why, least_usd(asker, state, rules))
    wish = BudgetWish(id=uuid.uuid4().hex, by=caller(), at=cloud.clock.now(), usd=wanted)
    asker.jobs.ask_for_budget(wish)
    change = _await(cloud, known, asker, wish)
    if change.refused is not None:
        raise _too_small(asker, known, change.refused, least_usd(asker, asker.state(), rules))
    return change


def _await(cloud: Gpucloud, known: KnownJob, asker: Asker, wish: BudgetWish) -> BudgetChange:
    """Whoever supervises the job takes the wish up at the next pass; when nobody does, it is done from here."""
    told = False
    while True:
        found = [change for change in asker.state().budget_changes if change.id == wish.id]
        if found:
            return found[0]
        by = asker.supervisor()
        if by is None:
            with suppress(LeaseHeld):  # somebody supervises it from this moment on, and hears the wish
                _take_up(cloud, known, asker)
        elif not told:
            tell(f"asking {by} to change the budget of {known.name}")
        told = told or by is not None
        cloud.clock.sleep(_LOOK_S)


def _take_up(cloud: Gpucloud, known: KnownJob, asker: Asker) -> None:
    before = asker.state()
    with take(asker.jobs, cloud.clock) as lease:
        state = take_up_here(asker, lease, cloud.cloud_of(known).manners.rules)
    if state.paid_until is None or before.paid_until is None or state.paid_until >= before.paid_until:
        return
    try:
        _tell_machines(cloud, known)
    except GpucloudError as error:  # the cloud has the closer shut-off: this is for the last save before it
        tell(f"the machines could not be told: {error}")


def _tell_machines(cloud: Gpucloud, known: KnownJob) -> None:
    """The machines hear of a closer shut-off by an ordinary pass, and save before it."""
    reconcile_known(cloud, known)


def _too_small(asker: Asker, known: KnownJob, why: str, least: str) -> BudgetTooSmall:
    ends = "" if asker.state().status.ended else f", or gpucloud down {known.name} ends it now"
    return BudgetTooSmall(f"{known.name}: {why}", hint=f"gpucloud budget {known.name} {least} USD{ends}")


def _json(report: JobReport, state: JobState) -> dict[str, Any]:
    return {
        "job": report.job,
        "spend": spend_json(report.spend),
        "paid_until": codec.plain(report.paid_until),
        "changes": [
            {
                "at": codec.plain(change.at),
                "by": change.by,
                "old_usd": usd(change.old_usd),
                "new_usd": usd(change.new_usd),
                "refused": change.refused,
            }
            for change in state.budget_changes
        ],
    }


def _text(report: JobReport, state: JobState) -> str:
    spend = report.spend
    rows = [
        ("budget", format_usd(spend.budget_usd)),
        ("spent", format_usd(spend.spent_usd)),
        ("promised", f"{format_usd(spend.promised_usd)}{_until(report)}"),
        ("left", format_usd(spend.left_usd)),
    ]
    parts = [f"{report.job}: {report.status.value}", table(rows)]
    if state.budget_changes:
        heads = ("changed", "by", "from", "to", "")
        parts.append(table([heads, *map(_row, state.budget_changes)]))
    return "\n\n".join(parts)


def _until(report: JobReport) -> str:
    return f", paid until {report.paid_until:%H:%M:%S} UTC" if report.paid_until and report.nodes else ""


def _row(change: BudgetChange) -> tuple[str, ...]:
    prices = plain_usd(change.old_usd), plain_usd(change.new_usd)
    return f"{change.at:%Y-%m-%d %H:%M:%S}", change.by, *prices, f"refused: {change.refused}" if change.refused else ""
