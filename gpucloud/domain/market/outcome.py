"""What replays come to: a job's machines from launch to end and what they cost, each replay, all of them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import ROUND_UP, Decimal

from gpucloud.domain.checkpoint.protection import OTHERWISE, Saving
from gpucloud.domain.job.spec import Job
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.recordings import ZoneView
from gpucloud.domain.market.sizing import (
    SaveTimes,
    cheapest_interval,
    interval,
    interval_with_notice,
    save_times,
    saved_bytes,
)
from gpucloud.domain.money.costs import usd_of_saves
from gpucloud.domain.money.ledger import Rates, Terms
from gpucloud.domain.node.node import EndCause

ON_DEMAND = -1
"""The zone of machines that are no spot machines."""

_HOUR = 3600.0
_FREE_S = Terms().free_when_interrupted_within.total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """`nodes` machines of the zone with index `zone`, from launch to end, in seconds since the recording began."""

    zone: int
    nodes: int
    launched_s: float
    ended_s: float
    cause: EndCause


@dataclass(slots=True)
class Rented:
    """Machines that are paid for now; `joins` while they boot beside others.

    `usd` is what they have cost so far without what stands beside them, which is due for machines that are interrupted,
    too.
    """

    zone: int
    nodes: int
    launched_s: float
    joins: bool = False
    usd: float = 0.0


class Fleet:
    """At most one group of spot machines, and one on demand. `usd` is a running sum; the lives make the bill.

    `spot` are the group's machines by their launches, all in one zone: an elastic group grows. `held` is how many they
    are, and `working` how many of them work, or will once the group has booted. Of each price `extras_usd_per_hour` is
    for disk and address.
    """

    def __init__(self, task: Task, extras_usd_per_hour: float = 0.0) -> None:
        self._task, self._extras_usd_per_hour = task, extras_usd_per_hour
        self.spot: list[Rented] = []
        self.held = self.working = 0
        self.on_demand: Rented | None = None
        self.usd = 0.0
        self.interruptions = self.launches = 0
        self.lifetimes: list[Lifetime] = []

    @property
    def joining(self) -> bool:
        """Whether spot machines boot beside others of their group."""
        return self.working < self.held

    def holds(self, zone: int | None, nodes: int, *, on_demand: bool) -> bool:
        """Whether it has just these machines: so many on spot in that zone (None: none), and on demand some or none."""
        spot = self.held == nodes and self.spot[0].zone == zone if self.spot else zone is None
        return spot and (self.on_demand is not None) is on_demand

    def rent_spot(self, zone: int | None, nodes: int, now_s: float) -> bool:
        """Have this group of spot machines and no other (none for None); return whether it is a new one.

        A group of fewer in the same zone grows, and one that was to grow gives up those that boot.
        """
        if self.spot and (self.spot[0].zone != zone or nodes < self.working):
            self._end_spot(now_s)
        elif nodes < self.held:
            self._end_spot(now_s, only_joining=True)
        if zone is None or nodes == self.held:
            return False
        self.spot.append(self._launched(zone, nodes - self.held, now_s))
        self.spot[-1].joins = self.held > 0
        self.held = nodes
        if not self.spot[-1].joins:
            self.working = nodes
            return True
        return False

    def join(self) -> None:
        """Let all machines of the group work."""
        for rented in self.spot:
            rented.joins = False
        self.working = self.held

    def rent_on_demand(self, now_s: float, *, wanted: bool) -> bool:
        """Have on-demand machines or none; return whether they are new."""
        if self.on_demand is not None and not wanted:
            self._end(self.on_demand, self.on_demand.nodes, now_s, EndCause.CHOICE)
            self.on_demand = None
        if not wanted or self.on_demand is not None:
            return False
        self.on_demand = self._launched(ON_DEMAND, self._task.nodes, now_s)
        return True

    def lose(self, views: tuple[ZoneView, ...], now_s: float) -> bool:
        """End the spot machines that their zone has no more, the youngest first; return whether any worked.

        Too few to go on with are ended by choice. What is interrupted early enough is not charged.
        """
        gone = self.held - views[self.spot[0].zone].nodes if self.spot else 0
        if gone <= 0:
            return False
        before = self.working
        self.interruptions += 1
        while gone > 0:
            gone -= self._take(gone, now_s)
        if self.working < (self._task.least_nodes or self._task.nodes):
            self._end_spot(now_s)
        return self.working < before

    def pay(self, seconds: float, views: tuple[ZoneView, ...]) -> None:
        """Count what the machines cost in so many seconds, over which no price changes."""
        for rented in self.spot:
            self._count(rented, views[rented.zone].usd_per_hour, seconds)
        if self.on_demand is not None:
            self._count(self.on_demand, self._task.on_demand_usd_per_hour, seconds)

    def end(self, now_s: float) -> None:
        """End every machine."""
        self.rent_spot(None, 0, now_s)
        self.rent_on_demand(now_s, wanted=False)

    def _take(self, most: int, now_s: float) -> int:
        """Take up to so many of the youngest machines; return how many."""
        rented = self.spot[-1]
        interrupted = min(most, rented.nodes)
        usd = rented.usd * interrupted / rented.nodes
        if now_s - rented.launched_s < _FREE_S:
            self.usd -= usd
        self._end(rented, interrupted, now_s, EndCause.INTERRUPTED)
        rented.nodes -= interrupted
        rented.usd -= usd
        self.held -= interrupted
        self.working -= 0 if rented.joins else interrupted
        if not rented.nodes:
            self.spot.pop()
        return interrupted

    def _end_spot(self, now_s: float, *, only_joining: bool = False) -> None:
        for rented in self.spot:
            if rented.joins or not only_joining:
                self._end(rented, rented.nodes, now_s, EndCause.CHOICE)
        self.spot = [rented for rented in self.spot if only_joining and not rented.joins]
        self.held = self.working = self.working if only_joining else 0

    def _launched(self, zone: int, nodes: int, now_s: float) -> Rented:
        self.launches += 1
        return Rented(zone=zone, nodes=nodes, launched_s=now_s)

    def _count(self, rented: Rented, usd_per_hour: float, seconds: float) -> None:
        node_hours = rented.nodes * seconds / _HOUR
        rented.usd += (usd_per_hour - self._extras_usd_per_hour) * node_hours
        self.usd += usd_per_hour * node_hours

    def _end(self, rented: Rented, nodes: int, now_s: float, cause: EndCause) -> None:
        if nodes:
            lifetime = Lifetime(zone=rented.zone, nodes=nodes, launched_s=rented.launched_s, ended_s=now_s, cause=cause)
            self.lifetimes.append(lifetime)


# What replays of one job came to: each one, all together, and what that says of the job to come.


_CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay: its bill, when the work was done, and what went wrong.

    `took` is None where recording, budget or deadline (`late`) ended first. `on_spot` is for how long it had spot
    machines.
    """

    usd: Decimal
    took: timedelta | None
    missed: bool
    over_budget: bool
    interruptions: int
    launches: int
    on_spot: timedelta = timedelta(0)
    late: bool = False

    @property
    def ended(self) -> bool:
        """Whether the job came to its end, or to that of its budget: only then is known what it costs."""
        return self.took is not None or self.over_budget

    @property
    def on_demand_alone(self) -> bool:
        """Whether it never had a spot machine."""
        return self.launches > 0 and not self.on_spot and not self.interruptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many replays of one job under one policy: costs in USD to the cent, means of the rest; all of those that finish.

    The `late` of them were ended by the deadline, and the `unended` came to no end before the recording did: what they
    had still cost is not known, and not in the sums.
    `on_demand_alone` of them never had a spot machine.
    """

    windows: int
    mean_usd: Decimal
    p90_usd: Decimal | None
    """What nine in ten of all did not pass; None where more than the tenth came to no end of their work or budget."""
    worst_usd: Decimal | None
    """None where any came to no such end."""
    missed: int
    over_budget: int
    interruptions: float
    launches: float
    took: timedelta | None
    on_spot: timedelta = timedelta(0)
    unended: int = 0
    late: int = 0
    on_demand_alone: int = 0

    @property
    def is_mostly_on_demand(self) -> bool:
        """Whether most of them never had a spot machine, though there was a market of them."""
        return 2 * self.on_demand_alone > self.windows

    @property
    def unfinished(self) -> int:
        """How many did not come to the end of their work: budget, deadline or recording ended before."""
        return self.over_budget + self.late + self.unended

    @property
    def known_mean_usd(self) -> Decimal | None:
        """The mean; None where none came to the end of its work or its budget: what was paid by then is no cost."""
        return self.mean_usd if self.late + self.unended < self.windows or not self.windows else None

    @property
    def is_mostly_unfinished(self) -> bool:
        """Whether `took` is of so few that it says nothing."""
        return 2 * self.unfinished > self.windows

    def uses_up(self, budget_usd: Decimal, *, one_in: int) -> bool:
        """Whether more than one in so many that ended used up the budget before its work was done."""
        if not self.windows:
            return self.mean_usd > budget_usd
        return self.over_budget * one_in > self.windows - self.unended

    def mostly_fails(self, budget_usd: Decimal) -> bool:
        """Whether most of them kept neither deadline nor budget, or came to no end."""
        return 2 * self.missed > self.windows if self.windows else self.uses_up(budget_usd, one_in=1)


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Return the outcomes taken together; means are of those that came to their end, for the others would cost more.

    The 90th percentile is by nearest rank: the least cost that nine in ten did not pass; it and the worst are of those
    that the budget ended, too, and those without an end, or ended by the deadline, are taken to cost more than any.
    Where none came to its end, means are of these; and where no outcome has any end, they are of what was paid until
    the deadline, or the recording's end.
    """
    ended = [one for one in outcomes if one.ended]
    done = [one for one in outcomes if one.took is not None]
    told, costs = done or ended or outcomes, sorted(one.usd for one in ended)
    return Summary(
        windows=len(outcomes),
        mean_usd=(sum((one.usd for one in told), Decimal(0)) / len(told)).quantize(_CENT),
        p90_usd=_of_rank(costs, math.ceil(0.9 * len(outcomes))),
        worst_usd=_of_rank(costs, len(outcomes)),
        missed=sum(one.missed for one in outcomes),
        over_budget=sum(one.over_budget for one in outcomes),
        interruptions=_mean(told, lambda one: one.interruptions),
        launches=_mean(told, lambda one: one.launches),
        took=sum((one.took for one in done if one.took is not None), timedelta(0)) / len(done) if done else None,
        on_spot=sum((one.on_spot for one in told), timedelta(0)) / len(told),
        unended=sum(not (one.ended or one.late) for one in outcomes),
        late=sum(one.late for one in outcomes),
        on_demand_alone=sum(one.on_demand_alone for one in outcomes),
    )


def _of_rank(costs: Sequence[Decimal], rank: int) -> Decimal | None:
    return costs[rank - 1].quantize(_CENT, ROUND_UP) if rank <= len(costs) else None


def _mean(outcomes: Sequence[Outcome], count: Callable[[Outcome], int]) -> float:
    return sum(map(count, outcomes)) / len(outcomes)


# What a job is going to cost and when it will be done: sums of replays, fitted to the job itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """How often a job saves by itself, what a save takes, and how often would do if every notice came."""

    every: timedelta
    with_notice: timedelta
    between: timedelta
    times: SaveTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What checkpoints of `size` bytes cost in S3 beside the budget, saved at that interval; and at the cheapest."""

    size: int
    saves: int
    usd: Decimal
    cheapest_every: timedelta
    cheapest_usd: Decimal


def undisturbed(task: Task, start: timedelta) -> Summary:
    """Return what a job comes to on machines that nobody takes, at the task's price; of no window at all.

    `start` is their time until they train.
    """
    took = timedelta(seconds=task.work_s) + start
    hourly = Decimal(str(task.on_demand_usd_per_hour)) * task.nodes
    usd = (hourly * Decimal(took / timedelta(hours=1))).quantize(_CENT)
    return Summary(
        windows=0,
        mean_usd=usd,
        p90_usd=usd,
        worst_usd=usd,
        missed=0,
        over_budget=0,
        interruptions=0.0,
        launches=1.0,
        took=took,
    )


def shortened(task: Task, factor: float) -> Task:
    """Return the task with its work so many times shorter, and what its deadline leaves beside its two changeovers.

    These take as long as ever: what can just be kept still can.
    """
    starts_s = 2 * task.changeover_s
    return replace(task, work_s=task.work_s / factor, span_s=starts_s + (task.span_s - starts_s) / factor)


def stretched(summary: Summary, factor: float, budget_usd: Decimal) -> Summary:
    """Return what a job comes to that is so many times as long as the one that was replayed; within its budget."""
    times = Decimal(str(factor))
    return replace(
        summary,
        mean_usd=min(budget_usd, (summary.mean_usd * times).quantize(_CENT)),
        p90_usd=_times(summary.p90_usd, times, budget_usd),
        worst_usd=_times(summary.worst_usd, times, budget_usd),
        interruptions=summary.interruptions * factor,
        launches=summary.launches * factor,
        took=summary.took * factor if summary.took is not None else None,
        on_spot=summary.on_spot * factor,
    )


def _times(usd: Decimal | None, times: Decimal, most_usd: Decimal) -> Decimal | None:
    return None if usd is None else min(most_usd, (usd * times).quantize(_CENT, ROUND_UP))


def between(summary: Summary) -> timedelta | None:
    """Return the mean time on spot machines, which alone are interrupted, for each interruption; None without any."""
    return summary.on_spot / summary.interruptions if summary.interruptions else None


def saves_of(job: Job, saving: Saving, outlook: Summary) -> Saves | None:
    """Return how often the job is to save; None where its script decides that, or nobody knows what a save is."""
    apart = between(outlook)
    if job.model is None or apart is None or saving in OTHERWISE:
        return None
    times = save_times(job.model, nodes=job.resources.nodes, gpus=job.resources.gpus)
    return Saves(
        every=interval(times, apart), with_notice=interval_with_notice(times, apart), between=apart, times=times
    )


def stored_of(job: Job, rates: Rates, work: timedelta, outlook: Summary, saves: Saves | None) -> Stored | None:
    """Return what the saves of so much work cost in S3; None where nothing is known of them, or charged."""
    if job.model is None or saves is None or not rates.storage_usd_per_gib_month:
        return None
    size, span, keep = saved_bytes(job.model), outlook.took or work, job.checkpoint.keep

    def usd(saved: int) -> Decimal:
        return usd_of_saves(size, saved, keep, span, rates)

    usd_per_hour = float(outlook.mean_usd) / max(span / timedelta(hours=1), 1.0)
    each_usd = float(usd(keep + 2) - usd(keep + 1))
    cheapest = cheapest_interval(saves.times, saves.between, each_usd, usd_per_hour)
    made = max(1, work // (job.checkpoint.every or saves.every))
    return Stored(
        size=size,
        saves=made,
        usd=usd(made),
        cheapest_every=cheapest,
        cheapest_usd=usd(max(1, work // cheapest)),
    )
