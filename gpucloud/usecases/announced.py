"""What lasts for a while and is told once: hosts passed over, silence, the cloud's advice, missing rights, pauses."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpucloud.domain.job import Market
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.shown import in_one_line
from gpucloud.domain.supervision.action import Action, Wait
from gpucloud.domain.supervision.belief import vouched_for
from gpucloud.domain.supervision.elastic import AWAITING
from gpucloud.domain.supervision.membership import all_silent, is_gone, somebody_answers
from gpucloud.domain.supervision.seen import Limits, Seen
from gpucloud.domain.supervision.storm import PAUSING
from gpucloud.usecases.story import course_line, silence


@dataclass(slots=True)
class Announced:
    """What was told and still holds; when it holds again later, it is told again."""

    _told: set[str] = field(default_factory=set)
    _refusals: set[Refusal] = field(default_factory=set)
    _silent: bool = False

    def news(self, action: Action, seen: Seen, limits: Limits) -> tuple[str, ...]:
        """Return the lines that were not told yet."""
        passing = (*self._passed_over(seen), *self._silence(seen, limits))
        return (*passing, *_course(seen), *self._lasting(action, seen, limits))

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


def _course(seen: Seen) -> tuple[str, ...]:
    """What the job runs on from now on and why, and once that its deadline will be missed."""
    now, before = seen.heading.course if seen.heading is not None else None, seen.state.course
    if now is None or now == before:
        return ()
    turned = before is None or before.mode != now.mode
    return (*((course_line(now),) if turned else ()), *((now.warning,) if now.warning is not None else ()))


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
    return (action.why,) if isinstance(action, Wait) and action.why.startswith((PAUSING, AWAITING)) else ()
