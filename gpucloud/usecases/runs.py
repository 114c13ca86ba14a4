"""The runs of a job in a store: `digits`, then `digits-2`, …; each run's order says of which job it is which run."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.order import is_of_another_file, run_of
from gpucloud.domain.state import JobState
from gpucloud.ports import Clock
from gpucloud.store import ObjectStore
from gpucloud.store.contract import NoBucket
from gpucloud.usecases.jobstore import JobStore, job_names
from gpucloud.usecases.orders import Given, Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run as it stands in the store."""

    name: str
    state: JobState
    given: Given


def current_run(store: ObjectStore, base: str, clock: Clock) -> Found | None:
    """Return a job's newest run; None when there is none, or no store yet.

    A name proves nothing: `digits-2` is the second run of `digits`, or a job that is called so.
    """
    found: list[Found] = []
    try:
        names = job_names(store)
    except NoBucket:
        return None
    for name in names:
        jobs = JobStore(store, name)
        given = Orders(jobs=jobs, clock=clock).given() if may_be_run(base, name) else None
        loaded = jobs.believed() if given is not None and given.order.base == base else None
        if given is not None and loaded is not None:
            found.append(Found(name=name, state=loaded[0], given=given))
    return max(found, key=lambda one: one.given.order.run, default=None)


def require_own(found: Found, job: Job, spec_sha256: str, host: str, way: str) -> None:
    """UsageError for a run that another job file began: two jobs of one name would go on with each other's weights.

    `way` is how it can be meant all the same.
    """
    order, other = found.given.order, found.given.order.resolved.source
    is_there = order.host == host and other.is_file() and not other.samefile(job.source)
    if not is_of_another_file(order, job, spec_sha256, is_there=is_there):
        return
    whose = f"{other}" if order.host == host else f"{other} of {order.by}"
    stands = f", {found.state.status.value if found.state.status.ended else 'unfinished'}{_at_step(found.state)}"
    folder = re.sub(r"[^a-z0-9]+", "-", job.source.parent.name.lower()).strip("-") or "2"
    raise UsageError(
        f"{found.name} is a run of {whose}{stands}, and {job.source} is another job file of that name",
        hint=f"name: {job.name}-{folder} in this file; {way}",
    )


def _at_step(state: JobState) -> str:
    steps = [attempt.last_step for attempt in state.attempts if attempt.last_step is not None]
    return f" at step {max(steps)}" if steps else ""


def next_run(base: str, last: int, taken: Collection[str]) -> tuple[str, int]:
    """Return name and number of a job's next run after its `last`, with no name that another job has."""
    number = last + 1
    while (name := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return name, number


def may_be_run(base: str, name: str) -> bool:
    """Whether a run of that name may be one of the job's; its order says whether it is."""
    return run_of(base, name) is not None
