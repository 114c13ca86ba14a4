"""Replays a job on recorded markets at an offer's own prices: what it is going to cost, and when it will be done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

from gpucloud.domain.ledger import PLAIN_TERMS, Terms, usd_for
from gpucloud.domain.markets import RecordedMarket
from gpucloud.domain.outlook import shortened, stretched
from gpucloud.domain.policy.decide import decide, without_deadline
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.recovery import USUAL, Recovery
from gpucloud.domain.simulation.rehearsal import (
    Rehearsal,
    followed_s,
    outcomes,
    recordings,
    room_for,
    spread,
    zone_sets,
)
from gpucloud.domain.simulation.replay import Decide
from gpucloud.domain.simulation.timeline import LOOK_S, Timeline, timeline
from gpucloud.ports import Markets, PolicyTables

_SHARE = 0.5  # of a recording that one window may take; a longer job is replayed shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a job is rehearsed: machines with so many GPUs, in so many zones, at prices that do not change.

    What stands beside a machine, by the `terms`, is not in the prices. With `fallback`, a deadline is kept on demand;
    else the job waits for spot machines, whatever comes of it. `recovery` is what machines that go cost its script.
    """

    gpus: int
    zones: int
    spot_usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal
    terms: Terms = PLAIN_TERMS
    fallback: bool = True
    recovery: Recovery = USUAL


@dataclass(slots=True, kw_only=True)
class Outlooks:
    """Says what jobs are going to cost; what it has read and laid out is remembered. Not thread-safe.

    The learned policy's `tables` may come from the very recordings: what they say is then a little too good.
    """

    markets: Markets
    tables: PolicyTables
    _recorded: dict[str, RecordedMarket] = field(default_factory=dict)
    _lines: dict[tuple[Stage, int], tuple[tuple[Timeline, ...], ...]] = field(default_factory=dict)

    def outlook(
        self, policy: Policy | None, task: Task, stage: Stage, *, budget_usd: Decimal, windows: int = 72
    ) -> Summary | None:
        """Return what about so many replays of the task come to, starts and zones spread over the recordings.

        Under the policy; with None as a job without a deadline goes. A job that is too long for the recordings is
        replayed with work and deadline shortened alike, and the outcome stretched. None where no replay has an end, and
        for a job that begins anew and is too long: its part would end, and never the whole.
        """
        regions = self._regions(stage, task.nodes)
        longest_s = min(line.looks for lines in regions for line in lines) * LOOK_S * _SHARE
        factor = max(1.0, followed_s(task, fallback=stage.fallback) / longest_s)
        if factor > 1.0 and stage.recovery.begins_anew:
            return None
        short = replace(shortened(task, factor), tick_s=float(LOOK_S))
        cap_usd = budget_usd / Decimal(str(factor))
        found = summary(tuple(self._outcomes(policy, short, stage, cap_usd, windows)))
        return stretched(found, factor) if found.unended < found.windows else None

    def recordings(self, gpus: int) -> tuple[RecordedMarket, ...]:
        """Return the recordings of machines with about so many GPUs."""
        return tuple(self._market(name) for name in recordings(gpus))

    def _outcomes(
        self, policy: Policy | None, task: Task, stage: Stage, budget_usd: Decimal, windows: int
    ) -> Iterator[Outcome]:
        """Every recorded region has the same share, whatever sets of zones it has."""
        recovery = stage.recovery
        last_usd = usd_for(Decimal(str(task.nodes * task.on_demand_usd_per_hour)), timedelta(seconds=1))
        # Without machines on demand a policy has no end to keep to: the deadline is not its business.
        told = replace(
            task,
            changeover_s=recovery.changeover_s,
            handover_s=recovery.handover_s,
            span_s=task.span_s if stage.fallback else math.inf,
        )
        choose, regions = self._choosing(policy, told, stage), self._regions(stage, task.nodes)
        for lines in regions:
            room = room_for(lines[0], followed_s(told, fallback=stage.fallback) + task.changeover_s)
            for line, begun in zip(lines, spread(room, len(lines), windows // len(regions)), strict=True):
                rehearsal = Rehearsal(
                    task=told,
                    market=line,
                    recovery=recovery,
                    budget_usd=budget_usd,
                    spendable_usd=budget_usd - last_usd,
                    terms=stage.terms,
                )
                for one in outcomes(choose, rehearsal, begun):
                    yield replace(one, missed=one.took is None or one.took.total_seconds() > task.span_s)

    def _choosing(self, policy: Policy | None, task: Task, stage: Stage) -> Decide:
        if policy is None:
            return without_deadline
        tables = None
        if policy is Policy.LEARNED and stage.fallback:
            usd_per_hour = float(stage.spot_usd_per_hour + stage.terms.beside_usd_per_hour)
            tables = self.tables.tables(task, stage.zones, stage.gpus, usd_per_hour)
        return partial(decide, policy, tables=tables)

    def _market(self, name: str) -> RecordedMarket:
        if name not in self._recorded:
            self._recorded[name] = self.markets.market(name)
        return self._recorded[name]

    def _regions(self, stage: Stage, nodes: int) -> tuple[tuple[Timeline, ...], ...]:
        """Return what the job sees in each recorded region, by its sets of zones."""
        key = (stage, nodes)
        if key not in self._lines:
            beside_usd = stage.terms.beside_usd_per_hour
            self._lines[key] = tuple(
                tuple(timeline(market, zones, nodes, beside_usd) for zones in sets)
                for market in self._priced(stage)
                for sets in zone_sets(market, stage.zones)
            )
        return self._lines[key]

    def _priced(self, stage: Stage) -> Iterator[RecordedMarket]:
        for market in self.recordings(stage.gpus):
            yield market.at_prices(stage.on_demand_usd_per_hour, stage.spot_usd_per_hour)
