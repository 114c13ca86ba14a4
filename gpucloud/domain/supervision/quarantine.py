"""Nodes that take no part any more, machines that could not be prepared, setups that fail; what was done in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.job.quantities import format_span, span_of
from gpucloud.domain.node.node import EndCause, Fault
from gpucloud.domain.state.state import (
    Attempt,
    ExitReason,
    FailedBootstrap,
    InterruptionKind,
    JobState,
    Quarantine,
    UsageInterval,
)
from gpucloud.domain.supervision.action import CoolDown, Finish, QuarantineNodes
from gpucloud.domain.supervision.membership import is_gone, quarantined
from gpucloud.domain.supervision.snapshot import InUse, Limits, NodeSnapshot, Readiness, Snapshot
from gpucloud.domain.untrusted import in_one_line

_UNHEARD = timedelta(seconds=10)
QUARANTINED = "Quarantined"
"""The code of a cooldown that a pool of bad nodes got."""


def note_bad(snapshot: Snapshot, limits: Limits) -> QuarantineNodes | None:
    """Write down who was refused by the gate, who was found bad before an attempt, and who fell ill.

    So too whose GPUs others use for longer than is waited.
    """
    known = {one.node_id for one in snapshot.state.quarantined}
    alive = {node.node.id: node for node in snapshot.nodes if not is_gone(node)}
    found = {node_id: why for node_id, node in alive.items() if (why := _why(node)) is not None}
    used: frozenset[str] = frozenset()
    if snapshot.inspection is not None and snapshot.inspection.done:
        found.update({node_id: in_one_line(why) for node_id, why in snapshot.inspection.bad if node_id in alive})
        late = {
            one.node_id: in_one_line(one.why) for one in snapshot.inspection.in_use if _is_late(one, snapshot, limits)
        }
        used = frozenset(late.keys() & alive.keys() - found.keys())
        found.update({node_id: late[node_id] for node_id in sorted(used)})
    news = tuple((node_id, why) for node_id, why in found.items() if node_id not in known)
    return QuarantineNodes(nodes=news, may_pass=used & {node_id for node_id, _ in news}) if news else None


def to_replace(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the quarantined nodes that still live and are counted."""
    known = quarantined(snapshot.state)
    return tuple(n.node.id for n in snapshot.nodes if n.node.id in known and not is_gone(n) and not n.node.relieved)


def give_up_pool(snapshot: Snapshot, limits: Limits) -> CoolDown | None:
    """After some bad nodes in a row the pool is bad: it cools down, and another one is asked, if there is one."""
    bad = in_a_row(snapshot.state)
    if len(bad) < limits.quarantines:
        return None
    return CoolDown(
        pool=snapshot.state.pool,
        fault=Fault.CAPACITY,
        code=QUARANTINED,
        message=f"{len(bad)} nodes in a row were bad: {bad[-1].node_id}: {bad[-1].why}",
        length=limits.cooldown_longest,
        longest=limits.cooldown_longest,
    )


def stop_buying(snapshot: Snapshot, limits: Limits) -> Finish | None:
    """After some bad pools in a row it is not the machines: what all of them lack, the next ones lack too."""
    since = max((a.started_at for a in snapshot.state.attempts if a.last_step is not None), default=None)
    # A pool's last cooldown began so long before its end: a bad pool's has the greatest length from the first.
    bad = [c for c in snapshot.state.cooldowns if c.code == QUARANTINED]
    bad = [c for c in bad if since is None or c.until - limits.cooldown_longest > since]
    if len(bad) < limits.bad_pools:
        return None
    last = max(bad, key=lambda cooldown: cooldown.until)
    message = f"{len(bad)} pools in a row had bad machines; {last.pool}: {last.message}"
    return Finish(reason=ExitReason.UNPREPARED, message=message)


def in_a_row(state: JobState) -> tuple[Quarantine, ...]:
    """Return the nodes quarantined since an attempt last made a step, the job turned to its pool, or went on."""
    started = [attempt.started_at for attempt in state.attempts if attempt.last_step is not None]
    since = max([*started, *([state.pool_at] if state.pool_at is not None else [])], default=None)
    return tuple(one for one in state.quarantined[state.forgiven :] if since is None or one.at > since)


def _is_late(one: InUse, snapshot: Snapshot, limits: Limits) -> bool:
    return snapshot.now - one.since >= limits.in_use


def _why(node: NodeSnapshot) -> str | None:
    told = node.refused or (node.status.unhealthy if node.status is not None else None)
    return in_one_line(told) if told is not None else None


# Machines that could not be prepared: what is written down of it, and how much it says against the job.


_INTERRUPTED = (EndCause.INTERRUPTED, EndCause.CRASH, EndCause.SCHEDULE)
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


def noted(state: JobState, tries: Iterable[BootstrapTry], given_back: Collection[str] = ()) -> JobState:
    """Return the state with the tries written down; what failed on a machine that was given back failed for that.

    A machine that is ready for the first time shows that nothing is wrong with the job: what failed before it is
    forgotten. One that was ready before shows nothing of the kind: each new supervisor prepares it again.
    """
    for one in tries:
        interval = next((interval for interval in state.nodes if interval.node_id == one.node_id), None)
        if one.how is Prepared.READY:
            first = interval is None or not interval.prepared
            state = replace(state, failed_bootstraps=() if first else state.failed_bootstraps)
        elif one.node_id in given_back:
            continue
        else:
            state = replace(state, failed_bootstraps=_with(state.failed_bootstraps, one))
        state = replace(state, nodes=tuple(_lived(interval, one) for interval in state.nodes))
    return state


def failures(state: JobState) -> int:
    """Return how often machines could not be prepared, since a new one could.

    Those that failed beside one another make a round, and count once: one outage fails them all. One that the cloud
    took meanwhile does not count, and silence counts little: the line may have been cut. Several rounds of it make a
    failure.
    """
    interrupted = {interval.node_id for interval in state.nodes if interval.end_cause in _INTERRUPTED}
    living = [one for one in state.failed_bootstraps if one.silent and one.node_id not in interrupted]
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


def _lived(interval: UsageInterval, one: BootstrapTry) -> UsageInterval:
    if interval.node_id != one.node_id:
        return interval
    if one.how is Prepared.READY:
        return replace(interval, prepared=True)  # it works with us once its agent has heard of us
    return replace(interval, unprepared_at=interval.unprepared_at or one.begun_at)


def _rounds(failed: Iterable[FailedBootstrap]) -> int:
    """Return how many of them began when the last one that counts was over."""
    rounds, last = 0, None
    for one in sorted(failed, key=lambda one: one.begun_at):
        if last is None or one.begun_at > last.over_at:
            rounds, last = rounds + 1, one
    return rounds


# A setup that fails: whether that is the job's own fault, or one machine's.


def failed_setup(snapshot: Snapshot) -> str | None:
    """Return why the job's setup can work on no machine; None where it has worked on one, or may yet.

    One that is gone says nothing any more: after it failed, another one's may have worked, and that be gone as well.
    """
    if _has_worked(snapshot) or _may_work(snapshot):
        return None
    return next(
        (node.setup_failed for node in snapshot.nodes if node.setup_failed is not None and not is_gone(node)), None
    )


def is_in_doubt(node: NodeSnapshot, snapshot: Snapshot) -> bool:
    """Whether the machine's setup failed, and another one's is to tell whose fault that is."""
    return node.setup_failed is not None and not _has_worked(snapshot) and _may_work(snapshot)


def _has_worked(snapshot: Snapshot) -> bool:
    """Whether a machine has been made ready since the run was begun, or begun again: with this very setup."""
    opened = len(snapshot.state.attempts) > snapshot.state.reopened_after
    return opened or any(node.readiness is Readiness.READY and not is_gone(node) for node in snapshot.nodes)


def _may_work(snapshot: Snapshot) -> bool:
    return any(node.readiness is Readiness.PREPARING and not is_gone(node) for node in snapshot.nodes)


def why_replaced(node_id: str, snapshot: Snapshot) -> str:
    """Return why a machine is ended while its job goes on: nobody else ever says what was wrong with it."""
    node = next((one for one in snapshot.nodes if one.node.id == node_id), None)
    bad = next((one.why for one in snapshot.state.quarantined if one.node_id == node_id), None)
    if bad is not None or node is None:
        return bad or "it is listed no more"
    if node.node.relieved:
        return "it had a notice, and nobody has taken it"
    if node.readiness is Readiness.FAILED:
        return f"it could not be made ready: {in_one_line(node.error or 'nothing says why')}"
    if node.silent_for:
        return f"it has not answered for {format_span(node.silent_for)}"
    if node.node.host_key is None:
        return f"it has shown no host key for {format_span(snapshot.now - node.node.launched_at)}"
    if any(i.node_id == node_id and i.kind is InterruptionKind.FROZEN for i in snapshot.state.interruptions):
        return "nothing showed that it lives"
    return "what runs there does not end"


# What an attempt did that no checkpoint holds.


def undone_work(state: JobState, attempt: Attempt, now: datetime) -> timedelta | None:
    """Return for how long an attempt worked that saved nothing; None where its script had come to no step.

    What passed before its first step, and after its last one, is not done again. One that tells none has worked until
    it ended, or its first machine did, whenever that was seen.
    """
    begun, end = attempt.started_at, _worked_until(state, attempt, now)
    if attempt.first_step is not None:
        if attempt.stepped_at is None or attempt.last_step_at is None:
            return None
        one_step = span_of(attempt.pace_s or attempt.step_seconds or 0.0)
        begun, end = max(begun, attempt.stepped_at - one_step), min(end, attempt.last_step_at)
    return max(end - begun, timedelta(0))


def may_have_done_more(state: JobState, attempt: Attempt, now: datetime) -> bool:
    """Whether an attempt went on for long after its last step that anybody heard of."""
    heard = attempt.last_step_at
    return heard is not None and _worked_until(state, attempt, now) - heard > _UNHEARD


def _worked_until(state: JobState, attempt: Attempt, now: datetime) -> datetime:
    members = {member.node_id for member in attempt.members}
    stops = [one.stopped_at for one in state.interruptions if one.attempt == attempt.number]
    ends = [*stops, *(one.ended_at for one in state.nodes if one.node_id in members), attempt.ended_at]
    return min((at for at in ends if at is not None), default=now)
