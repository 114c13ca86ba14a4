"""What each policy chooses, for how long that holds, and the nets below it. The task: 48 h in 60 h, 12 min a change."""

import math
from dataclasses import replace

import pytest

from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.policies import NOTHING, Holding, Mode, Observation, Reason, Task, ZoneState
from gpucloud.domain.market.policy import decide, least_span_s, least_task_budget_usd

HOUR = 3600.0
TASK = Task(work_s=48 * HOUR, span_s=60 * HOUR, changeover_s=0.2 * HOUR, on_demand_usd_per_hour=3.0, tick_s=180.0)
UP = ZoneState(zone="a", up=True, age_s=HOUR, usd_per_hour=1.0)
DOWN = ZoneState(zone="a", up=False, age_s=HOUR, usd_per_hour=1.0)
ON_DEMAND = Holding(mode=Mode.ON_DEMAND)
SPOT = Holding(mode=Mode.SPOT, zone="a")
BOTH = Holding(mode=Mode.BOTH, zone="a")


def observation(holding=NOTHING, *zones, done=0.0, elapsed=0.0, money=None):
    """Hours done and elapsed."""
    return Observation(
        work_left_s=(48 - done) * HOUR,
        time_left_s=(60 - elapsed) * HOUR,
        holding=holding,
        zones=zones or (DOWN,),
        money_left_usd=money,
    )


@pytest.mark.parametrize(
    ("observation", "mode", "holds_h"),
    [
        (observation(NOTHING, UP), Mode.SPOT, math.inf),
        (observation(NOTHING, DOWN), Mode.IDLE, 0.05),
        (
            observation(NOTHING, DOWN, done=8, elapsed=9),
            Mode.IDLE,
            1.0,
        ),  # the line is at 7.2 h; it takes 1 h to reach 8
        (observation(NOTHING, DOWN, done=8, elapsed=10), Mode.IDLE, 0.05),
        (observation(NOTHING, DOWN, done=7.9, elapsed=10), Mode.ON_DEMAND, math.inf),
        (observation(ON_DEMAND, DOWN, done=20, elapsed=10), Mode.ON_DEMAND, math.inf),  # kept until spot is there
        (
            observation(ON_DEMAND, UP, done=8, elapsed=10),
            Mode.ON_DEMAND,
            1.6,
        ),  # 0.32 h missing, gained at 0.2 h per hour
        (observation(ON_DEMAND, UP, done=8.32, elapsed=10), Mode.SPOT, math.inf),
        (observation(SPOT, DOWN, done=1, elapsed=30), Mode.SPOT, math.inf),
    ],
)
def test_uniform_progress_acts_as_its_authors_code(observation, mode, holds_h):
    choice = decide(Policy.UNIFORM, TASK, observation)
    assert choice.mode is mode
    assert choice.holds_s == pytest.approx(holds_h * HOUR)


def test_uniform_progress_counts_the_boot_of_what_it_waits_for():
    booting = Holding(mode=Mode.ON_DEMAND, boot_s=0.2 * HOUR)
    choice = decide(Policy.UNIFORM, TASK, observation(booting, UP, done=8, elapsed=10))
    assert choice.holds_s == pytest.approx((0.2 + (0.32 + 0.16) / 0.2) * HOUR)


@pytest.mark.parametrize(
    ("observation", "mode", "holds_h"),
    [
        (observation(NOTHING, UP), Mode.SPOT, math.inf),
        (observation(NOTHING, DOWN), Mode.IDLE, 11.6),  # 12 h of slack less two changeovers
        (observation(NOTHING, DOWN, elapsed=11.6), Mode.IDLE, 0.05),
        (observation(NOTHING, DOWN, elapsed=11.65), Mode.ON_DEMAND, math.inf),
        (observation(NOTHING, UP, elapsed=11.65), Mode.ON_DEMAND, math.inf),
        (observation(SPOT, UP, elapsed=11.75), Mode.SPOT, math.inf),
        (observation(ON_DEMAND, UP), Mode.ON_DEMAND, math.inf),
    ],
)
def test_greedy_waits_until_the_net_catches_it(observation, mode, holds_h):
    choice = decide(Policy.GREEDY, TASK, observation)
    assert choice.mode is mode
    assert choice.holds_s == pytest.approx(holds_h * HOUR)


def test_without_a_deadline_every_policy_waits_for_spot():
    task = replace(TASK, span_s=math.inf)
    waiting = replace(observation(NOTHING, DOWN), time_left_s=math.inf)
    for policy in (Policy.GREEDY, Policy.UNIFORM, Policy.LEARNED):
        assert decide(policy, task, waiting).mode is Mode.IDLE


def test_on_demand_never_waits():
    choice = decide(Policy.ON_DEMAND, TASK, observation(NOTHING, UP))
    assert (choice.mode, choice.reason, choice.holds_s) == (Mode.ON_DEMAND, Reason.ASKED, math.inf)


def test_the_cheapest_zone_that_is_up_is_taken():
    zones = (
        ZoneState(zone="dear", up=True, age_s=0, usd_per_hour=1.5),
        ZoneState(zone="down", up=False, age_s=0, usd_per_hour=0.5),
        ZoneState(zone="cheap", up=True, age_s=0, usd_per_hour=1.0),
    )
    assert decide(Policy.UNIFORM, TASK, observation(NOTHING, *zones)).zone == "cheap"


def test_spot_that_costs_as_much_as_on_demand_is_not_taken():
    assert decide(Policy.GREEDY, TASK, observation(NOTHING, replace(UP, usd_per_hour=3.0))).mode is Mode.IDLE


# 8 h done in 9 h: uniform waits while no spot is there. What is left on demand costs 3 × 40.2 = 120.60 USD, and one
# more start of spot machines 0.20 USD.
@pytest.mark.parametrize(
    ("holding", "zone", "money", "mode"),
    [
        (NOTHING, UP, 120.80, Mode.SPOT),
        (NOTHING, UP, 120.79, Mode.ON_DEMAND),
        (NOTHING, DOWN, 120.80, Mode.IDLE),
        (NOTHING, DOWN, 120.79, Mode.ON_DEMAND),
        (ON_DEMAND, UP, 120.80, Mode.SPOT),
        (ON_DEMAND, UP, 120.79, Mode.ON_DEMAND),
        (SPOT, UP, 120.00, Mode.SPOT),  # cheaper than on demand: stopping would not save anything
        (SPOT, replace(UP, usd_per_hour=4.0), 120.65, Mode.SPOT),  # 1 USD an hour too dear: 0.05 a tick
        (SPOT, replace(UP, usd_per_hour=4.0), 120.64, Mode.ON_DEMAND),
    ],
)
def test_the_net_under_the_budget(holding, zone, money, mode):
    assert decide(Policy.UNIFORM, TASK, observation(holding, zone, done=8, elapsed=9, money=money + 1e-9)).mode is mode


def test_the_least_deadline_and_the_least_budget():
    assert least_span_s(TASK) == pytest.approx(48.4 * HOUR)
    assert least_task_budget_usd(TASK, 1.0) == pytest.approx(3 * 48.2 + 0.2)
    assert least_task_budget_usd(replace(TASK, nodes=4), 1.0) == pytest.approx(4 * (3 * 48.2 + 0.2))


GANG = replace(TASK, nodes=4, least_nodes=2, handover_s=180.0)
PART = Holding(mode=Mode.SPOT, zone="a", nodes=3)
THREE = replace(DOWN, nodes=3)
NEW = replace(UP, age_s=0.0)


@pytest.mark.parametrize(
    ("observation", "mode", "nodes", "reason"),
    [
        (observation(PART, THREE, done=8, elapsed=9), Mode.SPOT, 3, Reason.STAY),  # better than to wait
        (observation(PART, THREE, done=7, elapsed=9), Mode.ON_DEMAND, 0, Reason.BEHIND),
        (observation(PART, UP, done=7, elapsed=9), Mode.SPOT, 0, Reason.STAY),  # the fourth boots beside
        (observation(PART, NEW, done=8, elapsed=9), Mode.SPOT, 0, Reason.STAY),
        (observation(replace(PART, nodes=2), THREE, done=8, elapsed=9), Mode.SPOT, 3, Reason.STAY),
        (
            observation(PART, UP, done=8, elapsed=19.72),
            Mode.SPOT,
            0,
            Reason.STAY,
        ),  # 0.28 h of slack: 0.2 and a handover
        (observation(PART, UP, done=8, elapsed=19.76), Mode.ON_DEMAND, 0, Reason.DEADLINE),
        (observation(PART, UP, done=8, elapsed=9, money=4 * 120.6 + 0.79), Mode.ON_DEMAND, 0, Reason.BUDGET),
    ],
)
def test_a_gang_that_lost_some_nodes_goes_on_with_the_rest(observation, mode, nodes, reason):
    choice = decide(Policy.UNIFORM, GANG, observation)
    assert (choice.mode, choice.nodes, choice.reason) == (mode, nodes, reason)


def test_machines_that_boot_before_they_go_on_are_given_up_when_their_boot_takes_the_last_slack():
    booting = replace(SPOT, boot_s=0.05 * HOUR)
    assert decide(Policy.UNIFORM, TASK, observation(booting, UP, elapsed=11.75)).mode is Mode.SPOT
    assert decide(Policy.UNIFORM, TASK, observation(booting, UP, elapsed=11.76)).mode is Mode.ON_DEMAND


@pytest.mark.parametrize(
    ("zone", "nodes", "enlarged"),
    [
        (replace(UP, age_s=0.0), 3, 3),  # regrouping takes 3 min, which the fourth node makes up for in 9
        (replace(UP, age_s=539.0), 3, 3),
        (replace(UP, age_s=540.0), 3, 0),
        (replace(UP, age_s=180.0), 2, 0),  # two more: in 3
        (THREE, 2, 2),
    ],
)
def test_a_gang_that_restarts_quickly_grows_by_nodes_that_have_been_there_for_a_while(zone, nodes, enlarged):
    task = replace(GANG, changeover_s=180.0)
    part = replace(PART, nodes=nodes)
    assert decide(Policy.UNIFORM, task, observation(part, zone, done=8, elapsed=9)).nodes == enlarged


def test_a_gang_that_restarts_quickly_moves_to_a_zone_that_has_all_nodes():
    other = replace(UP, zone="b")
    part = observation(PART, THREE, other, done=8, elapsed=9)
    assert decide(Policy.UNIFORM, replace(GANG, changeover_s=180.0), part).zone == "b"
    assert decide(Policy.UNIFORM, GANG, part).zone == "a"


# 2 h of work that begins anew wherever its machines go; a run takes 2.2 h, and two of them 4.4.
ANEW = replace(TASK, work_s=2 * HOUR, span_s=5 * HOUR, saves_nothing=True)


def of_anew(holding=NOTHING, *zones, left=5.0, money=None):
    return Observation(
        work_left_s=2 * HOUR,
        time_left_s=left * HOUR,
        holding=holding,
        zones=zones or (UP,),
        money_left_usd=money,
    )


@pytest.mark.parametrize("policy", [Policy.LEARNED, Policy.UNIFORM, Policy.GREEDY])
@pytest.mark.parametrize(
    ("observation", "mode", "reason"),
    [
        (of_anew(), Mode.SPOT, Reason.CHEAPEST),
        (of_anew(left=4.4), Mode.SPOT, Reason.CHEAPEST),
        (of_anew(left=4.3), Mode.ON_DEMAND, Reason.DEADLINE),  # were it taken at its end, a whole run would be late
        (of_anew(NOTHING, DOWN), Mode.IDLE, Reason.WAIT),
        (of_anew(NOTHING, DOWN, left=4.3), Mode.ON_DEMAND, Reason.DEADLINE),
        (of_anew(money=8.8), Mode.SPOT, Reason.CHEAPEST),  # 2.2 h at 1 USD, and 2.2 at 3
        (of_anew(money=8.7), Mode.ON_DEMAND, Reason.BUDGET),
        (of_anew(ON_DEMAND), Mode.ON_DEMAND, Reason.STAY),
        (of_anew(SPOT, DOWN, left=2.1), Mode.SPOT, Reason.STAY),
        (of_anew(NOTHING, replace(UP, usd_per_hour=2.4)), Mode.ON_DEMAND, Reason.EXPECTED),
    ],
)
def test_a_script_that_begins_anew_tries_spot_once_where_a_whole_run_more_is_in_time_and_money(
    policy, observation, mode, reason
):
    choice = decide(policy, ANEW, observation)
    assert (choice.mode, choice.reason) == (mode, reason)


def test_a_run_that_spot_machines_hardly_ever_outlive_is_on_demand_at_once():
    long = replace(ANEW, work_s=8 * HOUR, span_s=60 * HOUR)
    choice = decide(Policy.LEARNED, long, of_anew(left=60.0))
    assert (choice.mode, choice.reason) == (Mode.ON_DEMAND, Reason.EXPECTED)


def test_on_demand_is_on_demand_and_without_an_end_spot_is_waited_for():
    assert decide(Policy.ON_DEMAND, ANEW, of_anew()).mode is Mode.ON_DEMAND
    assert decide(Policy.UNIFORM, replace(ANEW, span_s=math.inf), of_anew(NOTHING, DOWN)).mode is Mode.IDLE
