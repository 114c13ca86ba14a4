"""Runs one job on a recorded market, from change to change, as its policy chooses."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from gpucloud.domain.policy.choice import Choice
from gpucloud.domain.policy.observation import NOTHING, Holding, Mode, Observation, Task, ZoneState
from gpucloud.domain.simulation.fleet import Fleet, Life
from gpucloud.domain.simulation.recovery import Recovery
from gpucloud.domain.simulation.timeline import LOOK_S, Timeline, ZoneView

Decide = Callable[[Task, Observation], Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a replay went: every machine's life, when the work was done, how often machines were taken and launched.

    `finished_s` counts from the job's start; None where the recording ended first. `usd` is the running sum that the
    policy saw; the bill is made from the lives.
    """

    lives: tuple[Life, ...]
    finished_s: float | None
    interruptions: int
    launches: int
    decisions: int
    usd: float


def replay(
    decide: Decide, task: Task, market: Timeline, start: int, recovery: Recovery, budget_usd: float | None = None
) -> Run:
    """Return how a job goes that is submitted at look `start`, asking `decide` wherever its answer may change.

    The task's `changeover_s` is to be the recovery's, its `tick_s` the time between looks. On-demand machines can be
    had at any time.
    """
    course = _Course(task, market, start, recovery)
    decisions = 0
    while course.now < market.looks and not course.done:
        views = course.look()
        money = None if budget_usd is None else budget_usd - course.fleet.usd
        choice = decide(task, course.seen(views, money))
        decisions += 1
        course.follow(choice, views)
        course.go_on(choice.holds_s, views)
    course.fleet.end(course.ended_s)
    return Run(
        lives=tuple(course.fleet.lives),
        finished_s=course.ended_s - start * LOOK_S if course.done else None,
        interruptions=course.fleet.interruptions,
        launches=course.fleet.launches,
        decisions=decisions,
        usd=course.fleet.usd,
    )


class _Course:
    """Where a replayed job stands: at which look, with how much work left, and how soon its machines are of use."""

    def __init__(self, task: Task, market: Timeline, start: int, recovery: Recovery) -> None:
        self.now = start
        self.done = False
        self.ended_s = float(start * LOOK_S)
        self.fleet = Fleet(task, market.beside_usd_per_hour)
        self._task, self._market, self._recovery, self._start = task, market, recovery, start
        self._indices = {view.zone: index for index, view in enumerate(market.views[0])}
        self._change = bisect_right(market.changes, start) - 1
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

    def seen(self, views: tuple[ZoneView, ...], money_left_usd: float | None) -> Observation:
        """Return what the policy is told."""
        now = self.now
        zones = [
            ZoneState(
                zone=view.zone,
                up=view.up,
                age_s=(now - view.since) * LOOK_S,
                usd_per_hour=view.usd_per_hour,
                nodes=view.nodes,
            )
            for view in views
        ]
        return Observation(
            work_left_s=self._left_s,
            time_left_s=self._task.span_s - (now - self._start) * LOOK_S,
            holding=self._holding(views),
            zones=tuple(zones),
            money_left_usd=money_left_usd,
        )

    def follow(self, choice: Choice, views: tuple[ZoneView, ...]) -> None:
        """Launch and end what the choice says; a zone that has too few machines gives none."""
        zone = self._indices[choice.zone] if choice.zone and choice.mode in (Mode.SPOT, Mode.BOTH) else None
        nodes = choice.nodes or self._task.nodes
        if zone is not None and views[zone].nodes < nodes:
            zone = None
        fleet, recovery, now_s = self.fleet, self._recovery, float(self.now * LOOK_S)
        worked_on_demand = fleet.on_demand is not None
        launches, rate = fleet.launches, self._rate()
        new_spot = fleet.rent_spot(zone, nodes, now_s)
        if fleet.launches > launches:
            self._beside_s = recovery.restart_s - recovery.handover_s
        new_on_demand = fleet.rent_on_demand(now_s, wanted=choice.mode in (Mode.ON_DEMAND, Mode.BOTH))
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
        span_s = float((until - self.now) * LOOK_S)
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
