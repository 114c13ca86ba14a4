"""`reconcile`: one pass for a job, or for each that is not torn down; `budget`, whose change one pass has obeyed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpucloud.cli.commands.supervising import answer, bring_stored_home, onlooker
from gpucloud.cli.faults import known_error
from gpucloud.cli.render.bills import left_amount, left_rows, money_json, money_line, plain_amount, unproven_rows
from gpucloud.cli.render.use import condition_word
from gpucloud.cli.render.words import say, say_json, say_words, table, tell, usd
from gpucloud.cli.target import known_job, report_of
from gpucloud.domain import codec
from gpucloud.domain.errors import BudgetRefused, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job.quantities import format_usd, in_cents, parse_usd
from gpucloud.domain.state.order import BudgetChange, Order, is_closed, with_budget
from gpucloud.domain.state.state import JobState, JobStatus
from gpucloud.domain.supervision.budget import least_to_go_on, plain_usd, refusal
from gpucloud.domain.supervision.seen import Rules, rules_for
from gpucloud.usecases.job.jobs import Asker, bring_closer, budget_standing, least_usd, obey_here
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.report import Condition, JobReport, status_of
from gpucloud.usecases.supervise.session import Session
from gpucloud.usecases.supervise.story import budget_line, missing_line
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.found import FoundJob, jobs_in
from gpucloud.wiring.jobs import access_to, asker_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What became of one job's pass: how the job stands, None where that is not known, or why none was made.

    `error` is the code of what kept it from its pass; `lease_held` by somebody who sees to it is no failure.
    """

    job: str
    status: JobStatus | None = None
    error: str | None = None
    exit_code: int = 0
    message: str = ""
    hint: str | None = None


def reconcile(target: str | None, *, as_json: bool) -> int:
    """Make one pass for the job from nothing but what is stored and seen; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    reconcile_known(cloud, known)
    return answer(report_of(cloud, known), as_json=as_json)


def reconcile_known(cloud: Gpucloud, known: KnownJob) -> None:
    """Make one pass for a known job; LeaseHeld when somebody supervises it, CredentialsError without its SSH key."""
    state, orders = asker_of(cloud, known).state(), cloud.orders(known)
    means = access_to(cloud, known).by_order(state, orders.acted_on())
    if means.edited is not None:
        tell(means.edited)
    with onlooker() as shown:
        session = Session(services=means.services, orders=orders, watcher=shown)
        if means.unsaved is None:
            session.settle()
        else:
            session.end_unsaved(means.unsaved)
    bring_stored_home(cloud, means.job, known)


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
        state = asker_of(cloud, known).state()
        if state.status.ended and state.torn_down:
            return _brought_late(cloud, known, state)
        tell(f"{known.name}: one pass")
        if state.status.ended:
            _end_unless_trusted(cloud, found, state)
            reconcile_known(cloud, known)
        else:
            reconcile_known(cloud, known)
        return _standing(known, asker_of(cloud, known).state())
    except LeaseHeld as held:  # somebody sees to it: for a schedule over all jobs that is as it should be
        return Passed(job=known.name, error=held.code, message=held.message)
    except Exception as fault:  # noqa: BLE001  what one job's machines wrote must keep nobody from the next one
        error = known_error(fault)
        tell(f"{known.name}: {error}")
        return Passed(
            job=known.name, error=error.code, exit_code=error.exit_code, message=error.message, hint=error.hint
        )


def _brought_late(cloud: Gpucloud, known: KnownJob, state: JobState) -> Passed | None:
    """Bring home what is still in the store of a job that is over; None where there is none, as almost always."""
    if not cloud.has_stored_outputs(known):
        return None
    tell(f"{known.name}: one pass")
    bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    return _standing(known, state)


def _end_unless_trusted(cloud: Gpucloud, found: FoundJob, state: JobState) -> None:
    """What nobody signed whose word counts here is torn down all the same, and can be nothing else afterwards."""
    orders = cloud.orders(found.known)
    if not orders.is_trusted(orders.newest()):
        found.to_end(cloud, state)
        orders.end()


def _standing(known: KnownJob, state: JobState) -> Passed:
    code = state.exit_code if state.status.ended and state.exit_code else 0
    said = (*((state.message,) if state.message else ()), *map(missing_line, state.missing_outputs))
    return Passed(job=known.name, status=status_of(state), exit_code=code, message="; ".join(said))


def _json(one: Passed) -> dict[str, object]:
    return {
        "job": one.job,
        "status": one.status.value if one.status is not None else None,
        "error": one.error,
        "exit_code": one.exit_code,
        "message": one.message or None,
        "hint": one.hint,
    }


def _row(one: Passed) -> tuple[str, ...]:
    hint = f"; hint: {one.hint}" if one.hint else ""
    word = one.status.value if one.status is not None else "supervised" if not one.exit_code else one.error or ""
    return one.job, word, str(one.exit_code), f"{one.message}{hint}"


# `budget`: what a job may cost, shown, raised and lowered; also while it runs.


_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
_LOOK_S = 0.1
_MACHINE_SAYS_SO = timedelta(seconds=30)


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
        _change(cloud, known, asker, wanted)
    report, order = report_of(cloud, known), asker.order()
    if as_json:
        say_json(_budget_json(report, order))
    else:
        say_words(_budget_text(report, order))
    return 0


def _change(cloud: Gpucloud, known: KnownJob, asker: Asker, wanted: Decimal) -> None:
    """Order it, and have it in force; the same sum again too: whoever ordered it may have died in between."""
    orders, state = cloud.orders(known), asker.state()
    before = orders.newest()
    if is_closed(before.order, state) and state.torn_down:
        file = known.file.name
        raise UsageError(
            f"{known.name} is over: no budget limits it any more",
            hint=f"the next run takes `budget:` of {file}, or gpucloud train --budget '{plain_usd(wanted)} USD'",
        )
    if before.order.budget_usd == wanted and not orders.is_trusted(before):
        return
    rules = rules_for(before.order.unattended, cloud.cloud_of(known).cloud_profile.rules)
    standing = budget_standing(asker, state)
    why = refusal(state, before.order.budget_usd, wanted, standing, rules)
    if why is not None:
        raise _too_small(asker, known, why, least_usd(asker, state, rules))
    order = orders.change(lambda newest: with_budget(newest, wanted)).order
    is_news = state.order_number < order.number
    await_order(cloud, known, asker, order, rules)
    for change in order.budget_changes[-1:] if is_news else ():
        tell(budget_line(change))
    if not standing.alive and wanted < (least := least_to_go_on(state, standing, rules)):
        tell(f"that is too little to go on with: the least is {in_cents(least)} USD")


def await_order(cloud: Gpucloud, known: KnownJob, asker: Asker, order: Order, rules: Rules) -> None:
    """Return once the order is acted on: by whoever supervises the job, or from here when nobody does.

    A machine that drives its job has no right to move the shut-off on every cloud: that is done from here, and it has
    some time to say that it goes by the order. Whatever it says, the cloud ends it when the budget says.
    """
    told, armed_at = False, None
    if asker.state().drives_itself:  # what it wrote may say that it did
        bring_closer(asker, order, rules)
    while asker.stored_state().order_number < order.number:
        state, by = asker.state(), asker.supervisor()
        if by is None:
            with suppress(LeaseHeld):  # somebody supervises it from this moment on, and reads the order
                _obey(cloud, known, asker, order, rules)
            continue
        if not told:
            tell(f"asking {by} to change the budget of {known.name}")
        told = True
        if state.drives_itself or (state.owner is not None and state.owner.node):
            bring_closer(asker, order, rules)
            armed_at = armed_at or asker.clock.now()
            if asker.clock.now() - armed_at > _MACHINE_SAYS_SO:
                tell(f"{by} has not confirmed the new budget yet; the cloud ends the machines in time in any case")
                return
        asker.clock.sleep(_LOOK_S)


def _obey(cloud: Gpucloud, known: KnownJob, asker: Asker, order: Order, rules: Rules) -> None:
    with take(asker.jobs, asker.clock) as lease:
        closer = obey_here(asker, lease, order, rules)
    if not closer:
        return
    try:
        reconcile_known(cloud, known)  # the machines hear of a closer shut-off by an ordinary pass, and save before it
    except GpucloudError as error:  # the cloud has the closer shut-off: this is for the last save before it
        tell(f"the machines could not be told: {error}")


def _too_small(asker: Asker, known: KnownJob, why: str, least: str) -> BudgetRefused:
    ends = "" if asker.state().status.ended else f", or gpucloud down {known.name} ends it now"
    return BudgetRefused(f"{known.name}: {why}", hint=f"gpucloud budget {known.name} {least} USD{ends}")


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
        *(left_rows(spend) or [("unused" if is_over else "left", f"{left_amount(spend)} USD")]),
    ]
    parts = [f"{report.job}: {condition_word(report)}", table(rows)]
    if order.budget_changes:
        heads = ("changed (UTC)", "by", "from", "to")
        parts.append(table([heads, *map(_change_row, order.budget_changes)]))
    return "\n\n".join(parts)


def _change_row(change: BudgetChange) -> tuple[str, ...]:
    sums = (f"{plain_amount(usd)} USD" for usd in (change.old_usd, change.new_usd))
    return f"{change.at:%Y-%m-%d %H:%M:%S}", change.by, *sums
