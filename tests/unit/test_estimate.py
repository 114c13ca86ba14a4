"""What a plan foretells: per machine, per policy and per deadline, replayed on recorded markets."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpucloud.adapters.aws.prices.catalog import region_rates
from gpucloud.adapters.aws.prices.market import ListedMarket
from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.cli.render.estimates import deadline_chart, estimate_json, estimate_text
from gpucloud.cli.render.plans import plan_rows, plan_text
from gpucloud.domain.checkpoint.protection import Code, Protection, Saving, protection_of
from gpucloud.domain.errors import PlanRefused, UsageError
from gpucloud.domain.job.quantities import parse_span
from gpucloud.domain.job.spec import (
    RENTED,
    CheckpointDirectory,
    CheckpointPolicy,
    Cloud,
    Job,
    Market,
    MarketPolicy,
    Model,
    OnNotice,
    Policy,
    Precision,
    Resources,
    Strategy,
)
from gpucloud.domain.market.catalog import Catalog, Machine, PriceList, SpotList
from gpucloud.domain.market.outcome import Outcome, Summary
from gpucloud.domain.money.budget import PrepaidRule, Used
from gpucloud.domain.money.ledger import Terms
from gpucloud.usecases.money.estimate import QUICK, Estimate, Estimator, Planner
from gpucloud.usecases.money.simulate import Outlooks
from tests.fakes.account import FakeAccount
from tests.fakes.clock import JumpingClock
from tests.fakes.market import A100, H100, NOW, V100, FakeMarket, Kind

HOUR = timedelta(hours=1)
JOB = Job(
    name="digits",
    run="train.py",
    budget_usd=Decimal(200),
    source=Path("digits.yaml"),
    code=Path(),
    cloud=Cloud.AWS,
    resources=Resources(market=MarketPolicy.AUTO),
    deadline=16 * HOUR,
    work=12 * HOUR,
)
SPOT_ALONE = replace(JOB, resources=Resources(market=MarketPolicy.SPOT))
OUTLOOKS = Outlooks(markets=PackagedMarkets(), tables=TableMaker())


def planner_of(job: Job, *kinds: Kind, on_demand: int = 999, saving: Saving = Saving.RESUME) -> Planner:
    account = FakeAccount({Market.SPOT: 999, Market.ON_DEMAND: on_demand}) if job.cloud is Cloud.AWS else None
    return Planner(
        market=FakeMarket(*kinds),
        account=account,
        clock=JumpingClock(NOW),
        prepaid_rule=PrepaidRule(),
        terms=Terms(),
        changeover=timedelta(minutes=12),
        outlooks=lambda: OUTLOOKS,
        saving=lambda _: saving,
    )


def estimated(job: Job, *kinds: Kind, on_demand: int = 999, saving: Saving = Saving.RESUME) -> Estimate:
    planner = planner_of(job, *kinds, on_demand=on_demand, saving=saving)
    return Estimator(planner=planner, outlooks=OUTLOOKS, saving=saving).estimate(job)


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return estimated(JOB, V100, A100)


def test_what_is_expected_is_what_the_jobs_own_policy_comes_to(estimate: Estimate) -> None:
    greedy = estimated(replace(JOB, policy=Policy.GREEDY), V100)
    assert (greedy.policy, greedy.outlook) == (Policy.GREEDY, dict(greedy.policies)[Policy.GREEDY])
    assert (estimate.policy, estimate.outlook) == (Policy.LEARNED, dict(estimate.policies)[Policy.LEARNED])


def test_a_job_that_may_end_on_demand_keeps_its_deadline_for_less_than_on_demand(estimate: Estimate) -> None:
    assert estimate.outlook is not None
    assert estimate.on_demand is not None
    assert estimate.on_demand.mean_usd == Decimal("36.50")  # 3 · (12 h + 10 min)
    assert Decimal(12) < estimate.outlook.mean_usd < estimate.outlook.p90_usd <= Decimal("37.60")
    assert (estimate.outlook.missed, estimate.policy) == (0, Policy.LEARNED)
    assert [policy for policy, _ in estimate.policies] == [Policy.LEARNED, QUICK, Policy.GREEDY, Policy.ON_DEMAND]


def test_no_replay_is_said_to_stand_behind_a_figure_of_machines_on_demand() -> None:
    fixed = replace(JOB, policy=Policy.ON_DEMAND)
    text = estimate_text(fixed, estimated(fixed, V100), width=None)
    assert "  expected   36.50 USD\n" in text
    assert "expected: " not in text
    assert (
        "spot machines: 72 replays at these prices, 10 min a restart, machines and deadlines under `uniform`\n" in text
    )
    found = estimated(fixed, V100)
    alone = replace(found, candidates=found.candidates[:1], policies=found.policies[-1:])
    text = estimate_text(fixed, alone, width=None)
    assert "replays" not in text
    assert "recorded" not in text


def test_each_type_and_market_is_a_candidate_at_its_best_price(estimate: Estimate) -> None:
    found = [(str(one.offer.pool), one.zones) for one in estimate.candidates]
    assert found == [
        ("p3.2xlarge spot in us-east-1a", 3),
        ("p3.2xlarge on_demand in us-east-1a", 3),
        ("p4d.24xlarge spot in us-east-1a", 3),
        ("p4d.24xlarge on_demand in us-east-1a", 3),
    ]


def test_more_time_costs_less(estimate: Estimate) -> None:
    assert [point.deadline / HOUR for point in estimate.curve] == pytest.approx([12.64, 13.6, 15.4, 18.4, 24.4, 36.4])
    costs = [point.outlook.mean_usd for point in estimate.curve]
    assert costs[0] > costs[-1]
    assert max(costs) <= Decimal("37.60")


def test_the_same_job_has_the_same_estimate(estimate: Estimate) -> None:
    assert estimated(JOB, V100, A100) == estimate


def test_both_quotas_of_the_chosen_machines_are_told(estimate: Estimate) -> None:
    assert estimate.quotas is not None
    assert [(need.room.name, need.vcpus) for need in estimate.quotas] == [("All spot", 8), ("All on_demand", 8)]


def test_a_deadline_on_spot_machines_alone_may_be_missed() -> None:
    spot = replace(JOB, resources=Resources(market=MarketPolicy.SPOT))
    found = estimated(spot, V100)
    assert found.outlook is not None
    assert found.outlook.missed > 0
    assert found.policy is None
    assert found.outlook.took is not None
    assert found.outlook.took <= 16 * HOUR
    text = estimate_text(spot, found, width=None)
    ends = "  deadline   16 h after its first start the job ends, done or not, and saves first if its script does; it"
    assert f"{ends} depends on spot alone, `market: auto` keeps it on demand\n" in text
    assert f"  missed     in {found.outlook.missed} of 72 replays: {found.outlook.late} ended unfinished at" in text
    assert "deadline is after" not in text


def test_a_quota_that_holds_nothing_on_demand_refuses_a_deadline() -> None:
    with pytest.raises(PlanRefused, match="needs machines on demand"):
        estimated(JOB, V100, on_demand=0)


def test_a_job_without_a_deadline_that_takes_spot_alone_waits_for_it() -> None:
    found = estimated(replace(JOB, deadline=None, resources=Resources(market=MarketPolicy.SPOT)), V100)
    assert found.outlook is not None
    assert found.outlook.took is not None
    assert found.outlook.took > 13 * HOUR
    assert found.outlook.mean_usd < Decimal(14)  # all of it at a third of 3 USD, starts included


def test_machines_that_nobody_takes_cost_what_they_cost() -> None:
    local = replace(JOB, cloud=Cloud.LOCAL, resources=Resources(market=MarketPolicy.SPOT))
    found = estimated(local, Kind("local.p2.xlarge", None, 1, None, Decimal("0.9")))
    assert found.outlook is not None
    assert (found.outlook.mean_usd, found.outlook.windows) == (Decimal("3.65"), 0)  # 0.3 · (12 h + 10 min)
    assert found.quotas == ()
    text = estimate_text(local, found, width=None)
    assert "expected   3.65 USD\n  done after 12 h 10 min, 10 min paid for a start included;" in text


def test_a_start_is_as_long_in_the_time_that_is_expected_as_in_what_the_budget_pays_for() -> None:
    local = replace(JOB, cloud=Cloud.LOCAL, resources=Resources(market=MarketPolicy.SPOT))
    planner = planner_of(local, Kind("local.p2.xlarge", None, 1, None, Decimal("0.9")))
    quick = replace(planner, changeover=timedelta(seconds=30))  # of which a notice undoes the half
    text = estimate_text(local, Estimator(planner=quick, outlooks=OUTLOOKS).estimate(local), width=None)
    assert "less what is kept aside, 0.0175 USD of time after its last step and 1 min paid for a start:" in text
    assert "done after 12 h 1 min, 1 min paid for a start included;" in text


def test_the_plan_of_a_start_says_when_its_deadline_ends_it() -> None:
    protection = Protection(saving=Saving.RESUME, row="by gpucloud.resume")
    said = plan_text(planner_of(JOB, V100).plan(JOB), protection)
    assert (
        "\n  deadline   16 h after its first start the job ends, done or not, and saves first if its script does\n"
        in said
    )
    without = replace(JOB, deadline=None)
    assert "deadline" not in plan_text(planner_of(without, V100).plan(without), protection)


def test_a_long_job_is_replayed_shorter() -> None:
    long = replace(JOB, deadline=1600 * HOUR, work=1200 * HOUR, budget_usd=Decimal(20_000))
    found = estimated(long, V100)
    assert found.outlook is not None
    assert found.outlook.took is not None
    assert 1200 * HOUR < found.outlook.took <= 1600 * HOUR
    assert Decimal(1200) < found.outlook.mean_usd < Decimal(3660)


def test_each_row_is_of_its_own_machine() -> None:
    rows = estimated(JOB, V100, A100).candidates
    big = next(row for row in rows if row.offer.gpu == "A100" and row.offer.pool.market is Market.SPOT)
    assert big.outlook is not None
    # 12 h at 11 USD an hour, and it ends on its own type at 33: never at what V100s cost
    assert Decimal(132) < big.outlook.mean_usd < Decimal(403)
    assert big.ends_on is None


def test_a_machine_that_cannot_be_had_on_demand_says_what_it_ends_on() -> None:
    rented = Kind("p3.8xlarge", "V100", 4, 16, Decimal(12))
    planner = Planner(
        market=FakeMarket(V100, rented),
        account=FakeAccount({Market.SPOT: 999, Market.ON_DEMAND: 999}),
        clock=JumpingClock(NOW),
        prepaid_rule=PrepaidRule(),
        terms=Terms(),
        changeover=timedelta(minutes=12),
    )
    plan = planner.plan(JOB)
    few = replace(plan, offers=tuple(o for o in plan.offers if o.gpus == 1 or o.pool.market is Market.SPOT))
    rows = list(Estimator(planner=planner, outlooks=OUTLOOKS)._candidates(JOB, few))
    assert [str(row.ends_on) for row in rows if row.ends_on is not None] == ["p3.2xlarge on_demand in us-east-1a"]


def test_a_row_that_the_budget_does_not_pay_for_says_so_and_no_other_machines_sum() -> None:
    pair = Resources(nodes=2, gpus=8, market=MarketPolicy.AUTO)
    job = replace(JOB, budget_usd=Decimal(280), deadline=None, work=8 * HOUR, resources=pair)
    found = estimated(job, A100, H100)
    rows = {str(row.offer.pool.instance_type): row for row in found.candidates if row.offer.pool.market is Market.SPOT}
    # 8.2 h: 2 · 11 USD an hour are 180.40, and 2 · 18 are 295.20; on demand 541.20 and 885.60
    assert rows["p4d.24xlarge"].outlook is not None
    assert Decimal("150") < rows["p4d.24xlarge"].outlook.mean_usd < Decimal(280)
    dear = rows["p5.48xlarge"].outlook
    assert dear is not None
    assert (dear.mean_usd, dear.took, dear.over_budget + dear.unended) == (Decimal("280.00"), None, dear.windows)
    lines = [line for line in estimate_text(job, found, width=None).splitlines() if "over budget" in line]
    # p4d: it ends on demand after its first loss, which more often than not comes too early for 280 USD
    assert [line.split(" in ")[0] for line in lines if line.count("over budget") == 2] == [
        "p4d.24xlarge spot",
        "p5.48xlarge spot",
        "p4d.24xlarge on_demand",
        "p5.48xlarge on_demand",
    ]


def test_a_job_that_may_go_on_demand_and_has_no_deadline_asks_no_policy() -> None:
    undated = replace(JOB, deadline=None)
    found = estimated(undated, V100)
    assert (found.policy, found.policies) == (None, ())
    assert found.outlook is not None
    assert found.outlook.missed == 0
    text = estimate_text(undated, found, width=None)
    assert "spot after each loss, and on demand to the end once no zone has any" in text
    assert "uniform" not in text


@pytest.mark.parametrize("saving", [Saving.NONE, Saving.NOTHING])
def test_a_script_that_saves_nothing_is_replayed_from_its_beginning(saving: Saving) -> None:
    kept, found = estimated(SPOT_ALONE, V100), estimated(SPOT_ALONE, V100, saving=saving)
    assert found.outlook is not None
    assert kept.outlook is not None
    assert (kept.outlook.is_mostly_unfinished, found.outlook.is_mostly_unfinished) == (False, True)  # 12 h, in 16 h
    assert found.outlook.missed == found.outlook.late
    assert found.saves is None
    text = estimate_text(SPOT_ALONE, found, width=None, protection=Protection(saving=saving, row="nothing"))
    assert "replayed as a script that begins anew whenever its machines go" in text


def test_where_spot_machines_do_not_pay_for_a_script_that_saves_nothing_on_demand_is_named() -> None:
    long = replace(SPOT_ALONE, work=48 * HOUR, deadline=60 * HOUR)
    found = estimated(long, replace(V100, zones="a"), saving=Saving.NOTHING)
    text = estimate_text(long, found, width=None, protection=Protection(saving=Saving.NOTHING, row="nothing"))
    assert "spot machines do not pay for such a script: `resources: {market: on_demand}`, or have it save" in text


def test_a_script_that_saves_by_itself_costs_no_less_than_one_that_saves_on_a_notice(estimate: Estimate) -> None:
    by_itself = replace(JOB, checkpoint=CheckpointPolicy(directory=CheckpointDirectory(path="out")))
    found = estimated(by_itself, V100, saving=Saving.DIRECTORY)
    nothing = estimated(JOB, V100, saving=Saving.NOTHING)
    assert found.outlook is not None
    assert estimate.outlook is not None
    assert nothing.outlook is not None
    assert estimate.outlook.mean_usd <= found.outlook.mean_usd <= nothing.outlook.mean_usd
    assert found.outlook.missed == 0
    text = estimate_text(by_itself, found, width=None, protection=Protection(saving=Saving.DIRECTORY, row="out"))
    undone = "replayed as a script that saves by itself: an interruption undoes "
    assert f"{undone}up to 10 min of work, and so does a change of machines" in text


def test_a_script_that_is_asked_by_a_signal_is_said_to_be_replayed_with_its_notice() -> None:
    kept = CheckpointDirectory(path="out", on_notice=OnNotice.SIGTERM)
    asked = replace(JOB, checkpoint=CheckpointPolicy(directory=kept))
    found = estimated(asked, V100, saving=Saving.DIRECTORY)
    text = estimate_text(asked, found, width=None, protection=protection_of(asked, Code(script="train.py")))
    assert (
        "saves      asked by SIGTERM at a notice, and what is whole in out/; an interruption without one costs" in text
    )
    assert "saves by itself: an interruption undoes the 2 min of its notice" in text


@pytest.mark.parametrize(
    ("asked", "saving"),
    [(replace(JOB, checkpoint=CheckpointPolicy(none=True)), Saving.NONE), (JOB, Saving.NOTHING)],
)
def test_a_job_that_saves_nothing_keeps_its_deadline_whether_its_file_says_so_or_not(
    asked: Job, saving: Saving
) -> None:
    found = estimated(asked, V100, saving=saving)
    assert found.outlook is not None
    # 12 h of work in 16 h: a run that fails leaves no time for another, and all of it is on demand, 10 min a start
    assert (found.outlook.missed, found.outlook.mean_usd) == (0, Decimal("36.50"))


def test_a_job_too_long_for_the_recordings_that_begins_anew_has_no_outlook() -> None:
    long = replace(JOB, deadline=1600 * HOUR, work=1200 * HOUR, budget_usd=Decimal(20_000))
    assert estimated(long, V100, saving=Saving.NOTHING).outlook is None


def test_without_an_account_a_job_is_replayed_in_as_many_zones_as_the_catalog_knows() -> None:
    def planned(zones: int | None) -> Estimate:
        machine = Machine(name="g5.xlarge", gpu="A10G", gpus=1, vram_gib=24, vcpus=4, memory_gib=16, efa=0)
        catalog = Catalog(
            machines={"g5.xlarge": machine},
            prices={"us-east-1": PriceList(as_of=NOW.date(), usd_per_hour={"g5.xlarge": Decimal("1.006")})},
            spot={"us-east-1": SpotList(as_of=NOW, usd_per_hour={"g5.xlarge": {"us-east-1a": Decimal("0.4")}})},
            zones={"us-east-1": {"g5.xlarge": zones}} if zones is not None else {},
        )
        planner = Planner(
            market=ListedMarket(catalog, ("us-east-1",)),
            account=None,
            clock=JumpingClock(NOW),
            prepaid_rule=PrepaidRule(),
            terms=Terms(),
            changeover=timedelta(minutes=12),
        )
        return Estimator(planner=planner, outlooks=OUTLOOKS).estimate(JOB)

    five, unknown = planned(5), planned(None)
    assert (five.candidates[0].zones, unknown.candidates[0].zones) == (5, 1)
    assert five.outlook is not None
    assert unknown.outlook is not None
    assert five.outlook.mean_usd < unknown.outlook.mean_usd


def test_a_budget_too_small_to_start_is_told_what_the_whole_work_needs() -> None:
    with pytest.raises(PlanRefused) as caught:
        estimated(replace(JOB, deadline=None, budget_usd=Decimal("0.10")), V100)
    # 12.2 h on demand at 3 USD, as after an early loss, and 210 s of as much kept aside, less a notice that never came
    assert (caught.value.hint or "").startswith("budget: 36.68 USD")
    assert "no `work:`" not in (caught.value.hint or "")  # it could not be started without, either
    with pytest.raises(PlanRefused) as caught:
        estimated(replace(JOB, work=None, deadline=None, budget_usd=Decimal("0.10")), V100)
    assert "fewer nodes" not in (caught.value.hint or "")


def test_a_plan_says_what_its_nodes_cost_on_the_dearest_machines_that_would_do(estimate: Estimate) -> None:
    text = estimate_text(JOB, estimate, width=None)
    said = "1.00 USD an hour now, 3.00 USD at the most; on others, where these are not to be had, up to 33.00 USD"
    assert said in text


def test_a_gpu_that_nobody_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanRefused) as caught:
        estimated(replace(JOB, resources=Resources(gpu=("h1000",), market=MarketPolicy.AUTO)), V100)
    assert caught.value.hint == "did you mean H100? gpucloud offers lists what there is"


def test_a_gang_is_said_to_come_and_go_together() -> None:
    pair = replace(JOB, resources=Resources(nodes=2, market=MarketPolicy.AUTO))
    text = estimate_text(pair, estimated(pair, V100), width=None)
    assert "recorded with one machine: all 2 are taken to come and go together" in text


def test_what_checkpoints_cost_in_s3_is_said_with_the_interval_that_costs_least() -> None:
    model = Model(params=7 * 10**9, strategy=Strategy.FSDP, tokens=10**10)
    resources = Resources(gpus=8, market=MarketPolicy.SPOT)
    job = replace(JOB, work=None, deadline=None, budget_usd=Decimal(5000), model=model, resources=resources)
    planner = Planner(
        market=FakeMarket(H100),
        account=None,
        clock=JumpingClock(NOW),
        prepaid_rule=PrepaidRule(),
        terms=Terms(rates=(region_rates("us-east-1"),)),
        changeover=timedelta(minutes=12),
    )
    found = Estimator(planner=planner, outlooks=OUTLOOKS).estimate(job)
    assert found.stored is not None
    assert found.stored.size == 84 * 10**9
    assert found.stored.cheapest_usd < found.stored.usd / 2
    text = estimate_text(job, found, width=None)
    assert "saves of 78.2 GiB, in no budget; `checkpoint: {every: " in text
    assert "what is stored in S3 is outside the budget" in text


def test_tokens_make_the_cheapest_training_the_best_machine() -> None:
    model = Model(params=7 * 10**9, strategy=Strategy.FSDP, tokens=10**10)
    resources = Resources(gpus=8, market=MarketPolicy.SPOT)
    job = replace(JOB, work=None, deadline=None, budget_usd=Decimal(5000), model=model, resources=resources)
    found = estimated(job, A100, H100)
    # An hour of H100 costs 1.6 times as much, and computes 3.2 times as much.
    assert [one.offer.gpu for one in found.candidates] == ["H100", "A100"]
    assert found.saves is not None
    text = estimate_text(job, found, width=None)
    assert "model      7.0B bf16 adamw fsdp over 8 GPUs" in text
    assert "= 18.8 GB of 80 on each; activations are not counted without `seq:`" in text
    assert "saves      every " in text
    known = protection_of(job, Code(script="train.py", reached=True))
    told = estimate_text(job, found, protection=known, width=None)
    assert "saves      by gpucloud.resume; " in told
    assert "the last save; every " in told


def test_a_gpu_without_the_models_precision_has_no_time() -> None:
    job = replace(JOB, work=None, deadline=None, model=Model(params=10**8, tokens=10**9))
    text = estimate_text(job, estimated(job, V100), width=None)
    assert "work       not known: there is no peak in bf16 for V100; `work: 48h` says it" in text


def test_a_job_of_unknown_work_is_told_how_to_say_it() -> None:
    job = replace(JOB, work=None)
    found = estimated(job, V100)
    assert (found.outlook, found.curve, found.saves) == (None, (), None)
    text = estimate_text(job, found, width=200)
    assert "work       not known: `work: 48h`, or `model: {tokens: 300B}`, makes time and cost known" in text
    with pytest.raises(UsageError, match="nothing to draw"):
        deadline_chart(job, found)


def test_a_deadline_that_cannot_be_kept_refuses_the_plan() -> None:
    with pytest.raises(PlanRefused) as caught:
        estimated(replace(JOB, deadline=12 * HOUR), V100)
    assert (caught.value.hint or "").startswith("deadline: 12h 29min (5 min of it")


def test_the_text_says_what_to_expect_and_where_it_comes_from(estimate: Estimate) -> None:
    text = estimate_text(JOB, estimate, width=200)
    assert "work       12 h: `work:` in the job file" in text
    assert "; on demand 36.50 USD" in text
    assert "the deadline is after 16 h" in text
    assert "worst cost 200.00 USD, then all machines are off" in text
    assert "quota: 8 vCPUs of 'All spot' in us-east-1, 0 of 999 in use" in text
    assert "expected cost by deadline, with `market: auto`: █" in text
    assert "p3.2xlarge (1 × V100) in 9 zones, 44 d 20 h from 2023-02-16 on (p3.2xlarge-2023-02)" in text
    assert "expected cost by deadline" not in estimate_text(JOB, estimate, width=None)


def test_the_json_has_every_number(estimate: Estimate) -> None:
    told = estimate_json(JOB, estimate)
    assert (told["plan"]["budget_usd"], told["plan"]["worst_usd"], told["work_s"]) == ("200", "200", 43200.0)
    assert told["policy"] == Policy.LEARNED.value
    assert told["on_demand"]["expected_usd"] == "36.5"
    assert len(told["by_deadline"]) == 6
    assert set(told["policies"]) == {"learned", "uniform", "greedy", "on_demand"}
    assert told["policies"]["learned"] == told["outlook"]
    assert told["candidates"][0]["outlook"] == told["policies"]["uniform"]
    assert told["quotas"][0]["enough"] is True
    assert told["recorded"] == ["p3.2xlarge-2023-02"]
    assert told["memory"] is None


def test_the_chart_has_the_deadline_the_price_on_demand_and_the_budget(estimate: Estimate) -> None:
    chart = deadline_chart(replace(JOB, budget_usd=Decimal(40)), estimate)
    assert [series.label for series in chart.series] == ["expected; shaded: 9 in 10", "on demand", "its deadline"]
    assert chart.series[2].points[0] == (16.0, 0.0)
    assert chart.limit == ("budget", 40.0)
    assert deadline_chart(JOB, estimate).limit is None  # 200 USD would press the rest flat


def failing(windows: int, unfinished: int, *, usd: str = "150.00") -> Summary:
    return Summary(
        windows=windows,
        mean_usd=Decimal(usd),
        p90_usd=Decimal(200),
        worst_usd=Decimal(200),
        missed=unfinished,
        over_budget=unfinished,
        interruptions=70.3,
        launches=71.3,
        took=None if windows == unfinished else 9 * HOUR,
    )


@pytest.mark.parametrize(
    ("unfinished", "cells"),
    [
        (0, ["150.00", "200.00", "9 h", "70.3", "0 of 72"]),
        (21, ["150.00 if done", "over budget", "9 h", "70.3", "21 of 72"]),  # 51 end after 9 h
        (55, ["over budget", "over budget", "unfinished", "-", "55 of 72"]),  # 9 h is of 17 in 72
        (72, ["over budget", "over budget", "unfinished", "-", "72 of 72"]),
    ],
)
def test_a_row_says_in_how_many_replays_its_machines_failed(
    estimate: Estimate, unfinished: int, cells: list[str]
) -> None:
    row = replace(estimate.candidates[0], outlook=failing(72, unfinished))
    lines = estimate_text(JOB, replace(estimate, candidates=(row,)), width=None).splitlines()
    line = next(line for line in lines if line.startswith("p3.2xlarge spot"))
    assert re.split(r" {2,}", line)[-5:] == cells


def test_what_fails_more_than_once_in_ten_has_no_sum_that_nine_in_ten_stay_below(estimate: Estimate) -> None:
    text = estimate_text(JOB, replace(estimate, outlook=failing(72, 21)), width=None)
    assert "expected   150.00 USD, in the 51 that finish; over budget in 21 of 72 replays: off at 200.00 USD," in text
    assert "done after 9 h in 51 of 72 replays; the deadline is after 16 h\n" in text


def test_what_mostly_fails_has_neither_a_cost_nor_a_time(estimate: Estimate) -> None:
    text = estimate_text(JOB, replace(estimate, outlook=failing(72, 55)), width=None)
    assert "expected   over budget in 55 of 72 replays: off at 200.00 USD, unfinished; on demand 36.50 USD\n" in text
    assert "done after unfinished in 55 of 72 replays; 9 h in the others; the deadline is after 16 h\n" in text


def test_machines_that_mostly_fail_come_after_those_that_finish() -> None:
    pair = Resources(nodes=2, gpus=8, market=MarketPolicy.AUTO)
    found = estimated(
        replace(JOB, deadline=None, budget_usd=Decimal(560), work=8 * HOUR, resources=pair),
        A100,
        H100,
        saving=Saving.NOTHING,
    )
    # a run from the beginning to the end, 8.2 h, costs 541.20 USD on A100s on demand, and 885.60 on H100s
    assert [(one.offer.gpu, one.offer.pool.market) for one in found.candidates] == [
        ("A100", Market.SPOT),
        ("A100", Market.ON_DEMAND),
        ("H100", Market.SPOT),
        ("H100", Market.ON_DEMAND),
    ]


def test_a_budget_is_said_to_train_at_every_price_that_is_named_without_what_is_kept_aside(estimate: Estimate) -> None:
    text = estimate_text(JOB, estimate, width=None)
    assert (
        "200.00 USD less what is kept aside, 0.0583 USD of time after its last step and 1 min paid for a start:"
        " trains 8 d 8 h at this price, 66 h 34 min at 3.00 USD an hour, 5 h 58 min at 33.00 USD an hour\n"
        "  kept aside 0.175 USD for the last save and the machines' end,"
        " which no training may use: 3 min 30 s at 3.00 USD an hour, or 1.92 USD at 33.00 USD an hour\n" in text
    )
    alone = estimate_text(JOB, estimated(JOB, V100), width=None)
    assert (
        "paid for a start: trains 8 d 8 h at this price, 66 h 34 min at 3.00 USD an hour\n  kept aside 0.175" in alone
    )


def test_a_plan_names_what_is_spent_of_the_budget_and_no_time_beyond_a_year() -> None:
    plan = planner_of(JOB, V100).plan(JOB)
    rows = plan_rows(replace(plan, used=Used(spent_usd=Decimal("0.25")), trains=timedelta(days=36525)))
    assert rows["budget"] == (
        "200.00 USD less 0.25 USD spent, less what is kept aside, 0.0583 USD of time after its last step and 1 min paid"
        " for a start: trains more than a year at this price, 66 h 34 min at 3.00 USD an hour"
    )


SPOT_PAIR = replace(JOB, deadline=None, work=8 * HOUR, resources=Resources(nodes=2, gpus=8, market=MarketPolicy.SPOT))
SURE = Decimal("184.25")  # 2 · 11 · 8.2 h, and 210 s of 2 · 33 kept aside


def test_a_budget_that_replays_hold_is_not_refused_though_it_does_not_surely_suffice() -> None:
    surely = estimated(replace(SPOT_PAIR, budget_usd=SURE), A100).outlook
    assert surely is not None
    assert surely.p90_usd < SURE
    below = replace(SPOT_PAIR, budget_usd=SURE - 10)
    found = estimated(below, A100)
    assert found.outlook is not None
    assert 0 < found.outlook.missed < found.outlook.windows


@pytest.mark.parametrize("job", [replace(SPOT_PAIR, budget_usd=SURE - 10), replace(JOB, deadline=None)])
def test_no_replay_is_made_twice(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """Not for a short budget either, of which both the refusal and the choice of the market ask."""
    made: Counter[tuple[object, ...]] = Counter()
    outcomes = Outlooks._outcomes

    def counted(self: Outlooks, *asked: Any) -> Iterator[Outcome]:
        made[asked] += 1
        return outcomes(self, *asked)

    monkeypatch.setattr(Outlooks, "_outcomes", counted)
    outlooks = Outlooks(markets=PackagedMarkets(), tables=TableMaker())
    planner = replace(planner_of(job, A100), outlooks=lambda: outlooks)
    Estimator(planner=planner, outlooks=outlooks).estimate(job)
    assert set(made.values()) == {1}


def test_a_budget_that_hardly_any_replay_holds_is_refused_with_one_that_nine_in_ten_hold() -> None:
    with pytest.raises(PlanRefused) as caught:
        estimated(replace(SPOT_PAIR, budget_usd=Decimal(40)), A100)
    said = re.fullmatch(
        r"8 h of work on 2 × p4d.24xlarge spot in us-east-1a ends within 40.00 USD in (\d) of 72 replays, and within"
        r" (\d+\.\d\d) USD in nine of ten, with 3.85 USD kept aside",
        caught.value.message,
    )
    assert said is not None
    assert int(said[1]) <= 7
    assert caught.value.hint == f"budget: {said[2]} USD, or no `work:`, to train as far as it goes"
    taken = estimated(replace(SPOT_PAIR, budget_usd=Decimal(said[2])), A100).outlook  # as it is typed
    assert taken is not None
    assert taken.missed <= 8


def test_no_sum_is_named_for_spot_machines_on_which_fewer_than_nine_in_ten_come_to_an_end() -> None:
    for hours, ends in (
        (8, r"ends within 1.00 USD in 0 of 72 replays, and in \d\d whatever its budget; on demand"),
        (
            400,
            "begins anew whenever its machines go, and takes longer than what is recorded of spot machines can show;",
        ),
    ):
        asked = replace(SPOT_PAIR, work=hours * HOUR, budget_usd=Decimal(1))
        with pytest.raises(PlanRefused, match=f"spot in us-east-1a {ends}") as caught:
            estimated(asked, replace(A100, zones="a"), saving=Saving.NOTHING)
        assert (caught.value.hint or "").startswith("`resources: {market: on_demand}` with ")


@pytest.mark.parametrize(
    ("work", "way"),
    [(None, "no `tokens:` in `model:`"), (400 * HOUR, "neither `work:` nor `tokens:` in `model:`")],
)
def test_what_says_how_much_work_a_job_is_is_named_by_its_own_key_and_the_job_is_taken_without(
    work: timedelta | None, way: str
) -> None:
    small = Model(params=10**8, tokens=10**12, precision=Precision.FP16)
    asked = replace(JOB, work=work, model=small, deadline=None, budget_usd=Decimal(20))
    with pytest.raises(PlanRefused) as caught:
        estimated(asked, V100)
    assert (caught.value.hint or "").endswith(f", or {way}, to train as far as it goes")
    assert estimated(replace(asked, work=None, model=replace(small, tokens=None)), V100).plan.budget_usd == Decimal(20)


def test_fewer_nodes_are_advised_where_one_could_be_paid_for() -> None:
    for usd, advised in (("0.20", False), ("2", True)):
        asked = replace(JOB, work=None, deadline=None, resources=Resources(nodes=8), budget_usd=Decimal(usd))
        with pytest.raises(PlanRefused) as caught:
            estimated(asked, V100)
        assert ("or fewer nodes" in (caught.value.hint or "")) is advised
        if advised:
            estimated(replace(asked, resources=Resources(nodes=1)), V100)


def _drawn(draw: random.Random) -> tuple[Job, Kind, Saving]:
    kind = draw.choice([V100, A100, replace(A100, zones="a")])
    saving = draw.choice([Saving.RESUME, Saving.DIRECTORY, Saving.NOTHING, Saving.NONE])
    work = draw.choice([0.05, 1, 8, 30, 400]) * HOUR
    job = replace(
        JOB,
        work=work,
        deadline=draw.choice([None, None, 0.9 * work, 1.02 * work, 2 * work]),
        resources=Resources(nodes=draw.choice([1, 2, 4]), gpus=kind.gpus, market=draw.choice(list(MarketPolicy))),
        checkpoint=CheckpointPolicy(
            none=saving is Saving.NONE,
            directory=CheckpointDirectory(path="out") if saving is Saving.DIRECTORY else None,
        ),
        budget_usd=Decimal(draw.choice(["0.01", "2", "20"])),
    )
    return job, kind, saving


@pytest.mark.parametrize("seed", [*range(25), 37, 47, 48, 56, 64])
def test_a_budget_or_a_deadline_that_a_refusal_names_is_accepted_and_gives_what_was_said(seed: int) -> None:
    job, kind, saving = _drawn(random.Random(seed))
    said = hint = ""
    try:
        estimated(job, kind, saving=saving)
    except PlanRefused as error:
        said, hint = error.message, error.hint or ""

    if later := re.match(r"deadline: (\S+ ?\w*?)(?= \(|,)", hint):
        kept = replace(job, deadline=parse_span(later[1]), budget_usd=Decimal(10**6))
        found = estimated(kept, kind, saving=saving).outlook
        if found is not None and saving is not Saving.NOTHING and job.resources.market is not MarketPolicy.SPOT:
            assert found.missed == 0
    if more := re.match(r"budget: (\S+) USD", hint):
        found = estimated(replace(job, budget_usd=Decimal(more[1])), kind, saving=saving).outlook
        if "nine of ten" in said:
            assert found is not None
            assert 10 * (found.unfinished - found.late) <= found.windows
        elif found is not None and saving is not Saving.NOTHING and "the least that works" not in said:
            assert (found.over_budget, found.mean_usd <= Decimal(more[1])) == (0, True)
    if "`work:`, to train" in hint:
        estimated(replace(job, work=None), kind, saving=saving)
    if "or `market: spot`" in hint:
        estimated(replace(job, resources=replace(job.resources, market=MarketPolicy.SPOT)), kind, saving=saving)
    if safe := re.search(r"on_demand}` with (\S+) USD", hint):
        on_demand = replace(job.resources, market=MarketPolicy.ON_DEMAND)
        taken = estimated(replace(job, budget_usd=Decimal(safe[1]), resources=on_demand), kind, saving=saving)
        assert taken.outlook is not None
        assert taken.outlook.mean_usd + taken.plan.kept_usd <= Decimal(safe[1])


AWS_RULE = PrepaidRule(
    reserve=timedelta(seconds=300), least=timedelta(minutes=15), start=timedelta(minutes=10), ahead=timedelta(minutes=5)
)


@pytest.mark.parametrize("hours", [0.02, 0.2, 1, 30, 400])
@pytest.mark.parametrize("market", list(MarketPolicy))
@pytest.mark.parametrize("deadline", [None, 2.0])
@pytest.mark.parametrize("rule", [PrepaidRule(), AWS_RULE])
def test_the_sum_that_a_refusal_names_is_accepted(
    hours: float, market: MarketPolicy, deadline: float | None, rule: PrepaidRule
) -> None:
    limit = deadline * hours * HOUR + HOUR if deadline is not None else None
    asked = replace(JOB, deadline=limit, work=hours * HOUR, resources=Resources(market=market))
    planner = replace(planner_of(asked, V100, A100), prepaid_rule=rule)
    with pytest.raises(PlanRefused) as caught:
        planner.plan(replace(asked, budget_usd=Decimal("0.01")))
    said = re.match(r"budget: (\S+) USD", caught.value.hint or "")
    assert said is not None
    planner.plan(replace(asked, budget_usd=Decimal(said[1])))


@given(
    hours=st.sampled_from([0.02, 0.1, 0.7, 2.0, 30.0]),
    market=st.sampled_from(list(MarketPolicy)),
    deadline=st.booleans(),
    nodes=st.integers(1, 2),
    rule=st.sampled_from([PrepaidRule(), AWS_RULE]),
    kinds=st.lists(st.tuples(st.integers(30, 4000), st.integers(10, 99)), min_size=1, max_size=3),
    budget=st.sampled_from(["0.001", "1", "4", "20", "100"]),
)
@example(0.1, MarketPolicy.SPOT, False, 1, AWS_RULE, [(4000, 12), (800, 75)], "0.001")
@example(1.0, MarketPolicy.SPOT, False, 1, AWS_RULE, [(1500, 39), (800, 75)], "5")
def test_the_sum_that_a_refusal_names_is_the_least_that_is_accepted(
    hours: float,
    market: MarketPolicy,
    deadline: bool,
    nodes: int,
    rule: PrepaidRule,
    kinds: list[tuple[int, int]],
    budget: str,
) -> None:
    limit = 3 * hours * HOUR + HOUR if deadline else None
    asked = replace(JOB, deadline=limit, work=hours * HOUR, resources=Resources(nodes=nodes, market=market))
    one = FakeMarket(V100).offers(asked.resources)[0]
    offers = tuple(
        replace(
            one,
            pool=replace(one.pool, instance_type=f"t{n}", market=to),
            usd_per_hour=Decimal(cents * share if to is Market.SPOT else 100 * cents) / 10_000,
            cap_usd_per_hour=Decimal(cents) / 100,
        )
        for n, (cents, share) in enumerate(kinds)
        for to in RENTED
        if market.allows(to)
    )
    of: Any = SimpleNamespace(offers=lambda _: offers)
    planner = replace(planner_of(asked, V100), market=of, prepaid_rule=rule, outlooks=None, account=None)

    def named(usd: Decimal) -> Decimal | None:
        try:
            planner.plan(replace(asked, budget_usd=usd))
        except PlanRefused as refused:
            said = re.match(r"budget: (\S+) USD", refused.hint or "")
            assert said is not None
            return Decimal(said[1])
        return None

    said = named(Decimal(budget))
    if said is not None:
        assert named(said) is None, said
        less = (Decimal(budget) + (said - Decimal("0.01") - Decimal(budget)) * n / 20 for n in range(1, 21))
        assert not [usd for usd in less if Decimal(budget) < usd and named(usd) is None]
