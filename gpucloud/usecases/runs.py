"""The runs of a job in a store: `digits`, then `digits-2`, …; each run's order says of which job it is which run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpucloud.domain.order import run_of
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


def next_run(base: str, last: int, taken: Collection[str]) -> tuple[str, int]:
    """Return name and number of a job's next run after its `last`, with no name that another job has."""
    number = last + 1
    while (name := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return name, number


def may_be_run(base: str, name: str) -> bool:
    """Whether a run of that name may be one of the job's; its order says whether it is."""
    return run_of(base, name) is not None
