"""What replays foretell of a job: its rule without a deadline, zones, replays without an end, what stands beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.cli.commands.simulate import _against_deadlines
from gpucloud.cli.render.simulations import Simulation, _result_json, _row, _swept, _troubles
from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.learned import Tables
from gpucloud.domain.market.outcome import ON_DEMAND, Outcome, Summary, between, summary
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import decide, without_deadline
from gpucloud.domain.market.recordings import timeline, zone_set
from gpucloud.domain.market.scenario import USUAL, Recovery, Scenario
from gpucloud.domain.market.simulation import Rehearsal, bill_usd, outcomes, recordings, replay, spread, zone_sets
from gpucloud.domain.money.ledger import Rates, Terms
from gpucloud.usecases.money.simulate import Outlooks, Result, Stage, Study, simulate
from tests.standins.tiny_markets import tiny_market

HOUR_S = 3600.0
MARKETS = PackagedMarkets()
OUTLOOKS = Outlooks(markets=MARKETS, tables=TableMaker())
STAGE = Stage(gpus=1, zones=1, spot_usd_per_hour=Decimal("0.2"), on_demand_usd_per_hour=Decimal("0.5"))
TASK = Task(work_s=48 * HOUR_S, span_s=60 * HOUR_S, changeover_s=720.0, on_demand_usd_per_hour=0.5)
TERMS = Terms(
    disk_gib=100,
    public_address=True,
    rates=(Rates(region="us-east-1", disk_usd_per_gib_month=Decimal("0.08"), address_usd_per_hour=Decimal("0.005")),),
)


def outlook(task: Task = TASK, stage: Stage = STAGE, policy: Policy | None = Policy.UNIFORM) -> Summary:
    found = OUTLOOKS.outlook(policy, task, stage, budget_usd=Decimal(1000), windows=36)
    assert found is not None
    return found


def test_a_job_without_a_deadline_takes_spot_after_each_loss_and_keeps_what_it_has_on_demand() -> None:
    market = tiny_market({"a": ("1100100111", "1.00"), "b": ("0011000111", "0.80")})
    task = Task(work_s=1200, span_s=float("inf"), changeover_s=240, on_demand_usd_per_hour=3.0, tick_s=180)
    run = replay(without_deadline, task, timeline(market, market.zones, 1), 0, Recovery(restart_s=180, notice_s=60))
    assert [(lifetime.zone, lifetime.launched_s) for lifetime in run.lifetimes] == [
        (0, 0),
        (1, 360),
        (0, 720),
        (ON_DEMAND, 900),
    ]


def test_without_a_deadline_no_net_holds_a_job_on_demand_after_its_first_interruption() -> None:
    undated = replace(TASK, span_s=float("inf"))
    four = replace(STAGE, zones=4)
    found = outlook(undated, four, policy=None)
    at_the_edge = outlook(replace(TASK, span_s=TASK.work_s + 2 * TASK.changeover_s), four)
    assert found.interruptions > 2 * at_the_edge.interruptions
    assert found.mean_usd < at_the_edge.mean_usd


def test_more_zones_never_cost_more() -> None:
    costs = [outlook(stage=replace(STAGE, zones=zones)).mean_usd for zones in (1, 2, 3, 4, 5)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[3]


def test_a_job_in_so_many_zones_is_replayed_in_every_set_of_so_many() -> None:
    market = MARKETS.market("p3.2xlarge-2023-02")
    assert [[len(zones) for zones in sets] for sets in zone_sets(market, 3)] == [[3, 3, 3, 3], [2], [3]]
    assert [len(sets) for sets in zone_sets(market, 2)] == [6, 1, 3]


def test_starts_are_apart_and_as_many_for_every_set() -> None:
    assert spread(110, 3, 12) == ((0, 30, 60, 90), (10, 40, 70, 100), (20, 50, 80, 110))
    assert spread(0, 2, 4) == ((0,), (0,))


def test_replays_that_never_end_are_missed_and_in_no_cost() -> None:
    ended = Outcome(
        usd=Decimal(10), took=timedelta(hours=5), missed=False, over_budget=False, interruptions=1, launches=2
    )
    never = replace(ended, usd=Decimal(3), took=None, missed=True)
    found = summary((ended, never, ended))
    assert (found.windows, found.missed, found.unended, found.mean_usd) == (3, 1, 1, Decimal("10.00"))


def test_a_job_on_spot_alone_counts_every_replay() -> None:
    found = outlook(stage=replace(STAGE, gpus=8, fallback=False))
    assert (found.windows, found.unended) == (36, 0)
    assert 0 < found.late == found.missed
    assert found.took is not None
    assert found.took.total_seconds() <= TASK.span_s  # of none that ran on behind its deadline


def test_a_replay_ends_at_its_deadline_unfinished_and_costs_what_it_had_by_then() -> None:
    market = tiny_market({"a": ("1" * 20, "1.00")})
    task = Task(work_s=1800, span_s=math.inf, changeover_s=240, on_demand_usd_per_hour=3.0, tick_s=180)
    for deadline_s, took_s, usd in ((1300.0, None, "0.3611"), (1979.0, None, "0.5497"), (1980.0, 1980.0, "0.5500")):
        of = Rehearsal(
            task=task,
            market=timeline(market, market.zones, 1),
            recovery=Recovery(restart_s=180, notice_s=60),
            budget_usd=Decimal(100),
            spendable_usd=Decimal(100),
            terms=Terms(),
            deadline_s=deadline_s,
        )
        (done,) = outcomes(partial(decide, Policy.GREEDY), of, [0])
        assert (done.took and done.took.total_seconds(), done.late, done.missed) == (took_s, not took_s, not took_s)
        assert abs(done.usd - Decimal(usd)) < Decimal("0.001")


def test_the_time_between_interruptions_is_of_spot_machines() -> None:
    found = outlook()
    on_spot = between(found)
    assert on_spot is not None
    assert on_spot < timedelta(seconds=TASK.work_s) / found.interruptions


def test_the_learned_policy_is_told_the_price_at_the_beginning_of_the_recording_and_none_of_later() -> None:
    told: list[tuple[tuple[str, ...], float]] = []

    class Noting:
        def __init__(self, unseen: Sequence[str]) -> None:
            self.unseen = tuple(unseen)

        def tables(self, task: Task, zones: int, gpus: int, spot_usd_per_hour: float) -> Tables:
            told.append((self.unseen, spot_usd_per_hour))
            return TableMaker().tables(task, zones, gpus, spot_usd_per_hour)

    market = MARKETS.market("p3.2xlarge-2023-02")
    scenario = Scenario(
        work=timedelta(hours=2), deadline=timedelta(hours=3), budget_usd=Decimal(50), nodes=1, recovery=USUAL
    )
    sets = (zone_set(market, "us-east-1c"),)
    study = Study(
        zone_sets=sets, policies=(Policy.LEARNED,), deadlines=(scenario.deadline,), windows=1, seed=0, unseen=("other",)
    )
    assert len(list(simulate(scenario, market, study, Noting))) == 1
    assert told == [(("p3.2xlarge-2023-02", "other"), float(sets[0][0].prices[0][1]))]
    assert told[0][1] == pytest.approx(1.205, abs=0.001)  # over all six weeks it is 1.279


def test_disk_and_address_are_in_the_cost_and_due_for_machines_that_are_taken() -> None:
    market = tiny_market({"us-east-1a": ("1100111111", "1.00")})
    task = Task(work_s=720, span_s=1800, changeover_s=240, on_demand_usd_per_hour=3.0169, tick_s=180)
    observation = timeline(market, market.zones, 1, TERMS.extras_usd_per_hour)
    run = replay(partial(decide, Policy.GREEDY), task, observation, 0, Recovery(restart_s=180, notice_s=60))
    with_extras, without = bill_usd(run, observation, TERMS), bill_usd(run, observation)
    seconds = sum(lifetime.ended_s - lifetime.launched_s for lifetime in run.lifetimes)
    hourly = Decimal("0.08") * 100 / 672 + Decimal("0.005")  # a February
    assert with_extras - without == pytest.approx(hourly * Decimal(seconds) / 3600, abs=Decimal("1e-6"))
    assert run.usd == pytest.approx(float(with_extras), abs=1e-5)


def test_a_type_without_an_address_has_a_disk_alone() -> None:
    terms = replace(TERMS, without_address=("p5.48xlarge",))
    assert terms.of("p5.48xlarge").extras_usd_per_hour == Decimal("0.011905")
    assert terms.of("g5.xlarge").extras_usd_per_hour == Decimal("0.016905")


@pytest.mark.parametrize(("gpus", "first"), [(1, "p3.2xlarge-2023-02"), (8, "p3.16xlarge-2022-10")])
def test_machines_are_rehearsed_on_recordings_of_about_as_many_gpus(gpus: int, first: str) -> None:
    assert recordings(gpus)[0] == first


def test_a_sweep_and_its_chart_give_no_price_for_runs_that_mostly_come_to_no_end() -> None:
    over = Outcome(usd=Decimal(40), took=None, missed=True, over_budget=True, interruptions=1, launches=2)
    lost = replace(over, usd=Decimal(7), over_budget=False)
    done = replace(lost, usd=Decimal(5), took=timedelta(hours=3), missed=False)
    budget = Decimal(40)
    market = tiny_market({"a": ("1100111111", "1.00")})
    hours = (timedelta(hours=4), timedelta(hours=6), timedelta(hours=8))
    of_each = ((over,) * 10, (lost,) * 10, (done,) * 10)
    results = tuple(
        Result(zones=("a",), deadline=deadline, policy=Policy.GREEDY, outcomes=outcomes)
        for deadline, outcomes in zip(hours, of_each, strict=True)
    )
    study = Study(zone_sets=(), policies=(Policy.GREEDY,), deadlines=hours, windows=10, seed=1)
    simulation = Simulation(market=market, study=study, results=results)
    scenario = Scenario(nodes=1, work=timedelta(hours=3), deadline=None, budget_usd=budget, recovery=USUAL)
    costs = [row[-1] for row in _swept(scenario, simulation)[1:]]
    assert costs == ["over budget", "unfinished", "5.00"]
    cells = [_row(scenario, market, result)[5] for result in results]
    told = [_result_json(scenario, market, result) for result in results]
    assert (cells[:2], [one["mean_usd"] for one in told]) == (["-", "-"], ["40", None, "5"])
    assert [one["of_on_demand"] is None for one in told] == [True, True, False]
    assert _troubles(simulation)[0] == "greedy in a, 4 h: 10 of 10 ended unfinished at the budget"
    assert _against_deadlines(results).points == ((8.0, 5.0),)
