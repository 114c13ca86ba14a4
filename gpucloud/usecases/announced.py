"""What lasts for a while and is told once: machines that only we do not reach, the cloud's advice, pauses."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpucloud.domain.supervision.action import Action, Wait
from gpucloud.domain.supervision.belief import vouched_for
from gpucloud.domain.supervision.membership import is_gone
from gpucloud.domain.supervision.seen import Limits, Seen
from gpucloud.domain.supervision.storm import PAUSING


@dataclass(slots=True)
class Announced:
    """What was told and still holds; when it holds again later, it is told again."""

    _told: set[str] = field(default_factory=set)

    def news(self, action: Action, seen: Seen, limits: Limits) -> tuple[str, ...]:
        """Return the lines that were not told yet."""
        now = {*_out_of_our_reach(seen, limits), *_advice(seen), *_pause(action)}
        fresh = tuple(sorted(now - self._told))
        self._told = now
        return fresh


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


def _pause(action: Action) -> tuple[str, ...]:
    return (action.why,) if isinstance(action, Wait) and action.why.startswith(PAUSING) else ()
