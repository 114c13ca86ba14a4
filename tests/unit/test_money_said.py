"""What is said of money cannot be misread: of when a price is, of which runs a figure, what is less, what is left."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gpucloud.adapters.jobfile import values
from gpucloud.cli.commands.passes import _budget_text
from gpucloud.cli.render.bills import for_later, left_rows, money_line, spend_json, spend_text, to_go_words
from gpucloud.cli.render.estimates import estimate_text
from gpucloud.cli.render.live import _panel
from gpucloud.cli.render.onlookers import line_of, panel_state
from gpucloud.cli.render.plans import plan_json, plan_rows
from gpucloud.cli.render.reports import report_text
from gpucloud.cli.render.simulations import _HEAD, _SPARE, policy_named
from gpucloud.cli.render.use import headline, step_words
from gpucloud.cli.render.words import fitted
from gpucloud.domain.checkpoint.protection import Protection, Saving
from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job.spec import CheckpointPolicy, Job, Market, MarketPolicy, Policy, Resources
from gpucloud.domain.market.outcome import Outcome, summary
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule, Spend, Used
from gpucloud.domain.state.state import JobStatus
from gpucloud.domain.supervision.action import Arm, Wait
from gpucloud.domain.supervision.deadline import capacity_choice
from gpucloud.usecases.job.jobs import with_forecast
from gpucloud.usecases.supervise.story import tell_story
from tests.fakes.market import A100, NOW, V100
from tests.unit.test_capacity_decision import RULES, goal, world
from tests.unit.test_condition import told
from tests.unit.test_estimate import HOUR, JOB, estimated, planner_of
from tests.unit.worlds import LATER, opened, order, part, snapshot, state, up
from tests.unit.worlds import NOW as TICK

UNSAVED = replace(
    JOB,
    deadline=None,
    work=48 * HOUR,
    budget_usd=Decimal(500),
    resources=Resources(market=MarketPolicy.AUTO),
)
"""Two days of a script that saves nothing, on a market that interrupts it again and again."""
RULE = PrepaidRule()
ONE_ZONE = replace(V100, zones="a")


def spot(job: Job) -> Job:
    return replace(job, resources=replace(job.resources, market=MarketPolicy.SPOT))


def test_a_price_says_where_it_stands_of_which_day_it_is() -> None:
    plan = planner_of(JOB, V100).plan(JOB)
    assert plan_rows(plan)["price"] == "1.00 USD an hour now, 3.00 USD at the most"

    old = replace(plan.offer, as_of=NOW - timedelta(days=514))
    said = plan_rows(replace(plan, offers=(old,)))["price"]
    assert said == "1.00 USD an hour by prices of 2024-10-03 (514 days old), 3.00 USD at the most"


def test_a_price_of_several_machines_says_that_it_is_of_all_of_them() -> None:
    pair = replace(JOB, resources=Resources(nodes=2, market=MarketPolicy.AUTO))
    text = estimate_text(pair, estimated(pair, V100), width=None)
    assert "  price      2.00 USD an hour for 2 machines now, 6.00 USD at the most" in text
    assert re.search(r"zones  USD/h each  work", text)


def test_a_job_that_may_go_on_demand_does_where_spot_machines_do_not_pay() -> None:
    dear, alone = replace(UNSAVED, budget_usd=Decimal(5000)), replace(A100, zones="a")
    plan = planner_of(dear, alone, saving=Saving.NOTHING).plan(dear)

    assert plan.offer.pool.market is Market.ON_DEMAND
    assert [offer.pool.market for offer in plan.offers] == [Market.ON_DEMAND, Market.SPOT]
    said = plan_rows(plan)["on demand"]
    assert re.fullmatch(
        r"chosen for 1589.50 USD, where nothing interrupts it: spot machines are expected to cost \d+.\d\d USD,"
        r" whatever the budget",
        said,
    )
    text = estimate_text(dear, estimated(dear, alone, saving=Saving.NOTHING), width=None)
    assert "expected   1589.50 USD\n" in text
    assert "spot machines: 36 replays" in text


def test_a_run_that_goes_on_without_machines_chooses_as_it_did_at_first() -> None:
    dear, alone = replace(UNSAVED, budget_usd=Decimal(5000)), replace(A100, zones="a")
    planner = planner_of(dear, alone, saving=Saving.NOTHING)
    spent = {"used": Used(spent_usd=Decimal(100))}
    plan = make_plan(dear, planner.offers(dear), NOW, planner.prepaid_rule, **spent)
    assert plan.offer.pool.market is Market.SPOT
    assert planner.safer(dear, plan, planner.prepaid_rule, **spent).offer.pool.market is Market.ON_DEMAND


def test_the_sum_that_is_named_where_spot_machines_do_not_pay_is_that_of_on_demand_and_takes_it() -> None:
    small, alone = replace(UNSAVED, budget_usd=Decimal(400)), replace(A100, zones="a")
    with pytest.raises(PlanRefused) as caught:
        planner_of(small, alone, saving=Saving.NOTHING).plan(small)

    assert "would be better done on demand, for 1592.53 USD at the most" in caught.value.message
    assert (caught.value.hint or "").startswith("budget: 1592.53 USD, or no `work:`")
    enough = replace(small, budget_usd=Decimal("1592.53"))
    assert planner_of(enough, alone, saving=Saving.NOTHING).plan(enough).offer.pool.market is Market.ON_DEMAND


def test_a_job_of_spot_machines_is_told_that_on_demand_is_cheaper() -> None:
    plan = planner_of(spot(UNSAVED), ONE_ZONE, saving=Saving.NOTHING).plan(spot(UNSAVED))

    assert plan.offer.pool.market is Market.SPOT
    assert plan_rows(plan)["on demand"].startswith("is cheaper: 144.50 USD, and nothing interrupts it; spot machines ")
    assert plan_rows(plan)["on demand"].endswith(" USD, whatever the budget. `resources: {market: on_demand}`")


@pytest.mark.parametrize(("hours", "usd"), [(24, "797.50"), (48, "1589.50"), (72, "2381.50")])
def test_where_spot_machines_mostly_come_to_no_end_the_few_that_did_are_no_sum_to_compare_with(
    hours: int, usd: str
) -> None:
    one_zone, long = replace(A100, zones="a"), replace(UNSAVED, work=hours * HOUR, budget_usd=Decimal(50000))
    plan = planner_of(spot(long), one_zone, saving=Saving.NOTHING).plan(spot(long))
    assert (plan.offer.pool.market, plan_json(plan)["spot_usd"]) == (Market.SPOT, None)
    assert plan_rows(plan)["on demand"] == (
        f"costs {usd} USD, and nothing interrupts it; spot machines mostly come to no end in what is recorded of them."
        " `resources: {market: on_demand}`"
    )
    protection, found = (
        Protection(saving=Saving.NOTHING, row=""),
        estimated(spot(long), one_zone, saving=Saving.NOTHING),
    )
    text = estimate_text(spot(long), found, width=None, protection=protection)
    assert "spot machines do not pay for such a script" in text


def test_on_demand_is_advised_with_the_budget_that_its_plan_takes() -> None:
    small = replace(spot(UNSAVED), budget_usd=Decimal("144.77"))
    planner = planner_of(small, ONE_ZONE, saving=Saving.NOTHING)
    said = plan_rows(planner.safer(small, make_plan(small, planner.offers(small), NOW, RULE), RULE))["on demand"]

    assert said.startswith("is cheaper: 144.50 USD, ")
    assert said.endswith(". `resources: {market: on_demand}` with `budget: 144.78 USD`")
    fixed = replace(small, resources=replace(small.resources, market=MarketPolicy.ON_DEMAND))
    with pytest.raises(PlanRefused):
        planner.plan(fixed)
    fixed = replace(fixed, budget_usd=Decimal("144.78"))
    assert planner.plan(fixed).offer.pool.market is Market.ON_DEMAND
    text = estimate_text(fixed, estimated(fixed, ONE_ZONE, saving=Saving.NOTHING), width=None)
    assert "expected   144.50 USD" in text


def test_on_demand_is_not_advised_where_no_machine_is_to_be_had_so() -> None:
    small = spot(UNSAVED)
    planner = planner_of(small, ONE_ZONE, saving=Saving.NOTHING)
    plan = make_plan(small, planner.offers(small), NOW, RULE)
    kept = MarketPolicy.SPOT
    alone: Any = SimpleNamespace(offers=lambda asked: planner.market.offers(asked) if asked.market is kept else ())
    assert "on demand" in plan_rows(planner.safer(small, plan, RULE))
    assert "on demand" not in plan_rows(replace(planner, market=alone).safer(small, plan, RULE))


def test_each_sum_of_a_plan_is_of_what_its_own_row_buys() -> None:
    kept = replace(UNSAVED, deadline=100 * HOUR, budget_usd=Decimal(5000))
    found = estimated(kept, ONE_ZONE)
    rows = dict(found.policies)
    assert rows[Policy.LEARNED] == found.outlook
    assert rows[Policy.ON_DEMAND] == found.on_demand
    alone = {one.offer.pool.market: one for one in found.candidates}
    assert alone[Market.SPOT].outlook == rows[Policy.UNIFORM]  # as the table's head says
    for one in (alone[Market.ON_DEMAND],):
        assert one.outlook is not None
        assert one.outlook.mean_usd == (one.offer.usd_per_hour * (48 + Decimal(10) / 60)).quantize(Decimal("0.01"))


def test_spot_machines_that_mostly_come_to_no_end_before_the_deadline_are_said_to() -> None:
    asked = replace(spot(UNSAVED), deadline=100 * HOUR, budget_usd=Decimal(5000))
    said = plan_rows(planner_of(asked, ONE_ZONE, saving=Saving.NOTHING).plan(asked))["on demand"]
    assert said.startswith("costs 144.50 USD, and nothing interrupts it; ")
    assert "spot machines mostly come to no end before the deadline" in said


ANEW = replace(JOB, checkpoint=CheckpointPolicy(none=True), work=5 * HOUR, budget_usd=Decimal(60))
"""Five hours of a script that saves nothing, as its file says."""


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            replace(ANEW, deadline=6 * HOUR),
            "it leaves no time for a run on spot machines that is lost, and a whole one after it",
        ),
        (
            replace(ANEW, deadline=48 * HOUR),
            "so long a run that saves nothing is expected to cost less than on spot machines",
        ),
        (
            replace(ANEW, work=2 * HOUR, deadline=48 * HOUR, budget_usd=Decimal(8)),
            "the budget does not pay for a run on spot machines that is lost, and a whole one after it",
        ),
        (replace(JOB, policy=Policy.ON_DEMAND), "`policy: on_demand` asks for it"),
    ],
)
def test_a_job_whose_policy_begins_on_demand_is_planned_at_the_price_on_demand_and_says_why(
    asked: Job, why: str
) -> None:
    plan = planner_of(asked, V100, saving=Saving.NONE).plan(asked)

    rows = plan_rows(plan)
    assert rows["machines"] == "1 × p3.2xlarge on_demand in us-east-1a, 1 worker"
    assert rows["price"] == "3.00 USD an hour now, 3.00 USD at the most"
    assert rows["on demand"] == f"from the start, under the deadline: {why}"
    assert {offer.pool.market for offer in plan.offers} == {Market.ON_DEMAND, Market.SPOT}


@pytest.mark.parametrize("asked", [JOB, replace(ANEW, work=2 * HOUR, deadline=48 * HOUR), replace(ANEW, deadline=None)])
def test_a_job_whose_policy_begins_on_spot_machines_is_planned_on_them(asked: Job) -> None:
    plan = planner_of(asked, V100, saving=Saving.NONE).plan(replace(asked, work=2 * HOUR))
    assert (plan.offer.pool.market, plan.on_demand_for) == (Market.SPOT, None)


def test_what_is_replayed_on_demand_alone_says_so_in_every_place() -> None:
    asked = replace(ANEW, deadline=48 * HOUR)
    text = estimate_text(asked, estimated(asked, V100, saving=Saving.NONE), width=200)

    assert (
        "  expected   15.50 USD, nine times in ten at most 15.50 USD; run on demand alone in 72 of 72 replays\n" in text
    )
    assert re.search(r"^p3.2xlarge spot in us-east-1a, run on demand in 36 of 36  ", text, re.MULTILINE)
    assert re.search(r"^learned, run on demand in 72 of 72  ", text, re.MULTILINE)


def test_a_replay_that_had_spot_machines_is_not_on_demand_alone() -> None:
    alone = replace(outcome("10", 5), interruptions=0)
    assert summary([alone, replace(alone, on_spot=HOUR)]).on_demand_alone == 1
    assert not summary([alone, replace(alone, on_spot=HOUR)]).is_mostly_on_demand
    assert summary([alone, alone, replace(alone, on_spot=HOUR)]).is_mostly_on_demand


@pytest.mark.parametrize(
    ("hours", "within", "market"),
    [(5, 6, Market.ON_DEMAND), (5, 48, Market.ON_DEMAND), (2, 48, Market.SPOT)],
)
@pytest.mark.parametrize("saving", [Saving.NONE, Saving.NOTHING])
def test_a_run_first_asks_for_the_machines_that_its_plan_names(
    saving: Saving, hours: int, within: int, market: Market
) -> None:
    """Whether its file says that it saves nothing, or its code shows it."""
    meant = CheckpointPolicy(none=saving is Saving.NONE)
    asked = replace(ANEW, work=hours * HOUR, deadline=within * HOUR, checkpoint=meant)
    plan = planner_of(asked, V100, saving=saving).plan(asked)
    order = goal((within - hours) * HOUR, Policy.LEARNED, hours * HOUR, budget_usd=Decimal(60), saves_nothing=True)
    first = capacity_choice(order, world(candidates=plan.offers), RULES)

    assert first is not None
    assert first.offer == plan.offer
    assert plan.offer.pool.market is market


def test_hours_of_the_curve_are_said_to_be_deadlines() -> None:
    text = estimate_text(JOB, estimated(JOB, V100), width=300)
    assert re.search(
        r"[█▁]  \d+\.\d\d USD for a deadline of 12 h 38 min … \d+\.\d\d USD for one of 36 h 24 min\n", text
    )


def test_where_spot_machines_pay_nothing_is_said_of_on_demand() -> None:
    asked = replace(UNSAVED, work=8 * HOUR)
    plan = planner_of(asked, V100).plan(asked)
    assert (plan.offer.pool.market, plan.on_demand_usd, "on demand" in plan_rows(plan)) == (Market.SPOT, None, False)


def test_a_budget_that_is_refused_for_spot_machines_names_what_on_demand_takes_where_that_is_less() -> None:
    small = replace(spot(UNSAVED), budget_usd=Decimal(20))
    with pytest.raises(PlanRefused) as caught:
        planner_of(small, ONE_ZONE, saving=Saving.NOTHING).plan(small)

    assert caught.value.message.endswith(
        "; on demand, where nothing interrupts it, it needs 144.78 USD at the most, with a changeover of 12 min and"
        " what is kept aside for its end"
    )
    assert (caught.value.hint or "").startswith("`resources: {market: on_demand}` with 144.78 USD, or no `work:`")
    fixed = replace(small, budget_usd=Decimal("144.78"), resources=Resources(market=MarketPolicy.ON_DEMAND))
    assert planner_of(fixed, ONE_ZONE, saving=Saving.NOTHING).plan(fixed).offer.pool.market is Market.ON_DEMAND


def outcome(usd: str, took: float | None, *, over_budget: bool = False, interruptions: int = 1) -> Outcome:
    return Outcome(
        usd=Decimal(usd),
        took=None if took is None else took * HOUR,
        missed=took is None,
        over_budget=over_budget,
        interruptions=interruptions,
        launches=interruptions + 1,
    )


def test_what_is_expected_is_of_the_runs_that_finish() -> None:
    ended = [outcome("40", None, over_budget=True, interruptions=9), outcome("40", None, over_budget=True)]
    found = summary([outcome("10", 5), outcome("20", 7), outcome("30", 6), *ended])

    assert (found.mean_usd, found.took, found.interruptions, found.launches) == (Decimal("20.00"), 6 * HOUR, 1, 2)
    assert (found.p90_usd, found.worst_usd, found.over_budget) == (Decimal("40.00"), Decimal("40.00"), 2)
    assert summary(ended).mean_usd == Decimal("40.00")


def test_nine_in_ten_are_of_all_replays_and_those_without_an_end_are_taken_to_cost_more_than_any() -> None:
    nine = [outcome("10", 5)] * 9
    assert (summary([*nine, outcome("3", None)]).p90_usd, summary([*nine, outcome("3", None)]).worst_usd) == (10, None)
    assert summary([*nine, outcome("3", None), outcome("3", None)]).p90_usd is None


def test_a_figure_of_some_runs_says_so_and_a_job_without_a_deadline_misses_none() -> None:
    asked = replace(spot(UNSAVED), work=8 * HOUR, budget_usd=Decimal("8.30"))
    found = estimated(asked, V100)
    assert found.outlook is not None
    assert 0 < found.outlook.over_budget < found.outlook.windows / 2
    text = estimate_text(asked, found, width=None)

    finish = found.outlook.windows - found.outlook.unfinished
    assert f"{found.outlook.mean_usd} USD, in the {finish} that finish" in text
    assert f"{found.outlook.mean_usd} if done" in text
    assert re.search(rf"unfinished in {found.outlook.missed} of 72 replays: \d+ ended unfinished at the budget", text)
    assert "missed" not in text
    assert "deadline or budget" not in text


def test_a_rehearsal_has_room_on_80_columns_and_no_word_is_broken() -> None:
    row = (
        "us-east-1 (4)",
        "spot, else on demand",
        "2115.45 if done",
        "over budget",
        "3000.00",
        "101.4%",
        "51.3 h",
        "-",
        "-",
    )
    lines = fitted([_HEAD, row], 80, _SPARE).splitlines()

    assert max(map(len, lines)) <= 80
    assert len(lines) == 2
    assert {"policy", "mean USD", "done after"} <= set(re.split(r" {2,}", lines[0]))


def test_what_is_left_is_told_in_parts_that_sum_up() -> None:
    spend = Spend(
        budget_usd=Decimal(1),
        spent_usd=Decimal("0.02"),
        promised_usd=Decimal("0.45"),
        kept_usd=Decimal("0.0525"),
        off_at=NOW + HOUR,
        as_of=NOW,
    )
    assert left_rows(spend) == [
        (
            "left",
            "0.980 USD: 0.450 for the machines until then, 0.053 kept aside for the last save and the machines' end,"
            " 0.477 for more time after that",
        )
    ]
    assert left_rows(replace(spend, off_at=None)) == []
    alone = replace(told(up("a")), job="bx", spend=spend, buys_time=False)
    (driven,) = left_rows(spend, for_later(alone))
    later = " for more time after that, which they cannot buy: once they are off, gpucloud train bx does"
    assert driven[1].endswith(f" 0.477{later}")
    (kept,) = left_rows(spend, for_later(replace(alone, status=JobStatus.SUCCEEDED)))
    assert kept[1].endswith(" 0.477 unused")
    stopped = replace(alone, status=JobStatus.STOPPED)
    assert for_later(stopped) == for_later(replace(alone, buys_time=True)) == "for more time after that"


def test_the_most_that_is_spent_when_all_is_off_is_rounded_up() -> None:
    spend = Spend(budget_usd=Decimal(5), spent_usd=Decimal("2.3501"), promised_usd=Decimal(0), as_of=NOW, off_at=NOW)
    assert money_line(spend) == "2.35 of 5.00 USD · off by 12:00 UTC at the latest, at 2.36 USD"


def test_the_latest_time_at_which_all_is_off_is_not_said_a_minute_too_early() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal("0.5"), as_of=NOW)
    for seconds, said in ((0, "13:00"), (1, "13:01"), (59, "13:01")):
        off = replace(spend, off_at=NOW.replace(hour=13, minute=0, second=seconds))
        assert f"off by {said} UTC at the latest" in money_line(off)


def test_what_a_job_will_cost_that_nobody_supervises_is_what_its_machines_cost_until_they_end_by_themselves() -> None:
    spend = Spend(
        budget_usd=Decimal(1),
        spent_usd=Decimal("0.02"),
        promised_usd=Decimal("0.45"),
        usd_per_hour=Decimal("0.27"),
        off_at=NOW + HOUR,
        as_of=NOW,
    )
    report = replace(told(up("a", part(1, step=10, total_steps=400)), supervisor=None), spend=spend)
    alone = with_forecast(report).spend
    assert (alone.forecast_usd, alone.unattended_until) == (Decimal("0.29"), NOW + HOUR)
    assert (
        "forecast  0.29 USD at today's price, at 13:00:00 UTC, when its machines switch themselves off, unless somebody"
        " ends them sooner" in spend_text(alone)
    )


def test_a_forecast_is_never_more_than_the_budget_pays_for_and_says_that_the_budget_ends_first() -> None:
    spend = Spend(
        budget_usd=Decimal(1),
        spent_usd=Decimal("0.25"),
        promised_usd=Decimal("0.3"),
        unproven_usd=Decimal("0.05"),
        kept_usd=Decimal("0.1"),
        usd_per_hour=Decimal("0.6"),
        as_of=NOW,
    )
    short, long = spend.for_job_of(HOUR), spend.for_job_of(2 * HOUR)
    assert (short.forecast_usd, short.ends_at) == (Decimal("0.85"), None)
    assert (long.forecast_usd, long.ends_at) == (Decimal("0.85"), NOW + HOUR)
    assert "forecast  0.85 USD at the end, at today's price and pace" in spend_text(short)
    first = (
        "forecast  0.85 USD at today's price and pace: its budget ends first, in 1 h: it ends then, and saves first if"
        " its script does"
    )
    assert first in spend_text(long)
    told_json = spend_json(long)
    assert (told_json["forecast_usd"], told_json["budget_ends_at"]) == ("0.85", "2026-03-01T13:00:00+00:00")
    assert spend_json(short)["budget_ends_at"] is None
    assert spend.for_job_of(None).forecast_usd is None


ENDS = Spend(
    budget_usd=Decimal("0.1"), spent_usd=Decimal("0.04"), promised_usd=Decimal("0.03"), usd_per_hour=Decimal("0.36"),
    kept_usd=Decimal("0.01"), as_of=NOW, off_at=NOW + timedelta(minutes=2),
)  # fmt: skip


def test_a_budget_ends_where_nothing_is_left_but_what_is_kept_aside() -> None:
    """Of 0.06 USD that are left 0.01 are kept aside."""
    assert ENDS.lasts == timedelta(seconds=500)
    assert (ENDS.for_job_of(HOUR).forecast_usd, ENDS.for_job_of(HOUR).is_short) == (Decimal("0.09"), True)


def test_a_budget_ends_when_the_job_is_asked_to_save_and_leave() -> None:
    """That is so long before its paid time ends as its machines say, and that time is paid at the highest price."""
    dear = replace(ENDS, cap_usd_per_hour=Decimal("0.72"), leaves=timedelta(seconds=50))
    assert dear.lasts == timedelta(seconds=400)
    assert dear.for_job_of(HOUR).forecast_usd == Decimal("0.08")
    node = up("a", part(1, step=10, total_steps=7200, step_seconds=1.0))
    says = replace(node, status=replace(node.status, leaves_s=50.0))
    report = with_forecast(replace(told(says, supervisor="you"), spend=replace(dear, leaves=timedelta(0))))
    assert "its budget ends first, in 6 min 40 s" in headline(report)


def test_what_is_paid_already_is_trained_on_whatever_is_left_beside() -> None:
    """Time is prolonged by 10 s at the least: at a price of 0.36 USD, 0.72 at the most, with 5 s for a save."""
    last = replace(
        ENDS, cap_usd_per_hour=Decimal("0.72"), leaves=timedelta(seconds=5), gain=timedelta(seconds=10)
    )  # fmt: skip
    assert last.lasts == timedelta(seconds=500 - 2 * 15)
    spent = replace(last, spent_usd=Decimal("0.087"), off_at=NOW + timedelta(seconds=14))  # 15 s at the highest price
    assert spent.lasts == timedelta(seconds=9)
    assert not spent.is_used_up


@pytest.mark.parametrize("young_s", [0, 15, 30, 59, 60])
def test_time_that_a_young_machine_is_charged_for_beforehand_is_counted_down(young_s: int) -> None:
    """A minute is charged at once: what is spent stands still meanwhile, and the end does not go away."""
    ahead = Decimal("0.006") * (60 - young_s) / 60
    spend = replace(ENDS, ahead_usd=ahead, as_of=NOW + timedelta(seconds=young_s)).for_job_of(HOUR)
    assert spend.ends_at == NOW + timedelta(seconds=560)
    soon = replace(ENDS, ahead_usd=ahead).for_job_of(timedelta(seconds=90))
    assert (soon.forecast_usd, soon.is_short) == (Decimal("0.049") - ahead, False)
    last = replace(ENDS, ahead_usd=ahead).for_job_of(timedelta(seconds=560 - young_s))
    assert (last.forecast_usd, last.is_short) == (Decimal("0.09"), False)


def test_the_end_of_a_budget_counts_down_and_never_stands() -> None:
    """At a third of the highest price, as every pass sees it: what is kept does not change, what is left does."""
    rate, seen = ENDS.usd_per_hour, []
    for second in range(0, 520, 10):
        now, spent = NOW + timedelta(seconds=second), ENDS.spent_usd + rate * second / 3600
        off_at = NOW + timedelta(seconds=530)
        spend = replace(ENDS, spent_usd=spent, as_of=now, off_at=off_at, leaves=timedelta(seconds=30)).for_job_of(HOUR)
        said = to_go_words(HOUR, spend)[1]
        assert spend.ends_at is not None
        assert spend.ends_at > now
        seen.append(said)
        assert " in 0 s" not in said
        assert " in 0 s" not in spend_text(spend)
    assert seen[:2] == ["its budget ends first, in 8 min 20 s", "its budget ends first, in 8 min 10 s"]
    assert seen[49] == "its budget ends first, in 10 s"
    assert seen[50:] == ["its budget is used up: it is being ended"] * 2
    assert len(set(seen)) == 51


def test_a_budget_that_is_used_up_says_so_and_ends_with_the_paid_time() -> None:
    over = replace(ENDS, spent_usd=Decimal("0.095"), leaves=timedelta(minutes=2)).for_job_of(HOUR)
    assert spend_json(over)["budget_ends_at"] == "2026-03-01T12:02:00+00:00"
    assert spend_json(replace(over, off_at=None))["budget_ends_at"] is None
    assert "at today's price and pace: its budget is used up: it is being ended" in spend_text(over)


def test_every_view_of_a_job_that_trains_says_that_its_budget_ends_first() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(1), usd_per_hour=Decimal(60))
    node = up("a", part(1, step=10, total_steps=400, step_seconds=1.0))
    report = with_forecast(replace(told(node, supervisor="you"), spend=spend))
    now = panel_state(snapshot(node, state=state(attempts=(opened("a"),))), Wait(why="running"), spend)
    panel = io.StringIO()
    Console(file=panel, width=160).print(_panel(now, (), 160))
    for view in (report_text(report), headline(report), line_of(now), panel.getvalue()):
        assert "6 min 30 s to go" in view
        assert "its budget ends first, in 1 min" in view
    assert "forecast  1.00 USD at today's price and pace: its budget ends first, in 1 min" in report_text(report)
    narrow = io.StringIO()
    Console(file=narrow, width=77).print(_panel(now, (), 77))
    assert "its budget ends first, in 1 min" in narrow.getvalue()


def test_every_view_of_a_job_whose_deadline_comes_before_its_last_step_says_so_and_forecasts_no_more() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(1), usd_per_hour=Decimal("0.6"))
    node = up("a", part(1, step=10, total_steps=400, step_seconds=1.0))
    soon = told(node, supervisor="you")
    spend = replace(spend, as_of=soon.looked_at)
    soon = replace(soon, spend=spend, deadline_at=soon.looked_at + timedelta(minutes=1))
    report = with_forecast(soon)
    ends = spend.for_job_of(timedelta(seconds=390), soon.deadline_at)
    now = panel_state(snapshot(node, state=state(attempts=(opened("a"),))), Wait(why="running"), ends)
    for view in (report_text(report), headline(report), line_of(now)):
        assert "6 min 30 s to go" in view
        assert "its deadline comes first, in 1 min" in view
    said = "forecast  0.01 USD at today's price, at its deadline, in 1 min: it ends then, done or not, and saves first"
    assert said in report_text(report)
    over = with_forecast(replace(soon, deadline_at=soon.looked_at - timedelta(seconds=5)))
    assert "its deadline is over: it is being ended" in headline(over)
    assert "in 0 s" not in report_text(over)
    late = with_forecast(replace(soon, deadline_at=soon.looked_at + timedelta(hours=1)))
    assert late.spend == with_forecast(replace(soon, deadline_at=None)).spend


@pytest.mark.parametrize(("supervisor", "foreseen"), [("you", True), (None, False)])
def test_hosts_of_ones_own_that_nobody_supervises_are_free_again_before_any_end_that_a_pace_tells(
    supervisor: str | None, foreseen: bool
) -> None:
    spend = Spend(
        budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0), usd_per_hour=Decimal(0), as_of=NOW
    )
    node = up("a", part(1, step=10, total_steps=400, step_seconds=1.0))
    report = with_forecast(replace(told(node, supervisor=supervisor), spend=spend, owned=True))
    assert (report.spend.forecast_usd is not None) is foreseen


def test_a_job_that_its_own_machines_drive_ends_with_their_paid_time_where_nobody_buys_more() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(1), usd_per_hour=Decimal("0.6"))
    node = up("a", part(1, step=10, total_steps=400, step_seconds=1.0))
    driven = replace(told(node, supervisor="its own node a"), drives_itself=True, buys_time=False)
    spend = replace(spend, as_of=driven.looked_at, off_at=driven.looked_at + timedelta(minutes=1))
    report = with_forecast(replace(driven, spend=spend))
    ends = spend.for_job_of(timedelta(seconds=390), buys_time=False)
    now = panel_state(snapshot(node, state=state(attempts=(opened("a"),))), Wait(why="running"), ends)
    for view in (report_text(report), headline(report), line_of(now)):
        assert "6 min 30 s to go" in view
        assert "its paid time ends first, in 1 min" in view
    assert (
        "forecast  0.01 USD at today's price, when its paid time ends, in 1 min: its own machines buy none"
        in report_text(report)
    )
    longer = replace(spend, off_at=driven.looked_at + timedelta(hours=1))
    assert with_forecast(replace(driven, spend=longer)).spend.forecast_usd == Decimal("0.065")
    beside = with_forecast(replace(driven, spend=spend, buys_time=True))
    assert beside.spend.prepaid_in is None


@pytest.mark.parametrize("buys_time", [True, False])
@pytest.mark.parametrize("deadline_at", [None, NOW + HOUR])
def test_a_job_of_which_nobody_knows_how_long_it_takes_has_no_forecast(deadline_at: Any, buys_time: bool) -> None:
    """It may end by itself before its deadline, its paid time and its budget."""
    assert ENDS.for_job_of(None, deadline_at, buys_time=buys_time) == ENDS


def test_a_job_with_nothing_to_go_is_not_said_to_end_at_a_deadline_to_come() -> None:
    done = ENDS.for_job_of(timedelta(0), NOW + HOUR)
    assert (done.forecast_usd, done.deadline_in) == (ENDS.spent_usd, None)


@pytest.mark.parametrize(("rate", "said"), [("0.27", False), ("60", True)])
def test_a_budget_that_ends_before_the_script_is_said_beside_the_time_to_go(rate: str, said: bool) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(1), usd_per_hour=Decimal(rate))
    node = up("a", part(1, step=10, total_steps=400, step_seconds=1.0))
    report = replace(told(node, supervisor="you"), spend=spend)
    words = step_words(report)
    assert "6 min 30 s to go" in words
    assert ("its budget ends first, in 1 min" in words) is said


def test_a_type_of_the_embedded_fleet_is_written_as_it_is_shown() -> None:
    assert re.fullmatch(values.TYPE, "local.p3.2xlarge")
    assert re.fullmatch(values.TYPE, "g5.12xlarge")
    assert not re.fullmatch(values.TYPE, "p3.2xlarge.more")


@pytest.mark.parametrize(("moved_s", "told"), [(18, False), (-18, True), (600, True), (-600, True)])
def test_a_shut_off_that_comes_seconds_later_is_no_news(moved_s: int, told: bool) -> None:
    line = tell_story(Arm(until=LATER + timedelta(seconds=moved_s)), snapshot(armed=LATER))
    assert (line is not None) is told
    assert tell_story(Arm(until=TICK + HOUR), snapshot(armed=None)) is not None


def test_a_shut_off_that_is_renewed_every_few_seconds_is_told_once_a_minute_of_it() -> None:
    """At a budget's end each renewal is of seconds: what counts is what was told last, not what was armed last."""
    told, lines, armed = LATER, [], LATER
    for seconds in range(14, 141, 14):
        until = LATER + timedelta(seconds=seconds)
        line = tell_story(
            Arm(until=until), replace(snapshot(armed=armed), now=until - timedelta(seconds=90)), None, told
        )
        told, armed = (until, until) if line else (told, until)
        lines += [line] if line else []
    assert lines == [
        "paid until 12:31:10 UTC: then the machines shut themselves off",
        "paid until 12:32:20 UTC: then the machines shut themselves off",
    ]
    reckoned = tell_story(Arm(until=LATER - timedelta(seconds=3)), snapshot(armed=LATER), None, LATER)
    assert reckoned is None  # the same time, reckoned from one moment later


def test_no_figure_of_the_money_line_is_cut_at_80_columns() -> None:
    spend = Spend(
        budget_usd=Decimal("1500.00"),
        spent_usd=Decimal("1234.56"),
        promised_usd=Decimal("160.12"),
        usd_per_hour=Decimal("123.45"),
        off_at=TICK + 20 * HOUR,
        as_of=TICK,
    )
    now = panel_state(snapshot(up("a")), Wait(why="running"), spend)
    for width in (77, 100, 160):
        shown = io.StringIO()
        Console(file=shown, width=width).print(_panel(now, (), width))
        (line,) = (line for line in shown.getvalue().splitlines() if "spent" in line)
        assert "off by 2026-03-02 08:00 UTC" in line
        most = "(≤1394.68 USD)" if width <= 100 else "at the latest, at 1394.68 USD"
        assert most in line
        assert "…" not in line


def test_the_worst_of_replays_is_no_less_than_what_nine_in_ten_cost() -> None:
    found = summary([outcome("893.001", 5)] * 3)
    assert (found.p90_usd, found.worst_usd) == (Decimal("893.01"), Decimal("893.01"))


@pytest.mark.parametrize(("changes", "row"), [({"torn_down": True}, "unused"), ({"torn_down": False}, "left")])
def test_a_budget_that_nothing_can_use_any_more_has_nothing_left(changes: dict[str, Any], row: str) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.25"), promised_usd=Decimal(0))
    known = replace(told(status=JobStatus.SUCCEEDED), spend=spend, **changes)
    assert [line.split() for line in _budget_text(known, order()).splitlines()[2:]] == [
        ["budget", "1.00", "USD"],
        ["spent", "0.25", "of", "1.00", "USD"],
        [row, "0.75", "USD"],
    ]


def test_a_plan_says_what_a_deadline_does_to_work_of_unknown_length() -> None:
    unknown = replace(JOB, deadline=8 * HOUR, work=None)
    text = estimate_text(unknown, estimated(unknown, V100), width=None)
    assert (
        "  deadline   8 h after its first start the job ends, done or not, and saves first if its script does; whether"
        " it will be done by then, only `work:` could tell\n" in text
    )


def test_a_policy_that_no_deadline_asks_is_called_what_the_job_does_in_its_place() -> None:
    asked = [policy_named(policy) for policy in (Policy.GREEDY, Policy.ON_DEMAND, None)]
    unasked = [policy_named(policy, asked=False) for policy in (Policy.GREEDY, Policy.ON_DEMAND, None)]
    assert asked == ["greedy", "on_demand", "spot, else on demand"]
    assert unasked == ["spot alone", "on_demand", "spot, else on demand"]
