"""Jobs replayed on markets of a few ticks, by hand; and on recorded ones, where only the rules can be checked.

A tick is three minutes. The job is 12 minutes of work in 30; a start takes 3, and a notice 1 more. On demand costs
3.00 USD an hour, 0.15 a tick.
"""

import math
import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, OnNotice, Policy
from gpucloud.domain.market.outcome import ON_DEMAND, Lifetime
from gpucloud.domain.market.policies import Choice, Mode, Task
from gpucloud.domain.market.policy import decide
from gpucloud.domain.market.recordings import timeline, zone_set
from gpucloud.domain.market.scenario import (
    NOTICE,
    USUAL,
    Recovery,
    recovery_of,
    recovery_within,
    restart_within,
    starts,
)
from gpucloud.domain.market.simulation import bill_usd, charges, replay
from gpucloud.domain.money.ledger import total
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.supervision.snapshot import Limits
from tests.standins.tiny_markets import tiny_market

NOTICED = Recovery(restart_s=180, notice_s=60)
TASK = Task(work_s=720, span_s=1800, changeover_s=240, on_demand_usd_per_hour=3.0, tick_s=180)
COMES_AND_GOES = tiny_market({"a": ("1110000000", "1.00"), "b": ("0111100000", "0.80"), "c": ("0000001111", "1.20")})
COMES_LATE = tiny_market({"a": ("0001111111", "1.00"), "b": ("0000000000", "0.50"), "c": ("0000011000", "0.40")})


def run(policy, market, *, task=TASK, recovery=NOTICED, nodes=1, budget=None):
    choose = partial(decide, policy) if isinstance(policy, Policy) else policy
    observation = timeline(market, market.zones, nodes)
    done = replay(choose, task, observation, 0, recovery, budget)
    return done, bill_usd(done, observation)


def lifetime(zone, start, end, cause=EndCause.CHOICE, nodes=1):
    return Lifetime(zone=zone, nodes=nodes, launched_s=start, ended_s=end, cause=cause)


@pytest.mark.parametrize("seed", range(5))
def test_jobs_are_submitted_once_in_every_part_of_a_recording_whatever_the_seed(seed):
    market, tick = tiny_market({"a": ("1" * 20, "1.00")}), timedelta(seconds=180)  # at looks 0 to 19
    assert [look // 5 for look in starts(market, tick, 4, seed)] == [0, 1, 2, 3]
    assert starts(market, tick, 60, seed) == tuple(look for look in range(20) for _ in range(3))
    assert starts(market, tick, 4, seed) != starts(market, tick, 4, seed + 1)


# Zone a is taken at 9 min with 6 of work done, one of them lost; b at 15 min with 2 more. At 18 min, when c comes, only
# 7 min are to spare, and two changeovers would be 8. AWS takes a and b in their first hour: neither is charged.
INTERRUPTED_TWICE = (
    lifetime(0, 0, 540, EndCause.INTERRUPTED),
    lifetime(1, 540, 900, EndCause.INTERRUPTED),
    lifetime(ON_DEMAND, 1080, 1560),
)


@pytest.mark.parametrize(
    ("policy", "market", "lifetimes", "finished_s", "usd"),
    [
        (Policy.GREEDY, COMES_AND_GOES, INTERRUPTED_TWICE, 1560, "0.40"),
        (Policy.UNIFORM, COMES_AND_GOES, INTERRUPTED_TWICE, 1560, "0.40"),
        (Policy.LEARNED, COMES_AND_GOES, INTERRUPTED_TWICE, 1560, "0.40"),  # without tables: as uniform
        (Policy.ON_DEMAND, COMES_AND_GOES, (lifetime(ON_DEMAND, 0, 900),), 900, "0.75"),
        # Waiting is well until 9 min before spot would have to be given up; then a comes, and stays.
        (Policy.GREEDY, COMES_LATE, (lifetime(0, 540, 1440),), 1440, "0.25"),
        # Behind the line at 3 min; when a comes it is not two changeovers ahead, nor ever before the end.
        (Policy.UNIFORM, COMES_LATE, (lifetime(ON_DEMAND, 180, 1080),), 1080, "0.75"),
        (Policy.ON_DEMAND, COMES_LATE, (lifetime(ON_DEMAND, 0, 900),), 900, "0.75"),
    ],
)
def test_a_tiny_market_goes_as_it_does_by_hand(policy, market, lifetimes, finished_s, usd):
    done, bill = run(policy, market)
    assert done.lifetimes == lifetimes
    assert done.finished_s == finished_s
    assert bill == Decimal(usd)
    assert done.launches == len(lifetimes)
    assert done.interruptions == sum(one.cause is EndCause.INTERRUPTED for one in lifetimes)


def test_uniform_leaves_on_demand_once_it_is_two_changeovers_ahead():
    market = tiny_market({"a": ("0" * 2 + "1" * 38, "1.00")})
    task = replace(TASK, work_s=3600, span_s=7200)
    done, bill = run(Policy.UNIFORM, market, task=task)
    # On demand from 3 min. At 18 min 12 of work are done, and the line will be at 13 in 8 min; at 21 min, 15 and 14.5.
    assert done.lifetimes == (lifetime(ON_DEMAND, 180, 1260), lifetime(0, 1260, 1260 + 180 + 2700))
    assert bill == Decimal("0.90") + Decimal("0.80")


@pytest.mark.parametrize(
    ("recovery", "worked_s", "lost_s"),
    [
        (Recovery(restart_s=180, notice_s=120), 1000, 120),
        (Recovery(restart_s=180, notice_s=120), 50, 50),
        (Recovery(restart_s=180, notice_s=None, save_s=600), 1000, 400),
        (Recovery(restart_s=180, notice_s=None, save_s=600), 1200, 0),
    ],
)
def test_an_interruption_undoes_what_was_not_saved(recovery, worked_s, lost_s):
    assert recovery.lost_s(worked_s) == lost_s
    assert recovery.lost_s(worked_s) <= recovery.changeover_s - recovery.restart_s


def test_without_notice_the_work_since_the_last_checkpoint_is_done_again():
    recovery = Recovery(restart_s=180, notice_s=None, save_s=240)
    task = replace(TASK, changeover_s=recovery.changeover_s, span_s=3600)
    done, _ = run(Policy.GREEDY, tiny_market({"a": ("1110" + "1" * 16, "1.00")}), task=task, recovery=recovery)
    # 6 min were done when a was taken, and 4 saved. At 12 min it is back: 3 to start, 8 to work.
    assert done.lifetimes[-1] == lifetime(0, 720, 720 + 180 + 480)


ANEW = Recovery(restart_s=180, handover_s=60, notice_s=None, save_s=math.inf, saves_when_asked=False)


def test_a_script_that_saves_nothing_begins_anew_when_it_is_taken():
    market = tiny_market({"a": ("1110" + "1" * 16, "1.00")})
    done, bill = run(Policy.GREEDY, market, task=replace(TASK, span_s=3600), recovery=ANEW)
    # 6 min were done when a was taken. At 12 min it is back: 3 to start, and all 12 to work.
    assert done.lifetimes == (lifetime(0, 0, 540, EndCause.INTERRUPTED), lifetime(0, 720, 720 + 180 + 720))
    assert bill == Decimal("0.25")


def test_a_script_that_saves_nothing_begins_anew_when_it_leaves_by_choice():
    market = tiny_market({"a": ("0" * 2 + "1" * 78, "1.00")})
    task = replace(TASK, work_s=3600, span_s=7200)
    done, _ = run(Policy.UNIFORM, market, task=task, recovery=ANEW)
    # As a script that saves, it leaves machines on demand at 21 min with 15 of work done; these are done again.
    assert done.lifetimes[:2] == (lifetime(ON_DEMAND, 180, 1260), lifetime(0, 1260, done.lifetimes[1].ended_s))
    assert done.finished_s == 1260 + 180 + 3600


def test_a_script_that_saves_by_itself_loses_by_either_what_it_had_not_saved():
    itself = Recovery(restart_s=180, handover_s=180, notice_s=None, save_s=240, saves_when_asked=False)
    assert (itself.lost_s(1000), itself.left_behind_s(1000), itself.changeover_s) == (40, 40, 420)
    assert NOTICED.left_behind_s(1000) == 0


@pytest.mark.parametrize(
    ("saving", "policy", "notice", "found"),
    [
        (Saving.RESUME, {}, True, (120.0, 600.0, True)),
        (Saving.RESUME, {"every": timedelta(minutes=5)}, False, (None, 300.0, True)),
        (Saving.UNKNOWN, {}, True, (120.0, 600.0, True)),
        (Saving.NONE, {"none": True}, True, (None, math.inf, False)),
        (Saving.NOTHING, {}, True, (None, math.inf, False)),
        (Saving.DIRECTORY, {"directory": CheckpointDirectory(path="out")}, True, (None, 600.0, False)),
        (
            Saving.DIRECTORY,
            {"directory": CheckpointDirectory(path="out", on_notice=OnNotice.SIGTERM)},
            True,
            (120.0, 600.0, True),
        ),
    ],
)
def test_how_a_script_saves_says_what_an_interruption_undoes(saving, policy, notice, found):
    recovery = recovery_of(timedelta(minutes=10), saving, CheckpointPolicy(**policy), notice=NOTICE if notice else None)
    assert (recovery.notice_s, recovery.save_s, recovery.saves_when_asked) == found
    assert (recovery.restart_s, recovery.handover_s) == (600.0, 180.0)


def test_a_changeover_of_a_plan_is_the_restart_of_a_rehearsal_and_a_notice():
    restart = restart_within(Limits().changeover)
    assert restart == timedelta(minutes=10)
    assert recovery_of(restart, Saving.RESUME, CheckpointPolicy()) == USUAL
    assert recovery_within(Limits().changeover, Saving.RESUME, CheckpointPolicy()) == USUAL
    assert USUAL.changeover_s == Limits().changeover.total_seconds()


@pytest.mark.parametrize("seconds", [30, 120, 239, 240, 720])
def test_a_rehearsal_without_another_restart_has_the_changeover_of_its_cloud(seconds):
    recovery = recovery_within(timedelta(seconds=seconds), Saving.RESUME, CheckpointPolicy())
    assert recovery.changeover_s == seconds
    unwarned = recovery_within(timedelta(seconds=seconds), Saving.RESUME, CheckpointPolicy(), notice=False)
    assert (unwarned.restart_s, unwarned.notice_s) == (recovery.restart_s, None)


def test_a_machine_that_is_taken_after_its_first_hour_is_charged():
    market = tiny_market({"a": ("1" * 20 + "0" + "1" * 29, "1.00")})
    task = replace(TASK, work_s=4500, span_s=8000)
    done, bill = run(Policy.GREEDY, market, task=task)
    # 57 min of work are done when a is taken at 60, and one of them is lost: 19 remain.
    assert done.lifetimes == (lifetime(0, 0, 3600, EndCause.INTERRUPTED), lifetime(0, 3780, 3780 + 180 + 1140))
    assert bill == Decimal("1.00") + Decimal("0.36666667")
    assert done.usd == pytest.approx(float(bill))


def test_a_price_that_changes_is_charged_from_the_look_on_at_which_it_was_seen():
    market = tiny_market({"a": ("1111111111", "1.00")})
    zone = replace(market.zones[0], prices=((0, Decimal("1.00")), (2, Decimal("2.00"))))
    done, bill = run(Policy.GREEDY, replace(market, zones=(zone,)))
    assert done.lifetimes == (lifetime(0, 0, 900),)
    assert bill == Decimal("0.10") + Decimal("0.30")


def test_of_a_gang_only_the_nodes_that_were_taken_are_free():
    market = tiny_market({"a": ("4443444444", "1.00")}, nodes=4)
    done, bill = run(Policy.GREEDY, market, nodes=4, task=replace(TASK, nodes=4))
    assert done.lifetimes[:2] == (lifetime(0, 0, 540, EndCause.INTERRUPTED, 1), lifetime(0, 0, 540, nodes=3))
    assert done.interruptions == 1
    # 3 × 9 min by choice, then 4 × (3 to start and 7 to work)
    assert bill == Decimal("0.45") + 4 * Decimal("0.16666667")


def test_an_elastic_gang_goes_on_with_the_rest_and_grows_again():
    market = tiny_market({"a": ("4433444444", "1.00")}, nodes=4)
    recovery = Recovery(restart_s=180, handover_s=30, notice_s=0)
    task = replace(TASK, nodes=4, least_nodes=2, changeover_s=180, handover_s=30, work_s=600)
    done, _ = run(Policy.GREEDY, market, nodes=4, task=task, recovery=recovery)
    # 3 min to start, 3 of work; one is taken: half a minute to regroup. At 12 min the fourth is back: for 3 min it
    # boots beside three that work, then half a minute to regroup. 37.5 s of work are left.
    assert done.lifetimes == (
        lifetime(0, 0, 360, EndCause.INTERRUPTED, 1),
        lifetime(0, 0, 967.5, nodes=3),
        lifetime(0, 720, 967.5),
    )


def test_nodes_that_cannot_boot_beside_join_at_once_and_all_wait_for_them():
    market = tiny_market({"a": ("4434444444", "1.00")}, nodes=4)
    recovery = Recovery(restart_s=180, handover_s=180, notice_s=0)
    task = replace(TASK, nodes=4, least_nodes=1, changeover_s=180, handover_s=180, work_s=600)
    done, _ = run(Policy.GREEDY, market, nodes=4, task=task, recovery=recovery)
    # 3 min of work, 3 to regroup three; the fourth is grown by once it has been there for 9 min: 18 min in, with
    # 3 + 6.75 min done, so that 0.25 are left after the 3 min to regroup.
    assert done.lifetimes[0] == lifetime(0, 0, 360, EndCause.INTERRUPTED, 1)
    assert done.finished_s == 1080 + 180 + 15


def test_a_market_of_single_machines_gives_a_gang_as_a_whole():
    done, bill = run(Policy.GREEDY, tiny_market({"a": ("1111111111", "1.00")}), nodes=4, task=replace(TASK, nodes=4))
    assert (done.lifetimes, bill) == ((lifetime(0, 0, 900, nodes=4),), Decimal("1.00"))


def test_fewer_nodes_work_more_slowly_and_cost_less_an_hour():
    def half(task, observation):
        return Choice(mode=Mode.SPOT, zone="a", nodes=2)

    market = tiny_market({"a": ("2" * 10, "1.00")}, nodes=4)
    done, bill = run(half, market, nodes=4, task=replace(TASK, nodes=4, least_nodes=2))
    assert (done.lifetimes, done.finished_s) == ((lifetime(0, 0, 1620, nodes=2),), 1620)
    assert bill == Decimal("0.90")


def test_spot_machines_that_boot_beside_take_over_after_a_short_break():
    def beside(task, observation):
        ready = observation.holding.mode is Mode.BOTH and observation.holding.beside_s == 0
        if observation.holding.mode is Mode.SPOT or ready:
            return Choice(mode=Mode.SPOT, zone="a")
        return Choice(mode=Mode.ON_DEMAND if observation.time_left_s > 1500 else Mode.BOTH, zone="a")

    recovery = replace(NOTICED, restart_s=300, handover_s=120)
    done, bill = run(beside, tiny_market({"a": ("1" * 10, "1.00")}), recovery=recovery)
    # Beside from 6 to 9 min, when 4 of work are done; then 2 for the handover, and 8 of work.
    assert done.lifetimes == (lifetime(ON_DEMAND, 0, 540), lifetime(0, 360, 540 + 120 + 480))
    assert bill == Decimal("0.45") + Decimal("0.21666667")


def test_a_zone_without_machines_gives_none():
    def stubborn(task, observation):
        return Choice(mode=Mode.SPOT, zone="b")

    done, bill = run(stubborn, COMES_LATE)
    assert (done.lifetimes, done.finished_s, bill) == ((), None, 0)


@pytest.fixture(scope="module")
def recorded():
    market = PackagedMarkets().market("p3.2xlarge-2023-02")
    return timeline(market, zone_set(market, "us-east-1"), 1)


HOURS = 3600.0
LONG = Task(work_s=48 * HOURS, span_s=60 * HOURS, changeover_s=720, on_demand_usd_per_hour=3.06, tick_s=180)
TEN_MINUTES = Recovery(restart_s=600)


@pytest.mark.parametrize("policy", [Policy.GREEDY, Policy.UNIFORM])
def test_leaping_from_change_to_change_is_the_same_as_looking_every_time(recorded, policy):
    def careful(task, observation):
        return replace(decide(policy, task, observation), holds_s=180.0)

    for start in random.Random(1).sample(range(15000), 3):
        leaping = replay(partial(decide, policy), LONG, recorded, start, TEN_MINUTES, 155.0)
        looking = replay(careful, LONG, recorded, start, TEN_MINUTES, 155.0)
        assert leaping.lifetimes == looking.lifetimes
        assert leaping.finished_s == looking.finished_s
        assert leaping.decisions < looking.decisions


@pytest.mark.parametrize("policy", [Policy.GREEDY, Policy.UNIFORM, Policy.ON_DEMAND])
def test_every_deadline_and_budget_holds_and_what_is_charged_is_what_was_seen(recorded, policy):
    budget = 1.02 * 48 * 3.06
    for start in random.Random(2).sample(range(15000), 8):
        done = replay(partial(decide, policy), LONG, recorded, start, TEN_MINUTES, budget)
        assert done.finished_s is not None
        assert done.finished_s <= LONG.span_s
        bill = bill_usd(done, recorded)
        assert float(bill) <= budget
        assert float(bill) == pytest.approx(done.usd, abs=0.001)
        assert bill == sum(nodes * total(metered) for nodes, metered in charges(done, recorded))
