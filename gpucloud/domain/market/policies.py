"""What a policy is told and what it answers; and the simple ones: uniform progress, greedy, elastic, one try.

Spans are seconds and prices are USD per hour, both as plain floats: a policy weighs them thousands of times in a
replay. Nothing here is a bill; the ledger counts money.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
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
    `saves_nothing`: its script begins anew on other machines.
    """

    work_s: float
    span_s: float
    changeover_s: float
    on_demand_usd_per_hour: float
    tick_s: float = 60.0
    handover_s: float | None = None
    nodes: int = 1
    least_nodes: int = 0
    saves_nothing: bool = False


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
    MISSED = "any machines would miss the deadline, and spot is cheaper"
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

    def held(self, seconds: float) -> Choice:
        """Return the same, to be trusted for so long."""
        return Choice(mode=self.mode, zone=self.zone, reason=self.reason, holds_s=seconds, nodes=self.nodes)


# The simple policies: uniform progress, greedy, a gang that goes on with fewer, one try from the beginning.


def uniform(task: Task, observation: Observation) -> Choice:
    """Return what Uniform Progress does as its authors' code acts.

    Wu et al., "Can't Be Late", NSDI 2024. Their text reads as if on-demand machines were given up as soon as the job is
    two changeovers ahead; their code keeps them until spot is there, which costs less (0.727 against 0.763 of on
    demand, on their own 2,400 windows). Spot machines are kept until they are interrupted.
    """
    holding = observation.holding
    if holding.mode is Mode.SPOT or math.isinf(task.span_s):
        return greedy(task, observation)
    done = task.work_s - observation.work_left_s
    elapsed = task.span_s - observation.time_left_s
    zone = cheapest(observation.zones, task.on_demand_usd_per_hour)
    if holding.mode is Mode.IDLE:
        ahead = done - elapsed * task.work_s / task.span_s
        if zone is not None:
            return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
        if ahead < 0:
            return Choice(mode=Mode.ON_DEMAND, reason=Reason.BEHIND)
        return Choice(mode=Mode.IDLE, reason=Reason.WAIT, holds_s=ahead * task.span_s / task.work_s)
    missing = (elapsed + 2 * task.changeover_s) * task.work_s / task.span_s - done
    if zone is None:
        return Choice(mode=Mode.ON_DEMAND)
    if missing <= 0:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.BEHIND, holds_s=_caught_up(task, missing, holding.boot_s))


def _caught_up(task: Task, missing_s: float, boot_s: float) -> float:
    """How long until machines that never stop have made up for what is missing: they gain 1 − C0/R0 of the time."""
    pace = task.work_s / task.span_s
    return boot_s + (missing_s + boot_s * pace) / (1 - pace) if pace < 1 else math.inf


# Spot whenever there is some, else waiting; the deadline is the net's business.


def greedy(task: Task, observation: Observation) -> Choice:
    """Return spot where it is up, else idle; what runs stays, on demand to the end.

    "Greedy" of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024.
    """
    holding = observation.holding
    if holding.mode is not Mode.IDLE:
        return Choice(mode=holding.mode, zone=holding.zone)
    zone = cheapest(observation.zones, task.on_demand_usd_per_hour)
    if zone is not None:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
    return Choice(mode=Mode.IDLE, reason=Reason.WAIT)


# A gang that lost some of its nodes: go on with the rest, which is better than idle, and grow again.


def is_partial(task: Task, observation: Observation) -> bool:
    """Whether the job runs on some of its spot nodes only."""
    return observation.holding.mode is Mode.SPOT and 0 < observation.holding.nodes < task.nodes


def elastic(task: Task, observation: Observation, wanted: Callable[[Observation], Choice]) -> Choice:
    """Return what a job does that runs on a part of its spot nodes.

    An hour of progress costs the same with fewer nodes, and no boot: so the rest goes on wherever `wanted` (the policy,
    asked as if nothing were held) would wait for spot. It moves to a zone that has all nodes if a changeover there
    takes hardly longer than regrouping here.
    """
    holding, handover_s = observation.holding, task.handover_s or 0.0
    zone = named(observation.zones, holding.zone)
    enlarged = _enlarged(task, holding.nodes, zone)
    if zone is not None and zone.up and enlarged == task.nodes:
        return Choice(mode=Mode.SPOT, zone=holding.zone)
    choice = wanted(dataclasses.replace(observation, holding=NOTHING))
    moves = choice.mode is Mode.SPOT and choice.zone != holding.zone and task.changeover_s <= 2 * handover_s
    if choice.mode is Mode.ON_DEMAND or moves:
        return choice
    return Choice(mode=Mode.SPOT, zone=holding.zone, reason=Reason.STAY, holds_s=task.tick_s, nodes=enlarged)


def _enlarged(task: Task, nodes: int, zone: ZoneState | None) -> int:
    """How many nodes to have in the zone: more than now where they are likely to be worth the time to regroup.

    More nodes make up for regrouping within handover · nodes / more. They are taken to last as long as they have been
    there (those of a part: no time at all), and their boot is a trial too: if they go, nothing is regrouped.
    """
    there = nodes if zone is None else task.nodes if zone.up else zone.nodes
    if zone is None or there <= nodes:
        return nodes
    handover_s = task.handover_s or 0.0
    tried_s = task.changeover_s - handover_s + (zone.age_s if zone.up else 0.0)
    return there if handover_s * nodes / (there - nodes) <= tried_s else nodes


# Which of the zones that are up a policy prefers.


def cheapest(zones: Iterable[ZoneState], below_usd_per_hour: float) -> ZoneState | None:
    """Return the cheapest zone among those that are up and cost less than that; the first of equals."""
    best = None
    for zone in zones:
        if zone.up and zone.usd_per_hour < below_usd_per_hour:
            best, below_usd_per_hour = zone, zone.usd_per_hour
    return best


def named(zones: Iterable[ZoneState], name: str | None) -> ZoneState | None:
    """Return the zone of that name."""
    return next((zone for zone in zones if zone.zone == name), None)


# For a script that saves nothing: one try at spot machines where it is likely to pay, and on demand else.
#
# Whatever ends its machines, or changes them, begins it anew. A try is a whole run; where that may fail just before its
# end, time and money for a whole run on demand must still be left.


_HOUR = 3600.0
_MEAN_LIFETIME_S = 2.1 * _HOUR  # the mean up-time of spot machines in the recording of April 2023


def anew(task: Task, observation: Observation) -> Choice:
    """Return spot where a try is affordable and its expected cost is below on demand; what runs stays as it is."""
    holding = observation.holding
    if math.isinf(task.span_s) or holding.mode is Mode.SPOT:
        return greedy(task, observation)
    if holding.mode is not Mode.IDLE:
        return Choice(mode=Mode.ON_DEMAND)
    zone = cheapest(observation.zones, task.on_demand_usd_per_hour)
    usd_per_hour = zone.usd_per_hour if zone else min((one.usd_per_hour for one in observation.zones), default=math.inf)
    spare_s = observation.time_left_s - 2 * (task.work_s + task.changeover_s)
    if spare_s < 0:
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)
    if not _pays(task, usd_per_hour):
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.EXPECTED)
    if observation.money_left_usd is not None and observation.money_left_usd < _two_runs_usd(task, usd_per_hour):
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.BUDGET)
    if zone is None:
        return Choice(mode=Mode.IDLE, reason=Reason.WAIT, holds_s=spare_s)
    return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)


def _pays(task: Task, usd_per_hour: float) -> bool:
    """Whether spot for as long as it lasts, and on demand where it does not last for a run, costs less than on demand.

    With lives of mean M, forgetful, and a run of x·M: p·M·(1 − e⁻ˣ) + (1 − e⁻ˣ)·k·x·M < k·x·M.
    """
    lifetimes = (task.work_s + task.changeover_s) / _MEAN_LIFETIME_S
    lasts = math.exp(-lifetimes)
    return usd_per_hour * (1 - lasts) < task.on_demand_usd_per_hour * lifetimes * lasts


def _two_runs_usd(task: Task, usd_per_hour: float) -> float:
    hours = (task.work_s + task.changeover_s) / _HOUR
    return task.nodes * (usd_per_hour + task.on_demand_usd_per_hour) * hours
