"""`reconcile`: one pass for a job, or for every one that is not torn down; what a cron or CI schedule calls."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.cli.commands.supervising import answer, bring_stored_home, means_for
from gpucloud.cli.faults import known_error
from gpucloud.cli.render.onlookers import onlooker
from gpucloud.cli.render.words import say, say_json, table, tell
from gpucloud.cli.target import known_job
from gpucloud.domain.errors import LeaseHeld
from gpucloud.domain.state.state import JobState, JobStatus
from gpucloud.usecases.job.session import Session
from gpucloud.usecases.jobstore.report import status_of
from gpucloud.usecases.supervise.story import missing_line
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.stored import FoundJob, jobs_in


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
    return answer(cloud.asker(known).report(), as_json=as_json)


def reconcile_known(cloud: Gpucloud, known: KnownJob) -> None:
    """Make one pass for a known job; LeaseHeld when somebody supervises it, CredentialsError without its SSH key."""
    state, orders = cloud.asker(known).state(), cloud.orders(known)
    means = means_for(cloud, known, state, orders.acted_on())
    if means.edited is not None:
        tell(means.edited)
    with onlooker() as shown:
        session = Session(world=means.world, orders=orders, watcher=shown)
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
        state = cloud.asker(known).state()
        if state.status.ended and state.torn_down:
            return _brought_late(cloud, known, state)
        tell(f"{known.name}: one pass")
        if state.status.ended:
            _end_unless_trusted(cloud, found, state)
            reconcile_known(cloud, known)
        else:
            reconcile_known(cloud, known)
        return _standing(known, cloud.asker(known).state())
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
    bring_stored_home(cloud, cloud.ordered(known, cloud.orders(known).newest(), with_code=False)[0], known)
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
