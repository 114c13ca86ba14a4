"""Replays a job on recorded markets: for `simulate`, and for what a plan expects."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.job.spec import Cloud, Job, Market, MarketPolicy, Policy
from gpucloud.domain.market.feasibility import Needs, last_offer_usd
from gpucloud.domain.market.learned import Tables
from gpucloud.domain.market.outcome import Outcome, Summary, shortened, stretched, summary
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import decide, without_deadline
from gpucloud.domain.market.recordings import LOOK_S, RecordedMarket, RecordedZone, Timeline, timeline
from gpucloud.domain.market.scenario import (
    USUAL,
    Recovery,
    Scenario,
    recovery_within,
    refuse_what_cannot_be_kept,
    starts,
    task_of,
)
from gpucloud.domain.market.simulation import (
    Decide,
    Rehearsal,
    followed_s,
    outcomes,
    recordings,
    room_for,
    spread,
    zone_sets,
)
from gpucloud.domain.money.ledger import PLAIN_TERMS, Terms, usd_for
from gpucloud.domain.offer import Offer
from gpucloud.ports import Markets, PolicyTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is tried: every policy in every set of zones and with every deadline, over as many windows of a market.

    Without a deadline (None) a job that may go on demand asks no policy (None): it takes spot machines after each loss,
    and stays on demand once there are none. `unseen` are the recordings from which the learned policy learns nothing,
    beside the market's own.
    """

    zone_sets: tuple[tuple[RecordedZone, ...], ...]
    policies: tuple[Policy | None, ...]
    deadlines: tuple[timedelta | None, ...]
    windows: int
    seed: int
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy came to in one set of zones with one deadline; outcomes are in the windows' order."""

    zones: tuple[str, ...]
    deadline: timedelta | None
    policy: Policy | None
    outcomes: tuple[Outcome, ...]
    asked: bool = True
    """Whether the policy is asked: not without a deadline, nor on one market alone."""

    @property
    def summary(self) -> Summary:
        """The outcomes taken together."""
        return summary(self.outcomes)


def simulate(
    scenario: Scenario, market: RecordedMarket, study: Study, tables: Callable[[Sequence[str]], PolicyTables]
) -> Iterator[Result]:
    """Yield the results, all of them over windows that begin at the same moments.

    `tables` gives what makes the learned policy's tables, from all recordings but those that it is given, the market's
    own and those of the same weeks: nobody who submits a job knows what is going to happen. Raises PlanRefused where a
    deadline or the budget cannot be kept, UsageError where the market cannot hold the job.
    """
    unseen = (market.name, *study.unseen)
    submitted = starts(market, _followed(scenario, market, study), study.windows, study.seed)
    for zones in study.zone_sets:
        observation = timeline(market, zones, scenario.nodes, scenario.terms.extras_usd_per_hour)
        for deadline in study.deadlines:
            tried = replace(scenario, deadline=deadline)
            refuse_what_cannot_be_kept(tried, market, zones)
            for policy in study.policies:
                choose: Decide = without_deadline if policy is None else functools.partial(decide, policy)
                if policy is Policy.LEARNED:
                    learned = _learned(tried, market, zones, tables(unseen))
                    choose = functools.partial(decide, policy, tables=learned)
                yield Result(
                    zones=tuple(zone.name for zone in zones),
                    deadline=deadline,
                    policy=policy,
                    asked=deadline is not None and scenario.market is MarketPolicy.AUTO,
                    outcomes=tuple(outcomes(choose, _rehearsal(tried, observation), submitted)),
                )


def _followed(scenario: Scenario, market: RecordedMarket, study: Study) -> timedelta:
    """Return for how long each replay is followed at the least."""
    fallback = None in study.policies
    spans = [followed_s(task_of(replace(scenario, deadline=one), market), fallback=fallback) for one in study.deadlines]
    return timedelta(seconds=max(spans))


def _learned(scenario: Scenario, market: RecordedMarket, zones: Sequence[RecordedZone], maker: PolicyTables) -> Tables:
    """Return the tables for these zones, at the cheapest price when the recording began: nobody knew the later ones."""
    usd_per_hour = min(zone.prices[0][1] for zone in zones) + scenario.terms.extras_usd_per_hour
    return maker.tables(task_of(scenario, market), len(zones), market.gpus, float(usd_per_hour))


def _rehearsal(scenario: Scenario, observation: Timeline) -> Rehearsal:
    task = task_of(scenario, observation.market)
    return Rehearsal(
        task=task if scenario.market is MarketPolicy.AUTO else replace(task, span_s=math.inf),
        market=observation,
        recovery=scenario.recovery,
        budget_usd=scenario.budget_usd,
        spendable_usd=scenario.spendable_usd(observation.market),
        terms=scenario.terms,
        deadline_s=task.span_s,
    )


# Replays a job on recorded markets at an offer's own prices: what it is going to cost, and when it will be done.


_SHARE = 0.5  # of a recording that one window may take; a longer job is replayed shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a job is rehearsed: machines with so many GPUs, in so many zones, at prices that do not change.

    What stands beside a machine, by the `terms`, is not in the prices. With `fallback`, a deadline is kept on demand;
    else the job waits for spot machines, until the deadline ends it. `recovery` is what machines that go cost its
    script.
    """

    gpus: int
    zones: int
    spot_usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal
    terms: Terms = PLAIN_TERMS
    fallback: bool = True
    recovery: Recovery = USUAL

    def starts_usd(self, task: Task) -> Decimal:
        """What a changeover costs on spot machines and one on demand: a part of the task has as many as the whole."""
        hourly = self.spot_usd_per_hour + self.on_demand_usd_per_hour + 2 * self.terms.extras_usd_per_hour
        return usd_for(hourly * task.nodes, timedelta(seconds=task.changeover_s))


def zones_of(offers: Sequence[Offer]) -> int:
    """Return in how many zones of the best offer's region there are such machines."""
    region = offers[0].pool.region
    return sum(offer.zones for offer in offers if offer.pool.region == region)


def stage_of(job: Job, offers: tuple[Offer, ...], needs: Needs, terms: Terms, saving: Saving) -> Stage | None:
    """Return where the job's spot machines are replayed; None where it has none that a market takes."""
    offer = needs.offer
    if not is_replayed(job, offer):
        return None
    alike = [o for o in offers if (o.pool.instance_type, o.pool.market) == (offer.pool.instance_type, Market.SPOT)]
    extras_usd = terms.extras_usd_per_hour
    return Stage(
        gpus=offer.gpus,
        zones=zones_of(alike),
        spot_usd_per_hour=offer.usd_per_hour - extras_usd,
        on_demand_usd_per_hour=last_offer_usd(needs) - extras_usd,
        terms=terms.of(offer.pool.instance_type),
        fallback=needs.fallback is not None,
        recovery=recovery_within(needs.changeover, saving, job.checkpoint),
    )


def is_replayed(job: Job, offer: Offer) -> bool:
    """Whether there are recordings of such machines, which a market takes."""
    return offer.pool.market is Market.SPOT and job.cloud is Cloud.AWS


@dataclass(slots=True, kw_only=True)
class Outlooks:
    """Says what jobs are going to cost; what it has read, laid out and replayed is remembered. Not thread-safe.

    The learned policy's `tables` may come from the very recordings: what they say is then a little too good.
    """

    markets: Markets
    tables: PolicyTables
    _recorded: dict[str, RecordedMarket] = field(default_factory=dict)
    _lines: dict[tuple[Stage, int], tuple[tuple[Timeline, ...], ...]] = field(default_factory=dict)
    _told: dict[tuple[object, ...], Summary | None] = field(default_factory=dict)

    def outlook(
        self, policy: Policy | None, task: Task, stage: Stage, *, budget_usd: Decimal, windows: int = 72
    ) -> Summary | None:
        """Return what about so many replays of the task come to, starts and zones spread over the recordings.

        Under the policy; with None as a job without a deadline goes. A job that is too long for the recordings is
        replayed with work and deadline shortened alike, and the outcome stretched. None where no replay has an end, and
        for a job that begins anew and is too long: its part would end, and never the whole.
        """
        key = (policy, task, stage, budget_usd, windows)
        if key not in self._told:
            self._told[key] = self._replayed(policy, task, stage, budget_usd, windows)
        return self._told[key]

    def is_too_long(self, task: Task, stage: Stage) -> bool:
        """Whether it is not replayed: it begins anew whenever its machines go, and none is recorded for so long."""
        return stage.recovery.begins_anew and self._factor(task, stage) > 1.0

    def recordings(self, gpus: int) -> tuple[RecordedMarket, ...]:
        """Return the recordings of machines with about so many GPUs."""
        return tuple(self._market(name) for name in recordings(gpus))

    def _replayed(
        self, policy: Policy | None, task: Task, stage: Stage, budget_usd: Decimal, windows: int
    ) -> Summary | None:
        if self.is_too_long(task, stage):
            return None
        factor = self._factor(task, stage)
        short = replace(shortened(task, factor) if factor > 1.0 else task, tick_s=float(LOOK_S))
        starts_usd = stage.starts_usd(task)
        cap_usd = starts_usd + (budget_usd - starts_usd) / Decimal(str(factor))
        found = summary(tuple(self._outcomes(policy, short, stage, cap_usd, windows)))
        return stretched(found, factor, budget_usd) if found.unended < found.windows else None

    def _factor(self, task: Task, stage: Stage) -> float:
        """Return how many times longer the task is than what may be replayed; 1 where it is not."""
        lines = (line for region in self._regions(stage, task.nodes) for line in region)
        longest_s = min(line.looks for line in lines) * LOOK_S * _SHARE
        return max(1.0, followed_s(task, fallback=stage.fallback) / longest_s)

    def _outcomes(
        self, policy: Policy | None, task: Task, stage: Stage, budget_usd: Decimal, windows: int
    ) -> Iterator[Outcome]:
        """Every recorded region has the same share, whatever sets of zones it has."""
        recovery = stage.recovery
        last_usd = usd_for(Decimal(str(task.nodes * task.on_demand_usd_per_hour)), timedelta(seconds=1))
        # Without machines on demand a policy has no end to keep to: the deadline ends the job, whatever is chosen.
        ends = replace(task, changeover_s=recovery.changeover_s, handover_s=recovery.handover_s)
        told = ends if stage.fallback else replace(ends, span_s=math.inf)
        choose, regions = self._choosing(policy, told, stage), self._regions(stage, task.nodes)
        for lines in regions:
            room = room_for(lines[0], followed_s(ends, fallback=stage.fallback) + task.changeover_s)
            for line, begun in zip(lines, spread(room, len(lines), windows // len(regions)), strict=True):
                rehearsal = Rehearsal(
                    task=told,
                    market=line,
                    recovery=recovery,
                    budget_usd=budget_usd,
                    spendable_usd=budget_usd - last_usd,
                    terms=stage.terms,
                    deadline_s=task.span_s,
                )
                yield from outcomes(choose, rehearsal, begun)

    def _choosing(self, policy: Policy | None, task: Task, stage: Stage) -> Decide:
        if policy is None:
            return without_deadline
        tables = None
        if policy is Policy.LEARNED and stage.fallback:
            usd_per_hour = float(stage.spot_usd_per_hour + stage.terms.extras_usd_per_hour)
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
            extras_usd = stage.terms.extras_usd_per_hour
            self._lines[key] = tuple(
                tuple(timeline(market, zones, nodes, extras_usd) for zones in sets)
                for market in self._priced(stage)
                for sets in zone_sets(market, stage.zones)
            )
        return self._lines[key]

    def _priced(self, stage: Stage) -> Iterator[RecordedMarket]:
        for market in self.recordings(stage.gpus):
            yield market.at_prices(stage.on_demand_usd_per_hour, stage.spot_usd_per_hour)
