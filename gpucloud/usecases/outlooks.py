"""Replays a job on recorded markets at an offer's own prices: what it is going to cost, and when it will be done."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

from gpucloud.domain.markets import RecordedMarket, RecordedZone
from gpucloud.domain.offer import region_of
from gpucloud.domain.outlook import shortened, stretched
from gpucloud.domain.policy.decide import decide
from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.bill import bill_usd
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.recovery import Recovery
from gpucloud.domain.simulation.replay import Decide, replay
from gpucloud.domain.simulation.timeline import LOOK_S, Timeline, timeline
from gpucloud.ports import Markets, PolicyTables

_SINGLE = ("p3.2xlarge-2023-02",)
_EIGHT = ("p3.16xlarge-2022-10", "p3.16xlarge-2022-11", "p3.16xlarge-2022-12")
_NOTICE_S = 120.0
_PATIENCE = 3.0  # a job that may wait for ever is followed for so many times its work
_SHARE = 0.5  # of a recording that one window may take; a longer job is replayed shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a job is rehearsed: machines with so many GPUs, in so many zones, at prices that do not change.

    With `fallback`, a deadline is kept on demand; else the job waits for spot machines, whatever comes of it.
    """

    gpus: int
    zones: int
    spot_usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal
    fallback: bool = True


@dataclass(slots=True, kw_only=True)
class Outlooks:
    """Says what jobs are going to cost; what it has read and laid out is remembered. Not thread-safe.

    The learned policy's `tables` may come from the very recordings: what they say is then a little too good.
    """

    markets: Markets
    tables: PolicyTables
    _recorded: dict[str, RecordedMarket] = field(default_factory=dict)
    _timelines: dict[tuple[Stage, int], tuple[Timeline, ...]] = field(default_factory=dict)

    def outlook(
        self, policy: Policy, task: Task, stage: Stage, *, budget_usd: Decimal, windows: int = 48
    ) -> Summary | None:
        """Return what about so many replays of the task under the policy come to, starts spread over the recordings.

        A job that is too long for them is replayed with work and deadline shortened alike, and the outcome stretched.
        None where no replay came to its end.
        """
        lines = self._lines(stage, task.nodes)
        longest_s = min(line.looks for line in lines) * LOOK_S * _SHARE
        factor = max(1.0, _followed_s(task) / longest_s)
        short = replace(shortened(task, factor), tick_s=float(LOOK_S))
        cap_usd, each = budget_usd / Decimal(str(factor)), -(-windows // len(lines))
        chosen = partial(decide, policy, tables=self._tables(policy, short, stage))
        outcomes = [one for line in lines for one in _outcomes(chosen, short, line, stage, cap_usd, each)]
        return stretched(summary(outcomes), factor) if outcomes else None

    def recordings(self, gpus: int) -> tuple[RecordedMarket, ...]:
        """Return the recordings of machines with about so many GPUs."""
        return tuple(self._market(name) for name in (_EIGHT if gpus > 2 else _SINGLE))

    def _tables(self, policy: Policy, task: Task, stage: Stage) -> Tables | None:
        if policy is not Policy.LEARNED or not stage.fallback:
            return None
        return self.tables.tables(task, stage.zones, stage.gpus, float(stage.spot_usd_per_hour))

    def _market(self, name: str) -> RecordedMarket:
        if name not in self._recorded:
            self._recorded[name] = self.markets.market(name)
        return self._recorded[name]

    def _lines(self, stage: Stage, nodes: int) -> tuple[Timeline, ...]:
        key = (stage, nodes)
        if key not in self._timelines:
            found = [_priced(market, stage) for market in self.recordings(stage.gpus)]
            self._timelines[key] = tuple(
                timeline(market, zones, nodes) for market in found for zones in _zone_sets(market, stage.zones)
            )
        return self._timelines[key]


def _priced(market: RecordedMarket, stage: Stage) -> RecordedMarket:
    zones = tuple(replace(zone, prices=((0, stage.spot_usd_per_hour),)) for zone in market.zones)
    return replace(market, zones=zones, on_demand_usd_per_hour=stage.on_demand_usd_per_hour)


def _zone_sets(market: RecordedMarket, most: int) -> Iterator[Sequence[RecordedZone]]:
    """Yield the zones of each recorded region, in sets of at most so many: what a job in one region would have."""
    for region in market.regions:
        zones = [zone for zone in market.zones if region_of(zone.name) == region]
        for start in range(0, len(zones), most):
            yield zones[start : start + most]


def _followed_s(task: Task) -> float:
    return task.span_s if math.isfinite(task.span_s) else task.work_s * _PATIENCE


def _outcomes(
    policy: Decide, task: Task, line: Timeline, stage: Stage, budget_usd: Decimal, windows: int
) -> Iterator[Outcome]:
    """Yield the replays that came to their end, or to that of their budget; starts as far apart as there is room."""
    lost_s = min(_NOTICE_S, task.changeover_s / 2)
    recovery = Recovery(restart_s=task.changeover_s - lost_s, notice_s=lost_s)
    replayed = task if stage.fallback else replace(task, span_s=math.inf)
    last = max(0, line.looks - math.ceil((_followed_s(replayed) + task.changeover_s) / LOOK_S) - 1)
    for start in sorted({round(last * at / max(1, windows - 1)) for at in range(windows)}):
        run = replay(policy, replayed, line, start, recovery, float(budget_usd))
        usd = bill_usd(run, line)
        if run.finished_s is None and usd <= budget_usd:
            continue
        over = usd > budget_usd
        took = None if over or run.finished_s is None else timedelta(seconds=run.finished_s)
        yield Outcome(
            usd=min(usd, budget_usd),
            took=took,
            missed=took is None or took.total_seconds() > task.span_s,
            over_budget=over,
            interruptions=run.interruptions,
            launches=run.launches,
        )
