"""What a process has of a job that it comes to: all that going on takes, or what its end takes.

Every command that supervises comes by here, so that none asks for less than another, or for what it does not need.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.job import Job
from gpucloud.domain.order import is_finished
from gpucloud.domain.state import JobState
from gpucloud.usecases.orders import Given
from gpucloud.usecases.start import Start
from gpucloud.usecases.world import World
from gpucloud.wiring import Gpucloud, KnownJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is here: the job as it is meant here, and its world.

    `unsaved` says why the job's end is one without a last save, None where there is one, or nothing to save. `edited`
    is the line to tell where the job file says another job by now.
    """

    job: Job
    world: World
    unsaved: str | None = None
    edited: str | None = None


def means_for(cloud: Gpucloud, known: KnownJob, state: JobState, given: Given) -> Means:
    """Return what there is for the job as it was ordered: to go on with it, or to end it.

    Raises CredentialsError, JobFileError, StoreError, UsageError where it cannot be gone on with from here.
    """
    if state.status.ended or given.order.end is not None:
        return means_to_end(cloud, known, state, given)
    cloud.require_key(known, state)
    job, edited = cloud.ordered(known, given)
    return Means(job=job, edited=edited, world=cloud.world(job, known.name, unattended=given.order.unattended))


def means_to_go_on(cloud: Gpucloud, known: KnownJob, state: JobState, job: Job, start: Start) -> Means:
    """Return what there is for the job as its file here says, under a start's order. Raises what `means_for` raises.

    A run that lacks its teardown alone needs nothing.
    """
    order = start.order
    if is_finished(state) and not start.reopens:
        return Means(job=job, world=cloud.world(job, known.name, goes_on=False))
    cloud.require_key(known, state)
    job = cloud.with_pinned_code(job, known, order)
    return Means(job=job, world=cloud.world(job, known.name, unattended=order.unattended))


def means_to_end(cloud: Gpucloud, known: KnownJob, state: JobState, given: Given) -> Means:
    """Return what there is to end the job: with a last save where an attempt runs and its code and key are here.

    An end takes no secrets, and no key is made for it. Raises a StoreError that may pass: what there is to save is not
    given up for that.
    """
    job, edited = cloud.ordered(known, given, with_code=False)
    unsaved = None
    if not state.status.ended and not cloud.orders(known).is_trusted(given):
        unsaved = "its order is signed by nobody you trust"
    elif not state.status.ended:
        try:
            cloud.require_key(known, state)
            if state.attempt is not None:
                job, edited = cloud.ordered(known, given)
                unsaved = None if job.code.is_dir() else f"there is no folder {job.code}"
        except GpucloudError as error:
            if error.may_pass:
                raise
            unsaved = str(error)
    return Means(job=job, edited=edited, unsaved=unsaved, world=cloud.world(job, known.name, goes_on=False))
