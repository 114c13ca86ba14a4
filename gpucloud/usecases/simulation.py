"""Replays a job on recorded markets: what it would have cost under each policy, had it been submitted then."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.markets import RecordedMarket, RecordedZone
from gpucloud.domain.policy.decide import Policy, decide
from gpucloud.domain.simulation.bill import bill_usd
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.replay import replay
from gpucloud.domain.simulation.scenario import Scenario, refuse_what_cannot_be_kept, starts, task_of
from gpucloud.domain.simulation.timeline import Timeline, timeline


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


def simulate(scenario: Scenario, market: RecordedMarket, study: Study) -> Iterator[Result]:
    """Yield the results, all of them over windows that begin at the same moments.

    Raises PlanRefused where a deadline or the budget cannot be kept, UsageError where the market cannot hold the job.
    """
    submitted = starts(market, max(study.deadlines), study.windows, study.seed)
    for zones in study.zone_sets:
        seen = timeline(market, zones, scenario.nodes)
        for deadline in study.deadlines:
            tried = replace(scenario, deadline=deadline)
            refuse_what_cannot_be_kept(tried, market, zones)
            for policy in study.policies:
                yield Result(
                    zones=tuple(zone.name for zone in zones),
                    deadline=deadline,
                    policy=policy,
                    outcomes=tuple(_outcome(tried, seen, policy, start) for start in submitted),
                )


def _outcome(scenario: Scenario, seen: Timeline, policy: Policy, start: int) -> Outcome:
    choose = functools.partial(decide, policy)
    task, money = task_of(scenario, seen.market), float(scenario.spendable_usd(seen.market))
    run = replay(choose, task, seen, start, scenario.recovery, money)
    usd = bill_usd(run, seen)
    took = None if run.finished_s is None else timedelta(seconds=run.finished_s)
    return Outcome(
        usd=usd,
        took=took,
        missed=took is None or took > scenario.deadline,
        over_budget=usd > scenario.budget_usd,
        interruptions=run.interruptions,
        launches=run.launches,
    )
