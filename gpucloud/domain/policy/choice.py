"""What a policy answers: what to run on, where, why, and for how long the answer holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.policy.observation import Mode


class Reason(Enum):
    """Why the choice is what it is, in words that follow a colon."""

    CHEAPEST = "spot is there"
    STAY = "what runs goes on"
    WAIT = "there is time to wait for spot"
    BEHIND = "behind the pace that the deadline asks for"
    DEADLINE = "no time is left for another interruption"
    BUDGET = "no money is left for another interruption"
    EXPECTED = "the least expected cost"
    ASKED = "asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Run on `mode`, spot machines in `zone`.

    `holds_s` says for how long the same would be chosen again while no zone, no price and no machine changes: whoever
    replays a market may leap there. `nodes` is how many spot nodes to take (0: all that the task asks for).
    """

    mode: Mode
    zone: str | None = None
    reason: Reason = Reason.STAY
    holds_s: float = math.inf
    nodes: int = 0
