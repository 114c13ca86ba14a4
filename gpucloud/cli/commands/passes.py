"""`reconcile` and `budget`, `down` and `rm`: one pass for a job, another budget, its end, its deletion."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from gpucloud.cli.commands.supervising import answer, answer_left, bring_stored_home, onlooker_of
from gpucloud.cli.faults import known_error
from gpucloud.cli.interrupts import Leave, obeyed
from gpucloud.cli.render.bills import (
    for_later,
    left_amount,
    left_rows,
    let_go_words,
    money_json,
    money_line,
    plain_amount,
    used_rows,
)
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.use import condition_and_reason, condition_word
from gpucloud.cli.render.ways import missing_lines
from gpucloud.cli.render.words import (
    as_argument,
    is_meant,
    is_somebody_there,
    is_typed,
    say,
    say_json,
    say_words,
    table,
    tell,
    usd,
)
from gpucloud.cli.target import (
    called,
    deleted_words,
    known_job,
    other_runs,
    report_of,
    require_one_run,
    say_what_costs_on,
)
from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job.quantities import format_usd
from gpucloud.domain.state.order import BudgetChange, Order
from gpucloud.domain.state.state import MissingOutput
from gpucloud.domain.supervision.snapshot import outputs_on_hosts
from gpucloud.store.contract import StoreAway
from gpucloud.usecases.job.jobs import kept_of
from gpucloud.usecases.jobstore.condition import ConditionKind
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.found import FoundJob, jobs_in, what_stays
from gpucloud.wiring.jobs import (
    access_to,
    asker_of,
    budget_changer,
    deleter_of,
    ender_of,
    ends_leftovers,
    leftovers,
    reconciler_of,
    require_nothing_left,
    state_of,
    unlisted_fleet,
    where_listed,
)

if TYPE_CHECKING:
    from gpucloud.usecases.job.passes import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What became of one job's pass: how the job stands, None where that cannot be told, or why none was made.

    `error` is the code of what kept it from its pass; `lease_held` by somebody who sees to it is no failure, nor
    is `deleted`.
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
    with onlooker_of(cloud, known) as shown:
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
        name = called(cloud, known)
        if cloud.is_deleted(known):
            tell(f"{name}: {deleted_words(name)}")
            return Passed(job=name, error="deleted", message=deleted_words(name))
        error = known_error(fault)
        tell(f"{known.name}: {error}")
        return Passed(
            job=name,
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
    """Bring home what is still in the store of a job that is over; None where nothing can come, as almost always."""
    if not (cloud.has_home(known) and cloud.has_stored_outputs(known)):
        return None
    tell(f"{known.name}: one pass")
    bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    return _standing(report_of(cloud, known))


def _standing(report: JobReport) -> Passed:
    said = (*((report.message,) if report.message else ()), *missing_lines(report))
    return Passed(job=report.job, report=report, exit_code=report.exit_code or 0, message="; ".join(said))


def _json(one: Passed) -> dict[str, object]:
    return {
        "job": as_argument(one.job),
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


def budget(target: str | None, wanted: Decimal | None, *, as_json: bool) -> int:
    """Show the job's budget, or have it changed and wait until that is in force; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = asker_of(cloud, known)
    if wanted is not None:
        cloud.home.give_reserve(whole=False)
        state = asker.state()
        if asker.supervisor() is None:  # else whoever supervises it, there, has it in force
            access_to(cloud, known).require_fleet(state)
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
    spend, is_over = report.spend, report.kind is ConditionKind.ENDED
    rows = [
        ("budget", format_usd(spend.budget_usd)),
        ("spent", money_line(spend)),
        *used_rows(spend),
        *(left_rows(spend, for_later(report)) or [("unused" if is_over else "left", f"{left_amount(spend)} USD")]),
    ]
    parts = [f"{report.job}: {condition_word(report)}", table(rows)]
    if order.budget_changes:
        parts.append(table([("changed (UTC)", "by", "from", "to"), *map(_change_row, order.budget_changes)]))
    return "\n\n".join(parts)


def _change_row(change: BudgetChange) -> tuple[str, ...]:
    sums = (f"{plain_amount(usd)} USD" for usd in (change.old_usd, change.new_usd))
    return f"{change.at:%Y-%m-%d %H:%M:%S}", change.by, *sums


# `down`: saves and ends a job, and shows that nothing of it is left.


def down(target: str | None, *, adopts: bool = False, abandons: bool = False, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    cloud.home.give_reserve()
    known = known_job(cloud, target, only_own="down", adopts=adopts)
    ender = ender_of(cloud, known, abandons=abandons)
    away = unlisted_fleet(ender)
    try:
        with onlooker_of(cloud, known) as shown, obeyed(shown, asks=False) as interrupts:
            ender.end(shown, interrupts.wanted_end)
            bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    except Leave as leave:
        return answer_left(ender.asker, leave, as_json=as_json)
    ender.require_empty()
    report = report_of(cloud, known)
    if as_json:
        say_json({**report_json(report), "left_over": [] if away is None else None})
    else:
        say_words(report_text(report))
        tell("listed again: no machines, no node group" if away is None else away)
    say_what_costs_on(ender.asker, report.job)
    if target is None or target != known.name:
        _say_what_is_kept(cloud, known)
    return 0


def _say_what_is_kept(cloud: Gpucloud, ended: KnownJob) -> None:
    """Tell which other runs of the job file have machines: who names the file may mean them too."""
    for other in cloud.home.known():
        if other.file != ended.file or (other.name, other.store) == (ended.name, ended.store):
            continue
        with suppress(GpucloudError):  # of a run that cannot be looked at, `status` says why
            asker = asker_of(cloud, other)
            state = asker.state()
            kept = kept_of(asker.order(), state, asker.listed(state), asker.clock.now())
            if kept is not None:
                tell(str(kept))


def end_unsaved(cloud: Gpucloud, known: KnownJob) -> None:
    """End a run that nobody supervises and that is worth nothing, its machines at once. Raises Leave."""
    with onlooker_of(cloud, known) as shown, obeyed(shown, asks=False) as interrupts:
        ender_of(cloud, known).end_unsaved(shown, interrupts.wanted_end)


# `rm`: deletes what the store and this machine keep of a job that is over; a job with anything alive is refused.


def rm(
    target: str | None,
    *,
    with_checkpoints: bool,
    with_outputs: bool,
    adopts: bool = False,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete a job that has ended: its state, output, bills; its checkpoints and results if told so; return the code.

    UsageError while anything of it is alive, and for checkpoints or results that nobody said may go. Results on the
    user's own hosts stay there.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target, only_own="rm", adopts=adopts)
    require_one_run(cloud, target, "gpucloud rm JOB")
    name = called(cloud, known)
    if (away := cloud.why_away(known)) is not None:
        if cloud.is_deleted(known):
            return _forget(cloud, known, name, yes=yes, as_json=as_json)
        raise away
    deleter = deleter_of(cloud, known, lambda: _require_over(cloud, known, name, with_outputs=with_outputs))
    deleter.require_over()
    stored = deleter.stored()
    _require_allowed(name, stored, with_checkpoints=with_checkpoints)
    if not deleter.jobs.exists():
        listed = f"no machine of it is listed{where_listed(cloud, known)}"
        tell(f"{name} has no state: it never began, or that is lost; {listed}")
    stay = f"; results of {name} stay in {home}" if (home := cloud.kept_results(known)) else ""
    tell(f"{name}: {stored} in {known.store}; `gpucloud cost` will no longer know it{stay}")
    named = (("--with-checkpoints", with_checkpoints), ("--with-outputs", with_outputs), ("--adopt", adopts))
    if not yes and not is_meant(" ".join(["gpucloud rm", name, *(word for word, given in named if given), "--yes"])):
        return 2
    run = f"the run of {name}" if cloud.home.means_another(known) else name
    if others := other_runs(cloud, known):
        tell(f"of {len(others) + 1} runs, only {run} is deleted; the others stay: {', '.join(others)}")
    if (state := state_of(cloud, known)) is not None and (lying := outputs_on_hosts(state)):
        tell(f"results stay on your own hosts: {_where(lying)}")
    deleter.delete(stored, name)
    cloud.home.forget(known)
    if deleter.jobs.exists() and not cloud.home.means_another(known):  # a new run of the name, known by the same entry
        cloud.home.remember(known)
    if as_json:
        say_json({"job": known.name, "store": known.store, "objects": len(stored.keys), "bytes": stored.size})
    else:
        say(f"{run} is deleted: {stored}")
    return 0


def forget(target: str | None, *, yes: bool, as_json: bool) -> int:
    """Remove what this machine keeps of a job whose store is away, or is another by now; return the exit code.

    What may still run of it, and cost, is said first. UsageError where its store is there, and has something of it. Of
    one that cannot be asked, as without credentials, nobody but a person can say that it is lost: else its error.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    if (away := cloud.why_away(known)) is None:
        raise UsageError(
            f"{known.store} is there, and has something of {known.name}",
            hint=f"gpucloud down {known.name} ends it, gpucloud rm {known.name} deletes it",
        )
    is_away = isinstance(away, StoreAway | UsageError)
    if not is_away and not is_somebody_there():
        way = f"where it is lost for good, gpucloud rm {known.name} --forget on a terminal has that confirmed"
        tell(f"nothing is forgotten: {known.store} cannot be asked, and may be there; {way}")
        raise away
    tell(f"{known.name}: {away}")
    for line in what_stays(cloud, known):
        tell(line)
    if not is_away and not is_typed(known.name, f"{known.store} may be there. To forget its job all the same"):
        raise away
    return _forget(cloud, known, known.name, yes=yes, as_json=as_json, way=" --forget")


def _forget(cloud: Gpucloud, known: KnownJob, name: str, *, yes: bool, as_json: bool, way: str = "") -> int:
    """Remove what this machine keeps of a job of which its store has nothing; return the exit code."""
    kept = "what is kept here of it, the key to its machines, goes"
    tell(kept if way else f"{name}: nothing of it is in {known.store}; {kept} too")
    if not yes and not is_meant(f"gpucloud rm {name}{way} --yes"):
        return 2
    cloud.home.clear(known)
    cloud.home.forget(known)
    if as_json:
        say_json({"job": known.name, "store": known.store, "objects": 0, "bytes": 0})
    else:
        say(f"{name} is forgotten: {'its store is away' if way else 'nothing of it was in its store'}")
    return 0


def _require_allowed(name: str, stored: Stored, *, with_checkpoints: bool) -> None:
    if stored.checkpoints and not with_checkpoints:
        raise UsageError(
            f"{name} has {stored.saved}",
            hint=f"gpucloud rm {name} --with-checkpoints deletes them too;"
            f" gpucloud checkpoints {name} --pull DIR brings one here first",
        )


def _require_over(cloud: Gpucloud, known: KnownJob, name: str, *, with_outputs: bool) -> None:
    state = state_of(cloud, known)
    if state is None:
        require_nothing_left(cloud, known, name)
    elif not state.status.ended or not state.torn_down:
        raise _not_over(report_of(cloud, known), name)
    elif left := leftovers(cloud, known):
        raise UsageError(f"of {name} is still listed: {', '.join(left)}", hint=ends_leftovers(known))
    elif let_go := let_go_words(state.nodes, cloud.clock.now()):
        raise UsageError(f"{let_go}: nothing else tells of that", hint=f"gpucloud rm {name} once that time is over")
    if not with_outputs and cloud.has_stored_outputs(known):
        here = cloud.has_home(known) and state is not None
        way = f"down {name} brings them home" if here else f"cp -r {name}:@store/outputs FOLDER copies them"
        hint = f"gpucloud {way}; gpucloud rm {name} --with-outputs deletes them too"
        raise UsageError(f"results of {name} are in the store", hint=hint)
    if not with_outputs and state is not None and (lying := outputs_on_hosts(state)):
        raise UsageError(
            f"results of {name} are on your own hosts, and nothing else says where: {_where(lying)}",
            hint=f"copy them from there; gpucloud rm {name} --with-outputs leaves them there and forgets where",
        )


def _where(lying: tuple[MissingOutput, ...]) -> str:
    return "; ".join(f"{one.path} {one.why}" for one in lying)


def _not_over(report: JobReport, name: str) -> UsageError:
    """Return why nothing of the job is deleted yet, and what is to be done first."""
    down, why = f"gpucloud down {name}", f"{report.job} is not over: {condition_word(report)}"
    match report.kind:
        case ConditionKind.HELD:
            why = f"{report.job} has failed, and its machines wait for a mended {report.awaits}"
            hint = f"{down} ends them; gpucloud train {name} goes on with them"
        case ConditionKind.KEPT:
            why, hint = f"{report.job} has succeeded, and its machines are kept for a look", f"{down} ends them"
        case ConditionKind.ENDING if report.supervisor is not None:
            why = f"{report.job} has {report.status.value}, and {report.supervisor} still ends its machines"
            hint = f"{down} waits for that"
        case ConditionKind.ENDING | ConditionKind.ENDED:
            why = f"{report.job} has {report.status.value}, and is not wound up: machines or results may be left"
            hint = f"{down} {'brings home what is there, and ' if report.home is not None else ''}removes the rest"
        case ConditionKind.TRAINED:
            hint = f"{down} {'brings home what is there, and ' if report.to_come else ''}ends its machines"
        case _:
            hint = f"{down} ends it and brings home what is there; gpucloud train {name} goes on with it"
    return UsageError(why, hint=hint)
