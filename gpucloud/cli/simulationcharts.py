"""Rehearsals as charts: how costs are distributed, or how they fall with a later deadline."""

from __future__ import annotations

from collections.abc import Sequence

from gpucloud.cli.simulations import Simulation, policy_named, zones_named
from gpucloud.domain.chart import Chart, Series
from gpucloud.domain.simulation.scenario import Scenario
from gpucloud.usecases.simulation import Result


def charts(scenario: Scenario, done: Sequence[Simulation]) -> tuple[Chart, ...]:
    """Return a panel for each market and set of zones: costs against deadlines if there are several, else spread."""
    return tuple(_chart(scenario, one, zones) for one in done for zones in dict.fromkeys(r.zones for r in one.results))


def _chart(scenario: Scenario, done: Simulation, zones: tuple[str, ...]) -> Chart:
    swept = len(done.study.deadlines) > 1
    within = [result for result in done.results if result.zones == zones]
    of_policy = [[result for result in within if result.policy is policy] for policy in done.study.policies]
    return Chart(
        title=f"{done.market.name}: {zones_named(done.market, zones)}",
        x_label="hours until the deadline" if swept else "% of the windows that cost no more",
        y_label="mean USD, shaded up to nine in ten" if swept else "cost in USD",
        series=tuple(_against_deadlines(results) if swept else _spread(results[0]) for results in of_policy),
        limit=("budget", float(scenario.budget_usd)),
    )


def _against_deadlines(results: Sequence[Result]) -> Series:
    dated = [(result.deadline, result.summary) for result in results if result.deadline is not None]
    found = [(deadline.total_seconds() / 3600, summary) for deadline, summary in dated]
    return Series(
        label=policy_named(results[0].policy),
        points=tuple((hours, float(one.mean_usd)) for hours, one in found),
        upper=tuple(float(one.p90_usd) for _, one in found),
    )


def _spread(result: Result) -> Series:
    costs = sorted(float(outcome.usd) for outcome in result.outcomes)
    points = tuple((100 * number / len(costs), usd) for number, usd in enumerate(costs, start=1))
    return Series(label=policy_named(result.policy), points=points)
