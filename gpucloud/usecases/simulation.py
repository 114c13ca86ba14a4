"""Replays a job on recorded markets: what it would have cost under each policy, had it been submitted then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.markets import RecordedMarket, RecordedZone
from gpucloud.domain.policy.decide import decide, without_deadline
from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.simulation.outcome import Outcome, Summary, summary
from gpucloud.domain.simulation.rehearsal import Rehearsal, followed_s, outcomes
from gpucloud.domain.simulation.replay import Decide
from gpucloud.domain.simulation.scenario import Scenario, refuse_what_cannot_be_kept, starts, task_of
from gpucloud.domain.simulation.timeline import Timeline, timeline
from gpucloud.ports import PolicyTables


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
        seen = timeline(market, zones, scenario.nodes, scenario.terms.beside_usd_per_hour)
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
                    outcomes=tuple(outcomes(choose, _rehearsal(tried, seen), submitted)),
                )


def _followed(scenario: Scenario, market: RecordedMarket, study: Study) -> timedelta:
    """Return for how long each replay is followed at the least."""
    fallback = None in study.policies
    spans = [followed_s(task_of(replace(scenario, deadline=one), market), fallback=fallback) for one in study.deadlines]
    return timedelta(seconds=max(spans))


def _learned(scenario: Scenario, market: RecordedMarket, zones: Sequence[RecordedZone], maker: PolicyTables) -> Tables:
    """Return the tables for these zones, at the cheapest price when the recording began: nobody knew the later ones."""
    usd_per_hour = min(zone.prices[0][1] for zone in zones) + scenario.terms.beside_usd_per_hour
    return maker.tables(task_of(scenario, market), len(zones), market.gpus, float(usd_per_hour))


def _rehearsal(scenario: Scenario, seen: Timeline) -> Rehearsal:
    return Rehearsal(
        task=task_of(scenario, seen.market),
        market=seen,
        recovery=scenario.recovery,
        budget_usd=scenario.budget_usd,
        spendable_usd=scenario.spendable_usd(seen.market),
        terms=scenario.terms,
    )
