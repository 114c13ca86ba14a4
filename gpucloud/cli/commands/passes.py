"""`reconcile`: one pass for a job, or for each that is not torn down; `budget`, whose change one pass has obeyed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from gpucloud.cli.commands.supervising import answer, bring_stored_home, onlooker
from gpucloud.cli.faults import known_error
from gpucloud.cli.render.bills import left_amount, left_rows, money_json, money_line, plain_amount, unproven_rows
from gpucloud.cli.render.use import condition_and_reason, condition_word
from gpucloud.cli.render.words import say, say_json, say_words, table, tell, usd
from gpucloud.cli.target import called, known_job, report_of
from gpucloud.domain import codec
from gpucloud.domain.errors import LeaseHeld, UsageError
from gpucloud.domain.job.quantities import format_usd, parse_usd
from gpucloud.domain.state.order import BudgetChange, Order
from gpucloud.usecases.jobstore.condition import Condition
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.story import missing_line
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.found import FoundJob, jobs_in
from gpucloud.wiring.jobs import asker_of, budget_changer, reconciler_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What became of one job's pass: how the job stands, None where that cannot be told, or why none was made.

    `error` is the code of what kept it from its pass; `lease_held` by somebody who sees to it is no failure.
    """

    job: str
    report: JobReport | None = None
    error: str | None = None
    exit_code: int = 0
    message: str = ""
    hint: str | None = None


def reconcile(target: str | None, *, as_json: bool) -> int:
    """Make one pass for the job from nothing but what is stored and seen; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    _settle(cloud, known)
    return answer(report_of(cloud, known), as_json=as_json)


def _settle(cloud: Gpucloud, known: KnownJob) -> None:
    reconciler = reconciler_of(cloud, known, tell)
    with onlooker() as shown:
        job = reconciler.settle(shown)
    bring_stored_home(cloud, job, known)


def reconcile_all(store: str | None, *, as_json: bool) -> int:
    """Make one pass for each job; one that fails stops no other. Return the worst exit code."""
    cloud = Gpucloud()
    results = [_pass(cloud, known) for known in _jobs(cloud, store)]
    done = [one for one in results if one is not None]
    if as_json:
        say_json({"jobs": [_json(one) for one in done]})
    else:
        say(table([("job", "status", "exit", ""), *map(_row, done)]) if done else "no job has anything to do")
    return max((one.exit_code for one in done), default=0)


def _jobs(cloud: Gpucloud, store: str | None) -> tuple[FoundJob, ...]:
    own = (FoundJob(known=known, has_own_file=True) for known in cloud.home.known())
    found = jobs_in(cloud, store) if store is not None else ()
    return tuple({(one.known.store, one.known.name): one for one in (*found, *own)}.values())


def _pass(cloud: Gpucloud, found: FoundJob) -> Passed | None:
    """Make the job's pass; None for a job that has ended and has nothing left."""
    known = found.known
    try:
        return _made(cloud, found)
    except Exception as fault:  # noqa: BLE001  what one job's machines wrote must keep nobody from the next one
        error = known_error(fault)
        tell(f"{known.name}: {error}")
        return Passed(
            job=called(cloud, known),
            error=error.code,
            exit_code=error.exit_code,
            message=error.message,
            hint=error.hint,
        )


def _made(cloud: Gpucloud, found: FoundJob) -> Passed | None:
    known = found.known
    state = asker_of(cloud, known).state()
    if state.status.ended and state.torn_down:
        return _brought_late(cloud, known)
    tell(f"{known.name}: one pass")
    try:
        if state.status.ended:
            reconciler_of(cloud, known, tell).end_unless_trusted(partial(found.to_end, cloud))
        _settle(cloud, known)
    except LeaseHeld as held:  # somebody sees to it: for a schedule over all jobs that is as it should be
        return Passed(job=called(cloud, known), report=report_of(cloud, known), error=held.code, message=held.message)
    return _standing(report_of(cloud, known))


def _brought_late(cloud: Gpucloud, known: KnownJob) -> Passed | None:
    """Bring home what is still in the store of a job that is over; None where there is none, as almost always."""
    if not cloud.has_stored_outputs(known):
        return None
    tell(f"{known.name}: one pass")
    bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    return _standing(report_of(cloud, known))


def _standing(report: JobReport) -> Passed:
    said = (*((report.message,) if report.message else ()), *map(missing_line, report.missing_outputs))
    return Passed(job=report.job, report=report, exit_code=report.exit_code or 0, message="; ".join(said))


def _json(one: Passed) -> dict[str, object]:
    return {
        "job": one.job,
        "status": one.report.status.value if one.report is not None else None,
        "condition": one.report.condition.value if one.report is not None else None,
        "supervisor": one.report.supervisor if one.report is not None else None,
        "error": one.error,
        "exit_code": one.exit_code,
        "message": one.message or None,
        "hint": one.hint,
    }


def _row(one: Passed) -> tuple[str, ...]:
    hint = f"; hint: {one.hint}" if one.hint else ""
    word = condition_and_reason(one.report) if one.report is not None else one.error or ""
    return one.job, word, str(one.exit_code), f"{one.message}{hint}"


# `budget`: what a job may cost, shown, raised and lowered; also while it runs.


_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")


def sum_of(text: str | None) -> Decimal | None:
    """Return the sum that `--budget` says, None for none. UsageError says the right form."""
    return None if text is None else _sum(text, "--budget '{} USD'")


def _sum(text: str, form: str) -> Decimal:
    """Return the sum; `form` is what is to be typed, but for a number."""
    try:
        return parse_usd(text)
    except ValueError as error:
        hint = form.format(text if _BARE.fullmatch(text) else 40)
        raise UsageError(str(error), hint=f"did you mean {hint}?" if _BARE.fullmatch(text) else hint) from error


def meant(words: Sequence[str]) -> tuple[str | None, Decimal | None]:
    """Return the job, None for the file here, and the sum that the words of a command line mean."""
    with suppress(ValueError):
        return None, parse_usd(" ".join(words))
    job, rest = (words[0] if words else None), " ".join(words[1:])
    if job is not None and not rest and _BARE.fullmatch(job):
        return None, _sum(job, "gpucloud budget {} USD")
    return job, (_sum(rest, f"gpucloud budget {job} {{}} USD") if rest else None)


def budget(target: str | None, wanted: Decimal | None, *, as_json: bool) -> int:
    """Show the job's budget, or have it changed and wait until that is in force; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = asker_of(cloud, known)
    if wanted is not None:
        budget_changer(cloud, known, partial(_settle, cloud, known), tell).make(wanted)
    report, order = report_of(cloud, known), asker.order()
    if as_json:
        say_json(_budget_json(report, order))
    else:
        say_words(_budget_text(report, order))
    return 0


def _budget_json(report: JobReport, order: Order) -> dict[str, Any]:
    return {
        **money_json(report),
        "changes": [
            {
                "at": codec.plain(change.at),
                "by": change.by,
                "old_usd": usd(change.old_usd),
                "new_usd": usd(change.new_usd),
            }
            for change in order.budget_changes
        ],
    }


def _budget_text(report: JobReport, order: Order) -> str:
    spend, is_over = report.spend, report.condition is Condition.ENDED
    rows = [
        ("budget", format_usd(spend.budget_usd)),
        ("spent", money_line(spend)),
        *unproven_rows(spend),
        *(left_rows(spend, report.buyer) or [("unused" if is_over else "left", f"{left_amount(spend)} USD")]),
    ]
    parts = [f"{report.job}: {condition_word(report)}", table(rows)]
    if order.budget_changes:
        heads = ("changed (UTC)", "by", "from", "to")
        parts.append(table([heads, *map(_change_row, order.budget_changes)]))
    return "\n\n".join(parts)


def _change_row(change: BudgetChange) -> tuple[str, ...]:
    sums = (f"{plain_amount(usd)} USD" for usd in (change.old_usd, change.new_usd))
    return f"{change.at:%Y-%m-%d %H:%M:%S}", change.by, *sums
