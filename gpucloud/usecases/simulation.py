"""Replays a job on recorded markets: what it would have cost under each policy, had it been submitted then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.markets import RecordedMarket, RecordedZone, mean_price
from gpucloud.domain.policy.decide import decide
from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.simulation.bill import bill_usd
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.replay import Decide, replay
from gpucloud.domain.simulation.scenario import Scenario, refuse_what_cannot_be_kept, starts, task_of
from gpucloud.domain.simulation.timeline import Timeline, timeline
from gpucloud.ports import PolicyTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is tried: every policy in every set of zones and with every deadline, over as many windows of a market."""

    zone_sets: tuple[tuple[RecordedZone, ...], ...]
    policies: tuple[Policy, ...]
    deadlines: tuple[timedelta, ...]
    windows: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy came to in one set of zones with one deadline; outcomes are in the windows' order."""

    zones: tuple[str, ...]
    deadline: timedelta
    policy: Policy
    outcomes: tuple[Outcome, ...]

    @property
    def summary(self) -> Summary:
        """The outcomes taken together."""
        return summary(self.outcomes)


def simulate(
    scenario: Scenario, market: RecordedMarket, study: Study, tables: Callable[[Sequence[str]], PolicyTables]
) -> Iterator[Result]:
    """Yield the results, all of them over windows that begin at the same moments.

    `tables` gives what makes the learned policy's tables, from all recordings but those of the zones that it is given:
    nobody who submits a job knows what is going to happen. Raises PlanRefused where a deadline or the budget cannot be
    kept, UsageError where the market cannot hold the job.
    """
    submitted = starts(market, max(study.deadlines), study.windows, study.seed)
    for zones in study.zone_sets:
        seen = timeline(market, zones, scenario.nodes)
        for deadline in study.deadlines:
            tried = replace(scenario, deadline=deadline)
            refuse_what_cannot_be_kept(tried, market, zones)
            for policy in study.policies:
                choose = functools.partial(decide, policy)
                if policy is Policy.LEARNED:
                    choose = functools.partial(choose, tables=_learned(tried, market, zones, tables))
                yield Result(
                    zones=tuple(zone.name for zone in zones),
                    deadline=deadline,
                    policy=policy,
                    outcomes=tuple(_outcomes(tried, seen, choose, submitted)),
                )


def _learned(
    scenario: Scenario,
    market: RecordedMarket,
    zones: Sequence[RecordedZone],
    tables: Callable[[Sequence[str]], PolicyTables],
) -> Tables:
    """Return the tables for these zones, at the mean price of the cheapest."""
    usd_per_hour = min(mean_price(zone, market.ticks) for zone in zones)
    maker = tables([zone.name for zone in zones])
    return maker.tables(task_of(scenario, market), len(zones), market.gpus, float(usd_per_hour))


def _outcomes(scenario: Scenario, seen: Timeline, choose: Decide, submitted: Sequence[int]) -> Iterator[Outcome]:
    task, money = task_of(scenario, seen.market), float(scenario.spendable_usd(seen.market))
    for start in submitted:
        run = replay(choose, task, seen, start, scenario.recovery, money)
        usd = bill_usd(run, seen)
        took = None if run.finished_s is None else timedelta(seconds=run.finished_s)
        yield Outcome(
            usd=usd,
            took=took,
            missed=took is None or took > scenario.deadline,
            over_budget=usd > scenario.budget_usd,
            interruptions=run.interruptions,
            launches=run.launches,
        )
