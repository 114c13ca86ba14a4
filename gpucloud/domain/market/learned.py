"""The learned policy: looks up what a dynamic program over recorded markets found best, and what it counts."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gpucloud.domain.market.policies import Choice, Holding, Mode, Observation, Reason, Task, ZoneState, uniform

_HOUR = 3600.0


class Act(IntEnum):
    """What the program found best, in two bits."""

    IDLE = 0
    SPOT = 1
    ON_DEMAND = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What tables are made for: the task, in how many zones there may be spot machines, of what size and price."""

    task: Task
    zones: int
    gpus: int
    spot_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The best acts for one task on one market: `acts`, four stages to a byte, by (ticks left, market, stage, slack).

    The market is up or down by age bucket. `hazards` is what the program was told of it.
    """

    grid: Grid
    hazards: Hazards
    acts: bytes

    def act(self, left: int, market: int, slack: int, stage: int) -> Act:
        """Return the best act; `left` is the time left in ticks."""
        grid = self.grid
        row = (left * 2 * BUCKETS + market) * ((grid.stages + 3) // 4) + stage // 4
        return _ACTS[self.acts[row * (grid.slack + 1) + slack] >> 2 * (stage % 4) & 3]


_ACTS = tuple(Act)


def learned(tables: Tables, task: Task, observation: Observation) -> Choice:
    """Return what the tables say; spot machines that cost less than on demand are kept until they are interrupted.

    Where there is time for one more try that the tables' ticks are too long to show, as uniform progress.
    """
    holding = observation.holding
    if holding.mode is Mode.SPOT:
        return Choice(mode=Mode.SPOT, zone=holding.zone)
    grid = tables.grid
    slack_s = observation.time_left_s - observation.work_left_s
    if grid.hides_a_try(task, slack_s):
        return uniform(task, observation)
    work, slack = grid.up(observation.work_left_s), grid.down(slack_s)
    if slack < 0:
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)
    zone = preferred(observation.zones, tables.hazards, task)
    if holding.mode is Mode.BOTH:
        zone = next((one for one in observation.zones if one.zone == holding.zone), zone)
    slack = min(slack, grid.slack)
    act = tables.act(min(work + slack, grid.span), _market(observation.zones, zone), slack, grid.stage(holding))
    return _chosen(act, zone, grid.tick_s)


def preferred(zones: tuple[ZoneState, ...], hazards: Hazards, task: Task) -> ZoneState | None:
    """Return the zone whose hour of progress costs least, of those that are up and cheaper than on demand.

    With L hours to live, p·L / (L − d): the price of what remains after the changeover.
    """
    up = [zone for zone in zones if zone.up and zone.usd_per_hour < task.on_demand_usd_per_hour]
    if len(up) < 2:
        return up[0] if up else None
    lifetimes = remaining_h(hazards)
    d = task.changeover_s / _HOUR
    return min(up, key=lambda zone: _per_progress(zone.usd_per_hour, lifetimes[bucket(zone.age_s / _HOUR)], d))


def _per_progress(price: float, life_h: float, changeover_h: float) -> float:
    return price * life_h / max(life_h - changeover_h, life_h / 100)


def _market(zones: tuple[ZoneState, ...], zone: ZoneState | None) -> int:
    """The market's state: up by the age of the preferred zone, down by the time since any zone was up."""
    if zone is not None:
        return bucket(zone.age_s / _HOUR)
    return BUCKETS + bucket(min((one.age_s for one in zones if not one.up), default=0.0) / _HOUR)


def _chosen(act: Act, zone: ZoneState | None, tick_s: float) -> Choice:
    if zone is None or act is Act.ON_DEMAND or act is Act.IDLE:
        idle = act is Act.IDLE
        return Choice(
            mode=Mode.IDLE if idle else Mode.ON_DEMAND,
            reason=Reason.WAIT if idle else Reason.EXPECTED,
            holds_s=tick_s,
        )
    if act is Act.SPOT:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.EXPECTED)
    return Choice(mode=Mode.BOTH, zone=zone.zone, reason=Reason.EXPECTED, holds_s=tick_s)


# The ticks in which the learned policy's program counts.


_MOST_TICKS = 1200
_MOST_SLACK = 480
_MOST_STARTS = 24_000  # changeovers to the deadline that are counted one by one, where slack is small
_LEAST_TICK_S = 60.0
_MOST_PARTS = 16  # of a changeover; each is a situation more in every table
_FEWEST_PARTS = 0.6  # of the most that there may be
_EXACT = 1e-6  # of a tick: what rounding of seconds may leave over


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All spans in ticks of `tick_s`.

    `slack` is the time to the deadline that the work does not need. A launch takes `changeover` ticks, the last of
    which does some work when `lost` is less than 1: that is the part of it that is lost. `beside` ticks of it pass
    while on-demand machines still work, where machines may boot beside others (else 0).
    """

    tick_s: float
    work: int
    slack: int
    changeover: int
    beside: int
    lost: float = 1.0

    def hides_a_try(self, task: Task, slack_s: float) -> bool:
        """Whether there is time to try spot machines and still end in time, of which these ticks know nothing."""
        return self.lost < 1 and slack_s >= 2 * task.changeover_s and self.down(slack_s) < 2

    @property
    def span(self) -> int:
        """Ticks from submit to the deadline."""
        return self.work + self.slack

    @property
    def stages(self) -> int:
        """How many situations are told apart: idle, on demand by its boot left, spot beside it by its age."""
        return 1 + (self.changeover + 1) + self.beside

    def stage(self, holding: Holding) -> int:
        """Return which of the stages a holding is in, spot machines alone apart: those are kept."""
        if holding.mode is Mode.IDLE:
            return 0
        if holding.mode is Mode.ON_DEMAND:
            return 1 + min(self.up(holding.boot_s), self.changeover)
        return 1 + self.changeover + min(max(self.beside - self.up(holding.beside_s), 1), self.beside)

    def up(self, seconds: float) -> int:
        """Return the span in whole ticks, rounded up: of work, of a boot."""
        return math.ceil(seconds / self.tick_s - _EXACT)

    def down(self, seconds: float) -> int:
        """Return the span in whole ticks, rounded down: of time left."""
        return math.floor(seconds / self.tick_s + _EXACT)


def grid_of(task: Task) -> Grid:
    """Return ticks of which a changeover is a whole number, 1,200 of them to the deadline at about the most.

    With little slack, which makes the tables small, there may be more of them: one for each changeover. Where that too
    is too many, a changeover loses a part of a tick. Slack beyond 480 ticks is worth no more.
    """
    parts = _parts(task)
    tick_s = task.changeover_s / parts if parts else max(task.span_s / _MOST_TICKS, task.changeover_s, _LEAST_TICK_S)
    work = math.ceil(task.work_s / tick_s - _EXACT)
    slack = math.floor((task.span_s - task.work_s) / tick_s + _EXACT)  # of the difference: not of two roundings
    beside = 0 if task.handover_s is None or not parts else parts - math.ceil(task.handover_s / tick_s - _EXACT)
    return Grid(
        tick_s=tick_s,
        work=work,
        slack=min(max(slack, 0), _MOST_SLACK),
        changeover=max(parts, 1),
        beside=max(beside, 0),
        lost=1.0 if parts else task.changeover_s / tick_s,
    )


def _parts(task: Task) -> int:
    """Return how many ticks a changeover takes: of which a hand-over is most nearly a whole number, too.

    What it is rounded up by is lost in each, and makes the program shun them. 0 for a changeover within a tick.
    """
    most = round(task.changeover_s * _MOST_TICKS / task.span_s)
    most = min(most, int(task.changeover_s // _LEAST_TICK_S), _MOST_PARTS)

    def rounded_up(parts: int) -> float:
        handover = parts * (task.handover_s or 0.0) / task.changeover_s
        return round((math.ceil(handover - _EXACT) - handover) / parts, 3)

    if not most:
        return int(_is_small(task))
    return min(range(most, math.ceil(most * _FEWEST_PARTS) - 1, -1), key=rounded_up)


def _is_small(task: Task) -> bool:
    """Whether tables in ticks of a changeover are no larger than the largest of others."""
    starts, spare = (span_s / task.changeover_s for span_s in (task.span_s, task.span_s - task.work_s))
    return starts <= _MOST_STARTS and starts * spare <= _MOST_TICKS * _MOST_SLACK and task.changeover_s >= _LEAST_TICK_S


# How likely a spot zone comes and goes by the age of that state, counted on recorded markets.
#
# Up-times are heavy-tailed: half of them end within the hour, and what has lived through a day mostly lives through
# another. A rate per age bucket catches that; one rate for all ages does not.


EDGES_H = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Where the age buckets begin, in hours; the last has no end."""
BUCKETS = len(EDGES_H)
_LONGEST_H = 48.0
_WEIGHT_OF_MEAN = 2.0
_WEIGHT_OF_POOLED = 8.0

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a recording shows, by age bucket: hours up and down, and how often that state ended.

    Of several zones one is watched at a time: the one that a job would be on. `replaced` of the `lost` times another
    zone was up at once, whose age then lay in the bucket counted in `entered`.
    """

    up_ends: Row
    up_h: Row
    down_ends: Row
    down_h: Row
    lost: float
    replaced: float
    entered: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """Rates per hour at which an up or a down time ends, by age bucket.

    `replaced` is the probability that another zone is up when one is lost, `entered` of which age.
    """

    up_per_h: Row
    down_per_h: Row
    replaced: float
    entered: Row


def bucket(age_h: float) -> int:
    """Return the index of the age bucket."""
    return bisect_right(EDGES_H, age_h) - 1


def pooled(counts: Iterable[Counts]) -> Counts:
    """Return the sum of all that was counted."""
    every = list(counts)
    return Counts(
        up_ends=_sum([one.up_ends for one in every]),
        up_h=_sum([one.up_h for one in every]),
        down_ends=_sum([one.down_ends for one in every]),
        down_h=_sum([one.down_h for one in every]),
        lost=sum(one.lost for one in every),
        replaced=sum(one.replaced for one in every),
        entered=_sum([one.entered for one in every]),
    )


def learned_from(others: Counts, *nearer: Counts) -> Hazards:
    """Return the rates that other zones show, drawn to what each of the nearer shows: machines of that size, own past.

    Each rate is (events + a) / (hours + a / prior): a bucket with few hours says little, and takes after the prior,
    which for the others is their rate over all ages (a = 2), and for the nearer what came before them (a = 8).
    """
    found = Hazards(
        up_per_h=_rates(others.up_ends, others.up_h, _mean(others.up_ends, others.up_h), _WEIGHT_OF_MEAN),
        down_per_h=_rates(others.down_ends, others.down_h, _mean(others.down_ends, others.down_h), _WEIGHT_OF_MEAN),
        replaced=(others.replaced + 0.5) / (others.lost + 1.0),
        entered=_shares(others.entered, (1.0 / BUCKETS,) * BUCKETS),
    )
    a = _WEIGHT_OF_POOLED
    for counts in nearer:
        found = Hazards(
            up_per_h=_rates(counts.up_ends, counts.up_h, found.up_per_h, a),
            down_per_h=_rates(counts.down_ends, counts.down_h, found.down_per_h, a),
            replaced=(counts.replaced + a * found.replaced) / (counts.lost + a),
            entered=_shares(counts.entered, tuple(a * share for share in found.entered)),
        )
    return found


def remaining_h(hazards: Hazards) -> Row:
    """Return the up-time that may be expected still, in hours, by age bucket; two days at the most."""
    expected = [1 / hazards.up_per_h[-1]]
    spans = [end - start for start, end in itertools.pairwise(EDGES_H)]
    for span, rate in reversed(list(zip(spans, hazards.up_per_h[:-1], strict=True))):
        survives = math.exp(-rate * span)
        expected.append((1 - survives) / rate + survives * expected[-1])
    return tuple(min(hours, _LONGEST_H) for hours in reversed(expected))


def _sum(rows: Sequence[Row]) -> Row:
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0.0,) * BUCKETS


def _mean(ends: Row, hours: Row) -> Row:
    return (max(sum(ends), 0.5) / max(sum(hours), 1.0),) * BUCKETS


def _rates(ends: Row, hours: Row, prior: Row, weight: float) -> Row:
    return tuple((n + weight) / (h + weight / rate) for n, h, rate in zip(ends, hours, prior, strict=True))


def _shares(counted: Row, prior: Row) -> Row:
    whole = sum(counted) + sum(prior)
    return tuple((n + p) / whole for n, p in zip(counted, prior, strict=True))


# What a recorded market shows of how zones come and go.


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One tick of a recording: the zone that a job would be on (None: none is up), and the age of that state."""

    zone: int | None
    age_h: float


def watch(up: Sequence[Sequence[bool]], price: Sequence[Sequence[float]], tick_h: float) -> Iterator[Watched]:
    """Yield, tick by tick, the zone that a job would be on: the same while it is up, then the cheapest, the oldest.

    `up` and `price` are by tick and zone.
    """
    ages = [-1] * len(up[0])
    before: Sequence[bool] = up[0]
    zone, down = None, -1
    for now, prices in zip(up, price, strict=True):
        ages = [age + 1 if now[i] == before[i] else 0 for i, age in enumerate(ages)]
        if zone is None or not now[zone]:
            there = [i for i, is_up in enumerate(now) if is_up]
            found = min(there, key=lambda i: (prices[i], -ages[i]), default=None)
            down = down + 1 if found is None and zone is None else 0
            zone = found
        yield Watched(zone=zone, age_h=tick_h * (down if zone is None else ages[zone]))
        before = now


def count(ticks: Iterable[Watched], tick_h: float) -> Counts:
    """Return how long each state was watched and how often it ended, by age bucket."""
    ends = {True: [0.0] * BUCKETS, False: [0.0] * BUCKETS}
    hours = {True: [0.0] * BUCKETS, False: [0.0] * BUCKETS}
    entered = [0.0] * BUCKETS
    lost = replaced = 0.0
    for last, now in itertools.pairwise(ticks):
        is_up, at = last.zone is not None, bucket(last.age_h)
        hours[is_up][at] += tick_h
        if now.zone != last.zone:
            ends[is_up][at] += 1
            lost += is_up
            if is_up and now.zone is not None:
                replaced += 1
                entered[bucket(now.age_h)] += 1
    return Counts(
        up_ends=tuple(ends[True]),
        up_h=tuple(hours[True]),
        down_ends=tuple(ends[False]),
        down_h=tuple(hours[False]),
        lost=lost,
        replaced=replaced,
        entered=tuple(entered),
    )
