"""What lasts for a while and is told once: hosts passed over, silence, the cloud's advice, missing rights, pauses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from gpucloud.domain.agentstatus import RunState
from gpucloud.domain.job import CheckpointPolicy, Market
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.shown import in_one_line
from gpucloud.domain.state import Attempt
from gpucloud.domain.supervision.action import Action, Wait
from gpucloud.domain.supervision.belief import vouched_for
from gpucloud.domain.supervision.between import IN_USE
from gpucloud.domain.supervision.during import DRILL_WAITS
from gpucloud.domain.supervision.elastic import AWAITING
from gpucloud.domain.supervision.membership import (
    all_silent,
    is_gone,
    members_of,
    part_of,
    progress_of,
    somebody_answers,
)
from gpucloud.domain.supervision.seen import Limits, Seen
from gpucloud.domain.supervision.storm import PAUSING
from gpucloud.usecases.story import course_line, silence

_FIRST_WORD = timedelta(minutes=1)


@dataclass(slots=True)
class Announced:
    """What was told and still holds; when it holds again later, it is told again."""

    _told: set[str] = field(default_factory=set)
    _refusals: set[Refusal] = field(default_factory=set)
    _silent: bool = False
    _protected: str | None = None

    def news(
        self, action: Action, seen: Seen, limits: Limits, policy: CheckpointPolicy | None = None
    ) -> tuple[str, ...]:
        """Return the lines that were not told yet; `policy` is what the job file says of checkpoints."""
        passing = (*self._passed_over(seen), *self._silence(seen, limits))
        return (*passing, *_course(seen), *self._protection(seen, policy), *self._lasting(action, seen, limits))

    def _protection(self, seen: Seen, policy: CheckpointPolicy | None) -> tuple[str, ...]:
        """Once how the script saves, by its own word, or after its first minute without one; again when it changes."""
        told = _how_it_saves(seen, policy)
        if told is None or told == self._protected:
            return ()
        self._protected = told
        return (told,)

    def _passed_over(self, seen: Seen) -> tuple[str, ...]:
        """Which of the user's own hosts were passed over: another has taken their place, so no action tells it."""
        found = tuple(
            refusal
            for refusal in dict.fromkeys(seen.group.refusals)
            if refusal.fault is Fault.TRANSIENT and refusal.pool.market is Market.OWNED
        )
        fresh = tuple(refusal for refusal in found if refusal not in self._refusals)
        self._refusals.update(fresh)
        return tuple(f"passed over: {refusal.message}" for refusal in fresh)

    def _silence(self, seen: Seen, limits: Limits) -> tuple[str, ...]:
        """Once that no machine answers, which may be our own line, and once that one does again."""
        silent = all_silent(seen, limits)
        if silent is self._silent or not (silent or somebody_answers(seen)):
            return ()
        self._silent = silent
        return (silence(seen) if silent else "machines answer again",)

    def _lasting(self, action: Action, seen: Seen, limits: Limits) -> tuple[str, ...]:
        now = {*_out_of_our_reach(seen, limits), *_advice(seen), *_undriven(seen, limits), *_told_wait(action)}
        fresh = tuple(sorted(now - self._told))
        self._told = now
        return fresh


def _how_it_saves(seen: Seen, policy: CheckpointPolicy | None) -> str | None:
    """Return what an interruption would cost the script that runs; None while nobody can tell."""
    attempt = seen.state.attempt
    if attempt is None or (policy is not None and policy.directory is not None):
        return None
    if progress_of(attempt, seen) is not None:
        return "the script saves with gpucloud.resume: an interruption costs a restart"
    saved = seen.checkpoint is not None or seen.state.checkpoint is not None
    meant = policy is not None and policy.none
    young = seen.now - attempt.started_at < _FIRST_WORD
    if saved or meant or young or not _is_at_work(attempt, seen):
        return None
    return "the script has not called gpucloud.resume so far: an interruption starts it at the beginning"


def _is_at_work(attempt: Attempt, seen: Seen) -> bool:
    parts = [part_of(attempt, node) for node in members_of(attempt, seen)]
    return any(part is not None and part.state is RunState.RUNNING for part in parts)


def _course(seen: Seen) -> tuple[str, ...]:
    """What the job runs on from now on and why, and once that its deadline will be missed."""
    now, before = seen.heading.course if seen.heading is not None else None, seen.state.course
    if now is None or now == before:
        return ()
    turned = before is None or before.mode != now.mode
    return (*((course_line(now, seen.now),) if turned else ()), *((now.warning,) if now.warning is not None else ()))


def _out_of_our_reach(seen: Seen, limits: Limits) -> tuple[str, ...]:
    return tuple(
        f"{n.node.id} does not answer us, but {n.witness} says that it lives: nothing is done to it"
        for n in vouched_for(seen, limits)
    )


def _advice(seen: Seen) -> tuple[str, ...]:
    return tuple(
        f"the cloud recommends to leave {n.node.id}: an early checkpoint is asked for, the training goes on"
        for n in seen.nodes
        if n.status is not None and n.status.rebalance is not None and n.status.notice is None and not is_gone(n)
    )


def _undriven(seen: Seen, limits: Limits) -> tuple[str, ...]:
    """Once that a machine which is to drive the job when this supervisor is gone may not, as far as it has tried."""
    return tuple(
        f"{n.node.id} could not drive the job without this process: {in_one_line(n.trial.refused)}"
        for n in seen.nodes
        if n.trial is not None and n.trial.refused is not None and n.trial.number == seen.state.order_number
        if seen.now - n.node.launched_at >= limits.granted
    )


def _told_wait(action: Action) -> tuple[str, ...]:
    return (
        (action.why,)
        if isinstance(action, Wait) and action.why.startswith((PAUSING, AWAITING, DRILL_WAITS, IN_USE))
        else ()
    )
