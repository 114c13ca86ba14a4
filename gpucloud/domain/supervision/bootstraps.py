"""Machines that could not be prepared: what is written down of it, and how much it says against the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from gpucloud.domain.node import EndCause
from gpucloud.domain.state import FailedBootstrap, JobState, NodeLife

_TAKEN = (EndCause.INTERRUPTED, EndCause.CRASH, EndCause.SCHEDULE)
_SILENT_ROUNDS = 3
_KEPT = 64


class Prepared(str, Enum):
    """How one try to prepare a machine ended."""

    READY = "ready"
    FAILED = "failed"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapTry:
    """One try to prepare a machine."""

    node_id: str
    begun_at: datetime
    over_at: datetime
    how: Prepared


def noted(state: JobState, tries: Iterable[BootstrapTry]) -> JobState:
    """Return the state with the tries written down.

    A machine that is ready for the first time shows that nothing is wrong with the job: what failed before it is
    forgotten. One that was ready before shows nothing of the kind: each new supervisor prepares it again.
    """
    for one in tries:
        life = next((life for life in state.nodes if life.node_id == one.node_id), None)
        if one.how is Prepared.READY:
            first = life is None or not life.prepared
            state = replace(state, failed_bootstraps=() if first else state.failed_bootstraps)
        else:
            state = replace(state, failed_bootstraps=_with(state.failed_bootstraps, one))
        state = replace(state, nodes=tuple(_lived(life, one) for life in state.nodes))
    return state


def failures(state: JobState) -> int:
    """Return how often machines could not be prepared, since a new one could.

    Those that failed beside one another make a round, and count once: one outage fails them all. One that the cloud
    took meanwhile does not count, and silence counts little: the line may have been cut. Several rounds of it make a
    failure.
    """
    taken = {life.node_id for life in state.nodes if life.end_cause in _TAKEN}
    living = [one for one in state.failed_bootstraps if one.silent and one.node_id not in taken]
    loud = [one for one in state.failed_bootstraps if not one.silent]
    return _rounds(loud) + _rounds(living) // _SILENT_ROUNDS


def silences(state: JobState, node_id: str) -> int:
    """Return how often the machine did not answer when it was to be prepared."""
    return sum(one.times for one in state.failed_bootstraps if one.silent and one.node_id == node_id)


def _with(known: tuple[FailedBootstrap, ...], one: BootstrapTry) -> tuple[FailedBootstrap, ...]:
    silent = one.how is Prepared.SILENT
    before = next((k for k in known if (k.node_id, k.silent) == (one.node_id, silent)), None)
    if before is not None:
        again = replace(before, over_at=one.over_at, times=before.times + 1)
        return tuple(again if k is before else k for k in known)
    new = FailedBootstrap(node_id=one.node_id, begun_at=one.begun_at, over_at=one.over_at, silent=silent)
    return (*known, new)[-_KEPT:]


def _lived(life: NodeLife, one: BootstrapTry) -> NodeLife:
    if life.node_id != one.node_id:
        return life
    if one.how is Prepared.READY:
        return replace(life, prepared=True)  # it works with us once its agent has heard of us
    return replace(life, unprepared_at=life.unprepared_at or one.begun_at)


def _rounds(failed: Iterable[FailedBootstrap]) -> int:
    """Return how many of them began when the last one that counts was over."""
    rounds, last = 0, None
    for one in sorted(failed, key=lambda one: one.begun_at):
        if last is None or one.begun_at > last.over_at:
            rounds, last = rounds + 1, one
    return rounds
