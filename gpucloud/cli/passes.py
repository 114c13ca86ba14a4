"""`reconcile --all`: one pass for every job that is not torn down; what a cron or CI schedule calls."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.cli.onlookers import onlooker
from gpucloud.cli.render import say, say_json, table, tell
from gpucloud.cli.training import end_here, reconcile_known
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.state import JobState
from gpucloud.usecases.start import is_closed
from gpucloud.wiring import Gpucloud, KnownJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What became of one job's pass: how it stands, or why the pass failed."""

    job: str
    status: str
    exit_code: int = 0
    message: str = ""
    hint: str | None = None


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
    found = cloud.jobs_in(store) if store is not None else ()
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
