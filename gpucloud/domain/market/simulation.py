"""Replays a job on a recorded market, billed by the product's own meter, from as many moments as is asked."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.outcome import ON_DEMAND, Fleet, Lifetime, Outcome
from gpucloud.domain.market.policies import NOTHING, Choice, Holding, Mode, Observation, Task
from gpucloud.domain.market.recordings import LOOK_S, RecordedMarket, RecordedZone, Timeline, ZoneView
from gpucloud.domain.market.scenario import Recovery
from gpucloud.domain.money.ledger import PLAIN_TERMS, Charge, Terms, meter, total
from gpucloud.domain.offer import Pool, PricePoint, region_of
from gpucloud.domain.state.state import UsageInterval

Decide = Callable[[Task, Observation], Choice]

_ROUNDING_S = 0.001  # of sums: what ends with the deadline is in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a replay went: every machine's life, when the work was done, how often machines went and came.

    `finished_s` counts from the job's start; None where the recording ended first, or the deadline (`late`). `usd` is
    the running sum that the policy saw; the bill is made from the lives.
    """

    lifetimes: tuple[Lifetime, ...]
    finished_s: float | None
    late: bool
    interruptions: int
    launches: int
    decisions: int
    usd: float


def replay(  # noqa: PLR0913  the end by its name
    decide: Decide,
    task: Task,
    market: Timeline,
    start: int,
    recovery: Recovery,
    budget_usd: float | None = None,
    *,
    ends_s: float = math.inf,
) -> Run:
    """Return how a job goes that is submitted at look `start`, asking `decide` wherever its answer may change.

    The task's `changeover_s` is to be the recovery's, its `tick_s` the time between looks. On-demand machines can be
    had at any time. After `ends_s` the job ends, done or not.
    """
    simulated = _Simulated(task, market, start, recovery, ends_s)
    decisions = 0
    while simulated.now < market.looks and not (simulated.done or simulated.late):
        views = simulated.look()
        money = None if budget_usd is None else budget_usd - simulated.fleet.usd
        choice = decide(task, simulated.observation(views, money))
        decisions += 1
        simulated.follow(choice, views)
        simulated.go_on(choice.holds_s, views)
    simulated.fleet.end(simulated.ended_s)
    return Run(
        lifetimes=tuple(simulated.fleet.lifetimes),
        finished_s=simulated.ended_s - start * LOOK_S if simulated.done else None,
        late=simulated.late,
        interruptions=simulated.fleet.interruptions,
        launches=simulated.fleet.launches,
        decisions=decisions,
        usd=simulated.fleet.usd,
    )


class _Simulated:
    """Where a replayed job stands: at which look, with how much work left, and how soon its machines are of use."""

    def __init__(self, task: Task, market: Timeline, start: int, recovery: Recovery, ends_s: float) -> None:
        self.now = start
        self.done = self.late = False
        self.ended_s = float(start * LOOK_S)
        self.fleet = Fleet(task, market.extras_usd_per_hour)
        self._task, self._market, self._recovery, self._start = task, market, recovery, start
        self._indices = {view.zone: index for index, view in enumerate(market.views[0])}
        self._change = bisect_right(market.changes, start) - 1
        self._until_s = start * LOOK_S + ends_s + _ROUNDING_S
        self._left_s = task.work_s
        self._worked_s = 0.0  # since the last start
        self._boot_s = self._beside_s = 0.0

    def look(self) -> tuple[ZoneView, ...]:
        """Return the zones as they are now, having lost what is not there any more."""
        changes = self._market.changes
        while self._change + 1 < len(changes) and changes[self._change + 1] <= self.now:
            self._change += 1
        views = self._market.views[self._change]
        rate = self._rate()
        if self.fleet.lose(views, float(self.now * LOOK_S)) and self.fleet.on_demand is None:
            self._undo(self._recovery.lost_s(self._worked_s) * rate)
            self._regroup()
        self._join()
        return views

    def observation(self, views: tuple[ZoneView, ...], money_left_usd: float | None) -> Observation:
        """Return what the policy is told."""
        return Observation(
            work_left_s=self._left_s,
            time_left_s=self._task.span_s - (self.now - self._start) * LOOK_S,
            holding=self._holding(views),
            zones=self._market.told(self._change, self.now),
            money_left_usd=money_left_usd,
        )

    def follow(self, choice: Choice, views: tuple[ZoneView, ...]) -> None:
        """Launch and end what the choice says; a zone that has too few machines gives none."""
        zone = self._indices[choice.zone] if choice.zone and choice.mode in (Mode.SPOT, Mode.BOTH) else None
        nodes = choice.nodes or self._task.nodes
        if zone is not None and views[zone].nodes < nodes:
            zone = None
        fleet, recovery, now_s = self.fleet, self._recovery, float(self.now * LOOK_S)
        on_demand = choice.mode in (Mode.ON_DEMAND, Mode.BOTH)
        if fleet.holds(zone, nodes, on_demand=on_demand):  # as nearly always
            return
        worked_on_demand = fleet.on_demand is not None
        launches, rate = fleet.launches, self._rate()
        new_spot = fleet.rent_spot(zone, nodes, now_s)
        if fleet.launches > launches:
            self._beside_s = recovery.restart_s - recovery.handover_s
        new_on_demand = fleet.rent_on_demand(now_s, wanted=on_demand)
        if new_on_demand or (new_spot and fleet.on_demand is None):
            self._boot_s = recovery.restart_s
            self._leave(rate)
        elif worked_on_demand and fleet.on_demand is None:
            self._boot_s = self._beside_s + recovery.handover_s
            self._leave(rate)
        elif not self._rate():
            self._leave(rate)
        self._join()

    def go_on(self, holds_s: float, views: tuple[ZoneView, ...]) -> None:
        """Work until the next look at which something else may be chosen, or to the end."""
        until = self._next_look(holds_s)
        span_s = min(float((until - self.now) * LOOK_S), self._until_s - self.now * LOOK_S)
        rate = self._rate()
        self.done = rate > 0 and (span_s - self._boot_s) * rate >= self._left_s
        if self.done:
            span_s = self._boot_s + self._left_s / rate
        elif rate and span_s > self._boot_s:
            self._left_s -= (span_s - self._boot_s) * rate
            self._worked_s += span_s - self._boot_s
        self.fleet.pay(span_s, views)
        self._boot_s = max(self._boot_s - span_s, 0.0)
        self._beside_s = max(self._beside_s - span_s, 0.0)
        self.ended_s = self.now * LOOK_S + span_s
        self.late = not self.done and self.ended_s >= self._until_s
        self.now = until

    def _next_look(self, holds_s: float) -> int:
        """A choice holds until a zone or a price changes, a machine becomes of use, or it says so itself."""
        changes = self._market.changes
        until = changes[self._change + 1] if self._change + 1 < len(changes) else self._market.looks
        if not math.isinf(holds_s):
            until = min(until, self.now + max(int(holds_s // LOOK_S), 1))
        for wait_s in (self._boot_s, self._beside_s):
            if wait_s > 0:
                until = min(until, self.now + math.ceil(wait_s / LOOK_S))
        return min(until, self._market.looks)

    def _rate(self) -> float:
        """Return how fast the work goes on, once the machines have booted; 1 with all nodes."""
        if self.fleet.on_demand is not None:
            return 1.0
        return self.fleet.working / self._task.nodes

    def _join(self) -> None:
        """Let machines that have booted beside others of their group work with them."""
        if self.fleet.joining and self._beside_s <= 0:
            self._leave(self._rate())
            self.fleet.join()
            self._regroup()

    def _regroup(self) -> None:
        """Another number of machines goes on together, all of which have booted."""
        self._boot_s, self._worked_s = max(self._boot_s, self._recovery.handover_s), 0.0

    def _leave(self, rate: float) -> None:
        """Give up machines on which the work went on so fast: what is not saved then is to be done again."""
        self._undo(self._recovery.left_behind_s(self._worked_s) * rate)
        self._worked_s = 0.0

    def _undo(self, work_s: float) -> None:
        self._left_s = min(self._left_s + work_s, self._task.work_s)

    def _holding(self, views: tuple[ZoneView, ...]) -> Holding:
        fleet = self.fleet
        if not fleet.spot:
            return NOTHING if fleet.on_demand is None else Holding(mode=Mode.ON_DEMAND, boot_s=self._boot_s)
        return Holding(
            mode=Mode.SPOT if fleet.on_demand is None else Mode.BOTH,
            zone=views[fleet.spot[0].zone].zone,
            boot_s=self._boot_s,
            beside_s=0.0 if fleet.on_demand is None else self._beside_s,
            spot_age_s=self.now * LOOK_S - fleet.spot[0].launched_s,
            nodes=0 if fleet.working == self._task.nodes else fleet.working,
        )


# The bill of a replayed job, by the product's own meter.


def charges(run: Run, market: Timeline, terms: Terms = PLAIN_TERMS) -> tuple[tuple[int, tuple[Charge, ...]], ...]:
    """Return, for each life, how many machines lived it and the charges of one of them."""
    return tuple(
        (lifetime.nodes, _metered(lifetime, number, market, terms))
        for number, lifetime in enumerate(run.lifetimes, start=1)
    )


def bill_usd(run: Run, market: Timeline, terms: Terms = PLAIN_TERMS) -> Decimal:
    """Return what the run costs: the sum of its `charges`."""
    known, usd = market.bills.setdefault(terms, {}), Decimal(0)
    for lifetime in run.lifetimes:
        alike = (lifetime.zone, lifetime.launched_s, lifetime.ended_s, lifetime.cause)
        if alike not in known:
            known[alike] = total(_metered(lifetime, 1, market, terms))
        usd += lifetime.nodes * known[alike]
    return usd


def _metered(lifetime: Lifetime, number: int, market: Timeline, terms: Terms) -> tuple[Charge, ...]:
    launched_at, ended_at = market.when(lifetime.launched_s), market.when(lifetime.ended_s)
    if lifetime.zone == ON_DEMAND:
        zone, kind = market.views[0][0].zone, Market.ON_DEMAND
        prices: tuple[PricePoint, ...] = (
            PricePoint(since=launched_at, usd_per_hour=market.market.on_demand_usd_per_hour),
        )
    else:
        zone, kind = market.views[0][lifetime.zone].zone, Market.SPOT
        known = market.prices[lifetime.zone]
        first = bisect_right(known, launched_at, key=_since) - 1
        prices = known[first : bisect_right(known, ended_at, key=_since)]
    node = UsageInterval(
        node_id=f"machine-{number}",
        pool=Pool(instance_type=market.market.instance_type, zone=zone, market=kind),
        launched_at=launched_at,
        ended_at=ended_at,
        end_cause=lifetime.cause,
    )
    return meter(node, prices, (), ended_at, terms)


def _since(point: PricePoint) -> datetime:
    return point.since


# One job on one recorded market, replayed from as many moments as is asked: what `plan` and `simulate` say of it.


_SINGLE = ("p3.2xlarge-2023-02",)
_PATIENCE = 3.0  # a job that may wait for ever is followed for so many times its work
_EIGHT = ("p3.16xlarge-2022-10", "p3.16xlarge-2022-11", "p3.16xlarge-2022-12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is replayed: the task as policies are told of it, the market as it sees it, what a launch takes and costs.

    The task's price on demand and the market's views have in them what stands beside a machine; the bill has it by the
    `terms`. Whatever passes `budget_usd` ends there, as the supervisor ends it, and after `deadline_s`, done or not;
    policies are told of `spendable_usd`.
    """

    task: Task
    market: Timeline
    recovery: Recovery
    budget_usd: Decimal
    spendable_usd: Decimal
    terms: Terms
    deadline_s: float = math.inf


def outcomes(decide: Decide, of: Rehearsal, starts: Iterable[int]) -> Iterator[Outcome]:
    """Yield how the job goes that is submitted at these looks.

    One that does not come to its end before the recording does has missed its deadline: nobody knows what it costs. Nor
    does anybody know what the work would have cost of one that the deadline ends.
    """
    for start in starts:
        run = replay(decide, of.task, of.market, start, of.recovery, float(of.spendable_usd), ends_s=of.deadline_s)
        usd = bill_usd(run, of.market, of.terms)
        over = usd > of.budget_usd
        took = None if over or run.finished_s is None else timedelta(seconds=run.finished_s)
        yield Outcome(
            usd=min(usd, of.budget_usd),
            took=took,
            missed=took is None,
            over_budget=over,
            late=run.late and not over,
            interruptions=run.interruptions,
            launches=run.launches,
            on_spot=_on_spot(run),
        )


def recordings(gpus: int) -> tuple[str, ...]:
    """Return the names of the recordings that stand for machines with so many GPUs."""
    return _EIGHT if gpus > 2 else _SINGLE


def zone_sets(market: RecordedMarket, zones: int) -> tuple[tuple[tuple[RecordedZone, ...], ...], ...]:
    """Return, for each recorded region, every set of so many of its zones: what a job in one region would have.

    All of the region's where it has no more. A set that is too small would be another job's.
    """
    found = []
    for region in market.regions:
        there = [zone for zone in market.zones if region_of(zone.name) == region]
        found.append(tuple(itertools.combinations(there, min(zones, len(there)))))
    return tuple(found)


def spread(room: int, sets: int, windows: int) -> tuple[tuple[int, ...], ...]:
    """Return starts for each of so many sets of zones: about so many in all, all apart, and as many for every set."""
    each = -(-windows // sets)
    last = max(1, each * sets - 1)
    at = [round(room * number / last) for number in range(each * sets)]
    return tuple(tuple(sorted(set(at[own::sets]))) for own in range(sets))


def room_for(market: Timeline, followed_s: float) -> int:
    """Return the last look at which a job may begin that is followed for so long."""
    return max(0, market.looks - math.ceil(followed_s / LOOK_S) - 1)


def followed_s(task: Task, *, fallback: bool) -> float:
    """Return for how long a replay is followed: to its deadline, or where nothing ends it for a few times its work."""
    if math.isfinite(task.span_s):
        return task.span_s
    return (task.work_s * (2.0 if fallback else _PATIENCE)) + task.changeover_s


def _on_spot(run: Run) -> timedelta:
    """Return for how long spot machines were held; of several at once, such as those of a gang, once."""
    lifetimes: Sequence[tuple[float, float]] = sorted(
        (lifetime.launched_s, lifetime.ended_s) for lifetime in run.lifetimes if lifetime.zone != ON_DEMAND
    )
    held_s = until_s = 0.0
    for start_s, end_s in lifetimes:
        held_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return timedelta(seconds=held_s)
