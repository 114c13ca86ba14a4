"""Replays a job on recorded markets: what it would have cost under each policy, had it been submitted then."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.markets import RecordedMarket, RecordedZone
from gpucloud.domain.policy.decide import Policy, decide
from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.bill import bill_usd
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.scenario import Scenario, refuse_what_cannot_be_kept, task_of
from gpucloud.domain.simulation.replay import replay
from gpucloud.domain.simulation.timeline import Timeline, timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy came to in one set of zones, with every replay's outcome in the windows' order."""

    zones: tuple[str, ...]
    policy: Policy
    outcomes: tuple[Outcome, ...]

    @property
    def summary(self) -> Summary:
        """The outcomes taken together."""
        return summary(self.outcomes)


def simulate(
    scenario: Scenario,
    market: RecordedMarket,
    zones: Sequence[RecordedZone],
    policies: Sequence[Policy],
    starts: Sequence[int],
) -> Iterator[Result]:
    """Yield each policy's result over the same windows, which begin at the looks `starts`.

    Raises PlanRefused where the deadline or the budget cannot be kept.
    """
    refuse_what_cannot_be_kept(scenario, market, zones)
    seen = timeline(market, zones, scenario.nodes)
    task = task_of(scenario, market)
    for policy in policies:
        outcomes = [_outcome(scenario, task, seen, policy, start) for start in starts]
        yield Result(zones=tuple(zone.name for zone in zones), policy=policy, outcomes=tuple(outcomes))


def _outcome(scenario: Scenario, task: Task, seen: Timeline, policy: Policy, start: int) -> Outcome:
    choose = functools.partial(decide, policy)
    run = replay(choose, task, seen, start, scenario.recovery, float(scenario.spendable_usd(seen.market)))
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
