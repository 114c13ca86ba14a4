"""`reconcile`: one pass for a job, or for every one that is not torn down; what a cron or CI schedule calls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpucloud.cli.ending import end_here
from gpucloud.cli.onlookers import onlooker
from gpucloud.cli.render import say, say_json, table, tell
from gpucloud.cli.supervising import answer, bring_stored_home, with_limits
from gpucloud.cli.target import known_job, read_target
from gpucloud.domain.driving import Unattended
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.state import JobState
from gpucloud.domain.supervision.seen import Goal
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.lease import take
from gpucloud.usecases.start import is_closed
from gpucloud.usecases.supervise import supervisor
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.stored import jobs_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What became of one job's pass: how it stands, or why the pass failed."""

    job: str
    status: str
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
    cloud.require_key(known, cloud.asker(known).state())
    read = read_target(cloud, str(known.file), known.cloud)
    jobs = JobStore(cloud.store_of(known), known.name)
    lease = take(jobs, cloud.clock)
    goal = with_limits(Goal(nodes=read.job.resources.nodes), read.job, lease.state)
    lasting = lease.state.unattended_s
    unattended = Unattended(lasting=timedelta(seconds=lasting)) if lasting is not None else None
    world = cloud.world(read.job, known.name, unattended=unattended)
    with onlooker() as shown, supervisor(world, goal, lease, shown, lambda: None) as one:
        one.settle()
    bring_stored_home(cloud, read.job, known.name)


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


def _jobs(cloud: Gpucloud, store: str | None) -> tuple[KnownJob, ...]:
    known = {(one.store, one.name): one for one in cloud.home.known()}
    found = jobs_in(cloud, store) if store is not None else ()
    return tuple({**{(one.store, one.name): one for one in found}, **known}.values())


def _pass(cloud: Gpucloud, known: KnownJob) -> Passed | None:
    """Make the job's pass; None for a job that has ended and has nothing left."""
    try:
        state = cloud.asker(known).state()
        if state.status.ended and (state.torn_down or is_closed(state)):
            return None
        tell(f"{known.name}: one pass")
        if state.status.ended:
            with onlooker() as shown:
                end_here(cloud, known, state, shown)  # its teardown needs neither code nor secrets
        else:
            reconcile_known(cloud, known)
        return _standing(known, cloud.asker(known).state())
    except GpucloudError as error:
        tell(f"{known.name}: {error}")
        return Passed(
            job=known.name, status=error.code, exit_code=error.exit_code, message=error.message, hint=error.hint
        )


def _standing(known: KnownJob, state: JobState) -> Passed:
    code = state.exit_code if state.status.ended and state.exit_code else 0
    return Passed(job=known.name, status=state.status.value, exit_code=code, message=state.message or "")


def _json(one: Passed) -> dict[str, object]:
    return {
        "job": one.job,
        "status": one.status,
        "exit_code": one.exit_code,
        "message": one.message or None,
        "hint": one.hint,
    }


def _row(one: Passed) -> tuple[str, ...]:
    hint = f"; hint: {one.hint}" if one.hint else ""
    return one.job, one.status, str(one.exit_code), f"{one.message}{hint}"
