"""What a policy is told, and what it answers.

Spans are seconds and prices are USD per hour, both as plain floats: a policy weighs them thousands of times in a
replay. Nothing here is a bill; the ledger counts money.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Mode(Enum):
    """What a job runs on."""

    IDLE = "idle"
    SPOT = "spot"
    ON_DEMAND = "on demand"
    BOTH = "on demand, spot booting beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What stays the same from submit to deadline.

    `work_s` is how long all nodes compute without any interruption (C0 in the literature), `span_s` the time from
    submit to the deadline (R0; infinite without one). `changeover_s` (d) passes from a launch to the first useful step,
    work lost since the last checkpoint included; `handover_s` is what remains of it when the new machines booted while
    the old ones worked, None where the cloud cannot do that. Decisions are at most `tick_s` apart. Prices are of one
    node. A gang that loses some of its `nodes` may go on with `least_nodes` of them, in proportion (0: all or none).
    `begins_anew`: its script saves nothing, as the job file says, and begins anew on other machines.
    """

    work_s: float
    span_s: float
    changeover_s: float
    on_demand_usd_per_hour: float
    tick_s: float = 60.0
    handover_s: float | None = None
    nodes: int = 1
    least_nodes: int = 0
    begins_anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneState:
    """One spot pool as it was last seen: whether all the task's nodes could be had, since how long, at which price.

    `nodes` is how many of them there are while it is not up: 0, or a part that may do for an elastic task. `age_s`
    counts from the last time that `up` changed.
    """

    zone: str
    up: bool
    age_s: float
    usd_per_hour: float
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The machines that a job has: by `mode`, in `zone` when some of them are spot.

    `boot_s` passes until what is to work does its first useful step; `beside_s`, in `Mode.BOTH`, until the spot
    machines could take over. `spot_age_s` is how long the spot machines have been held, and `nodes` how many there
    are of them (0: all that the task asks for).
    """

    mode: Mode
    zone: str | None = None
    boot_s: float = 0.0
    beside_s: float = 0.0
    spot_age_s: float = 0.0
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that changes: work and time left, money left (None without a budget), what is held, and the zones."""

    work_left_s: float
    time_left_s: float
    holding: Holding
    zones: tuple[ZoneState, ...]
    money_left_usd: float | None = None


NOTHING = Holding(mode=Mode.IDLE)


# What a policy answers: what to run on, where, why, and for how long the answer holds.


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
