"""Another budget for a job that runs: how low it may be, what becomes of the shut-off, what is written down."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.money.budget import PrepaidRule, Used
from gpucloud.domain.node.status import Stop
from gpucloud.domain.state.order import BudgetChange
from gpucloud.domain.state.state import CheckpointRef, ExitReason, Interruption, InterruptionKind, JobStatus
from gpucloud.domain.supervision.action import (
    Arm,
    CloseAttempt,
    Done,
    EndAttempt,
    Finish,
    ObeyOrder,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.budget import (
    Resumption,
    Standing,
    ended_at_limit,
    has_budget_left,
    least_to_lower_to,
    overdue,
    plain_usd,
    refusal,
    rest_after,
    shutdown_at,
    used_up,
)
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.domain.supervision.transitions import close_attempt
from tests.unit.worlds import LATER, NOW, goal, opened, part, snapshot, state, up

RULES = Rules()
RUNNING = (up("a", part(step=30)), up("b", part(step=30)))


def changed(usd, number=2, old="1"):
    return BudgetChange(number=number, by="me@here", at=NOW, old_usd=Decimal(old), new_usd=Decimal(usd))


def ordered(usd, number=2, **changes):
    """The goal of an order that changed the budget to that."""
    return goal(budget_usd=Decimal(usd), number=number, budget_changes=(changed(usd, number),), **changes)


def decided(wanted, *, nodes=RUNNING, spent="0.2", armed=LATER, **changes):
    job = state(attempts=(opened("a", "b"),), **{"order_number": 1, **changes})
    return decide(wanted, snapshot(*nodes, state=job, armed=armed, spent_usd=Decimal(spent)), RULES)


def test_a_raise_is_written_down_as_obeyed_and_says_who_and_from_what_to_what():
    action = decided(ordered("5"))

    assert action == ObeyOrder(number=2, changes=(changed("5"),))


def test_a_lower_budget_brings_the_shut_off_closer_before_the_order_counts_as_obeyed():
    # 2 machines at 0.9 USD an hour at the most: 0.4 - 0.2 spent - 0.105 of reserve pay for 190 s of both.
    closer = NOW + timedelta(seconds=190)

    assert decided(ordered("0.4")) == Arm(until=closer)
    assert decided(ordered("0.4"), armed=closer) == ObeyOrder(number=2, changes=(changed("0.4"),))


@pytest.mark.parametrize("promised", [LATER, NOW + timedelta(seconds=190), NOW, None])
def test_what_the_cloud_has_armed_counts_and_no_promise_of_the_state(promised):
    assert decided(ordered("0.4"), paid_until=promised) == Arm(until=NOW + timedelta(seconds=190))


def test_an_order_that_was_acted_on_is_not_acted_on_again():
    assert decided(ordered("5"), order_number=2) == Wait(why="running")


def test_orders_that_came_in_between_are_told_too():
    both = (changed("5", 2), changed("3", 3, old="5"))
    action = decided(goal(budget_usd=Decimal(3), number=3, budget_changes=both))

    assert action == ObeyOrder(number=3, changes=both)


def test_a_machine_that_may_not_move_the_shut_off_leaves_that_to_whoever_gave_the_order():
    drives = {"self_driving": True, "within_rights": True}

    assert decided(ordered("0.4", **drives)) == ObeyOrder(number=2, changes=(changed("0.4"),))
    assert decided(ordered("0.4", self_driving=True)) == Arm(until=NOW + timedelta(seconds=190))


@pytest.mark.parametrize(
    ("payable", "lasts", "until"),
    [
        (NOW + timedelta(seconds=190), None, NOW + timedelta(seconds=190)),
        (None, NOW + timedelta(seconds=20), NOW + timedelta(seconds=20)),
        (None, None, NOW),
    ],
)
def test_machines_that_are_kept_are_shut_off_when_the_budget_says_whatever_was_said_of_the_order(payable, lasts, until):
    """Whoever lowered it may have died before the cloud heard, and a machine have said that it goes by it."""
    job = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, order_number=2)
    world = snapshot(up("a"), up("b"), state=job, payable_until=payable, lasts_until=lasts)
    kept = ordered("0.4", keep=True)

    assert decide(kept, world, RULES) == Arm(until=until)
    assert decide(kept, replace(world, group=replace(world.group, armed_until=NOW + timedelta(seconds=9))), RULES) == (
        Arm(until=until) if until == NOW else Done()
    )
    assert decide(replace(kept, self_driving=True, within_rights=True), world, RULES) == Done()


@pytest.mark.parametrize(
    ("ended_at", "payable", "action"),
    [
        (NOW - timedelta(minutes=10), LATER, Arm(until=NOW + timedelta(minutes=20))),
        (NOW - timedelta(minutes=10), NOW + timedelta(minutes=5), Arm(until=NOW + timedelta(minutes=5))),
        (NOW - timedelta(minutes=31), LATER, TearDown()),
        (NOW - timedelta(minutes=10), None, TearDown()),
    ],
)
def test_the_shut_off_of_machines_that_are_kept_is_armed_anew_where_somebody_removed_it(ended_at, payable, action):
    job = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, order_number=2, ended_at=ended_at)
    world = snapshot(up("a"), up("b"), state=job, armed=None, payable_until=payable)

    assert decide(ordered("40", keep=True), world, RULES) == action
    assert decide(ordered("40", keep=True, self_driving=True), world, RULES) == Done()


def test_machines_that_are_kept_stay_for_the_whole_time_that_they_were_paid_while_they_drove_their_job():
    job = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, order_number=2)
    world = snapshot(up("a"), up("b"), state=job, armed=NOW + timedelta(hours=8), payable_until=LATER)

    assert decide(ordered("40", keep=True), world, RULES) == Done()


@pytest.mark.parametrize("who", [{}, {"self_driving": True}, {"self_driving": True, "within_rights": True}])
def test_whoever_supervises_ends_the_work_once_only_the_reserve_is_left_whatever_is_armed(who):
    job = state(attempts=(opened("a", "b"),), order_number=2)
    world = snapshot(
        *RUNNING, state=job, armed=LATER + timedelta(hours=8), spent_usd=Decimal("0.4"), payable_until=None
    )

    assert decide(ordered("0.4", **who), world, RULES) == EndAttempt(how=Stop.SAVE, reason=ExitReason.BUDGET)


def test_work_goes_on_while_a_machine_is_taken_that_gives_its_money_back():
    taken = Interruption(node_id="c", kind=InterruptionKind.NOTICE, attempt=None, noticed_at=NOW)
    job = state(attempts=(opened("a", "b"),), order_number=2, interruptions=(taken,))
    world = snapshot(*RUNNING, up("c", relieved=True), state=job, payable_until=None, payable_with_another=None)

    assert decide(ordered("0.4"), world, RULES) == Wait(why="running")


def test_a_machine_that_drives_ends_its_work_once_only_the_reserve_is_left_whatever_is_armed():
    # 0.3 - 0.2 spent are less than the 0.105 of reserve: nothing can be promised any more.
    wanted = ordered("0.3", self_driving=True, within_rights=True)
    saving = decided(wanted, order_number=2)  # this world can promise time still
    job = state(attempts=(opened("a", "b"),), order_number=2)
    spent = snapshot(*RUNNING, state=job, payable_until=None, payable_with_another=None, spent_usd=Decimal("0.2"))
    ending = decide(wanted, spent, RULES)

    assert saving == Wait(why="running")
    assert (ending.how, ending.reason) == (Stop.SAVE, ExitReason.BUDGET)
    assert decide(wanted, replace(spent, state=replace(job, attempts=())), RULES) == Finish(reason=ExitReason.BUDGET)


def test_a_lowered_budget_is_refused_with_the_least_sum_and_a_raised_one_never():
    # 0.2 spent + 60 s to save and 210 s in reserve of 2 machines at 0.9 USD an hour
    assert refusal(state(), Decimal(1), Decimal("0.2"), standing(), RULES).endswith("at least 0.34 USD")
    assert refusal(state(), Decimal("0.2"), Decimal("0.21"), standing(), RULES) is None
    assert refusal(state(), Decimal(1), Decimal("0.34"), standing(), RULES) is None


def standing(alive=2, spent="0.2", needed=2):
    return Standing(now=NOW, spent_usd=Decimal(spent), alive=alive, needed=needed)


@pytest.mark.parametrize(
    ("alive", "changes", "least"),
    [
        (2, {}, "0.335"),  # save 60 s + reserve 210 s of 2 machines at 0.9 USD an hour
        (1, {}, "0.2675"),
        (0, {}, "0.365"),  # a start: 60 s, the least time of training: 60 s, and 210 s
        (0, {"status": JobStatus.FAILED}, "0.2"),
    ],
)
def test_the_least_budget_is_what_is_spent_and_what_must_follow(alive, changes, least):
    assert least_to_lower_to(state(**changes), standing(alive), RULES) == Decimal(least)


def test_machines_that_live_have_an_end_whatever_the_budget_is():
    assert shutdown_at(state(), Decimal("0.1"), standing(), RULES) == NOW
    assert shutdown_at(state(), Decimal(100), standing(), RULES) == NOW + timedelta(minutes=30)


SAVED = CheckpointRef(step=70, sha256="0" * 64)


def test_the_end_at_the_wall_says_what_was_kept_aside_and_names_the_command_that_goes_on():
    job = replace(state(attempts=(opened("a", "b"),)), checkpoint=SAVED)

    assert used_up(job, Decimal("0.50"), Used(spent_usd=Decimal("0.395")), RULES.prepaid_rule).said() == (
        "the budget of 0.50 USD pays for no more machine time (0.395 USD spent, 0.105 USD kept aside for the last"
        " save and the machines' end), step 70 is saved: gpucloud train digits --budget '1 USD' goes on from there"
    )


def test_what_is_too_little_for_another_start_is_not_called_kept_aside():
    assert " (0.36 USD spent, 0.14 USD left, which is too little to start machines and train 1 min on them)," in (
        used_up(
            state(attempts=(opened("a", "b"),)), Decimal("0.50"), Used(spent_usd=Decimal("0.36")), RULES.prepaid_rule
        ).said()
    )


def test_a_rest_that_is_more_than_what_is_kept_aside_is_told_apart_from_it():
    job = state(attempts=(opened("a"),))
    said = used_up(job, Decimal("0.09"), Used(spent_usd=Decimal("0.034")), RULES.prepaid_rule).said()
    assert (
        "(0.0340 USD spent, 0.0525 USD kept aside for the last save and the machines' end, and 0.00350 USD, which is"
        " too little to train 1 min), nothing is saved" in said
    )
    assert said.endswith(" goes on from the beginning")


def test_what_is_said_of_money_at_the_end_is_said_by_the_budget_and_sums_of_now():
    ended = replace(state(attempts=(opened("a"),)), exit_reason=ExitReason.BUDGET, status=JobStatus.FAILED)
    alone, spent = replace(ended, had_budget_left=True), Used(spent_usd=Decimal("0.034"))

    def said(job, budget, *, is_late=False):
        again = Resumption(is_late=is_late)
        end = ended_at_limit(job, Decimal(budget), spent, RULES.prepaid_rule, nodes=1, again=again)
        return end and end.said()

    assert said(ended, "0.12") == (
        "its budget was used up then (0.0340 USD spent, 0.0860 USD left now), nothing is saved: gpucloud train digits"
        " goes on from the beginning"
    )
    assert said(ended, "0.09").startswith("the budget of 0.09 USD pays for no more machine time (0.0340 USD spent, ")
    assert said(alone, "0.13").startswith(
        "the time that its machines were paid for is over (0.0340 USD spent, 0.0960 USD left), no"
    )
    assert said(ended, "0.12", is_late=True).endswith(
        "nothing is saved: with a later `deadline:`, gpucloud train digits goes on from the beginning"
    )
    assert said(replace(ended, message="unattended time is over"), "0.12") is None
    assert said(replace(ended, exit_reason=ExitReason.STOPPED), "0.12") is None


@pytest.mark.parametrize(
    ("budget", "nodes", "cap", "left"),
    [("0.1166", 1, "0.9", True), ("0.1164", 1, "0.9", False), ("0.1166", 2, "0.9", False), ("9", 1, "0", False)],
)
def test_whether_a_budget_that_ended_a_job_was_enough_for_another_start(budget, nodes, cap, left):
    """Of one machine at 0.9 USD an hour: 60 s to start, 60 s to train and 210 s kept aside, beside 0.034 USD."""
    job, spent = state(attempts=(opened("a"),), cap_usd_per_hour=Decimal(cap)), Used(spent_usd=Decimal("0.034"))
    assert has_budget_left(job, Decimal(budget), spent, RULES.prepaid_rule, nodes) is left


def test_what_is_enough_for_another_start_is_never_called_too_little():
    """As where its own machines end with the time that was paid for them at the highest price, having cost less."""
    left = Used(spent_usd=Decimal("0.0156"), unproven_usd=Decimal("0.01"))
    told = (
        "the time that its machines were paid for is over (0.0156 USD spent, 0.01 USD unproven, 0.0845 USD left),"
        " step 70 is saved: gpucloud train digits goes on from there"
    )
    job = replace(state(attempts=(opened("a"),)), checkpoint=SAVED, had_budget_left=True)

    assert (
        used_up(job, Decimal("0.1101"), left, RULES.prepaid_rule).said() == told
    )  # the least for one machine is 0.0825 USD
    assert "pays for no more machine time" in used_up(job, Decimal("0.1101"), left, RULES.prepaid_rule, nodes=2).told


def test_a_budget_that_is_proposed_pays_for_the_steps_to_go_where_they_are_known():
    attempt = replace(opened("a", "b", first_step=0), total_steps=670, pace_s=6.0)
    job = replace(state(attempts=(attempt,)), checkpoint=SAVED)

    # from step 70: 600 steps of 6 s, after a start of 60 s, and 210 s are kept aside; 2 machines at 0.9 USD an hour
    assert used_up(job, Decimal("0.50"), Used(spent_usd=Decimal("0.50")), RULES.prepaid_rule).said() == (
        "the budget of 0.50 USD pays for no more machine time, step 70 is saved:"
        " gpucloud train digits --budget '2.44 USD' goes on from there, and pays for the 1 h to go"
    )
    almost = replace(job, attempts=(replace(attempt, total_steps=71),))  # it is refused for less training than a minute
    least = used_up(almost, Decimal("0.50"), Used(spent_usd=Decimal("0.50")), RULES.prepaid_rule)
    assert least.option == " --budget '0.67 USD'"
    raised = used_up(job, Decimal("0.60"), Used(spent_usd=Decimal("0.50")), RULES.prepaid_rule)
    assert raised.option == " --budget '2.44 USD'"  # by what is spent: a budget that was too little changes nothing


@pytest.mark.parametrize(
    ("last", "checkpoint", "rest"),
    [
        ({}, SAVED, 600),
        ({"total_steps": None, "pace_s": None}, SAVED, 600),  # it has told nothing yet, and the one before did
        ({"total_steps": None, "pace_s": None, "script": "another"}, SAVED, None),
        ({"done_at": NOW}, SAVED, None),
        ({}, replace(SAVED, counts=Counts.SAVES), None),
        ({"counts": Counts.SAVES}, SAVED, None),
        ({}, None, 670),
    ],
)
def test_what_is_left_of_a_run_is_known_by_the_word_of_its_own_script_where_that_counts_steps(last, checkpoint, rest):
    before = opened("a", first_step=0, total_steps=670, pace_s=6.0, script="s", reason=ExitReason.LOST)
    told = {"script": "s", "total_steps": 670, "pace_s": 6.0, **last}
    left = rest_after((before, opened("b", number=2, first_step=0, **told)), checkpoint)
    assert (left and (left.steps, left.of, left.takes)) == (rest and (rest, 670, timedelta(seconds=6 * rest)))


def test_a_budget_that_is_proposed_starts_all_the_machines_that_the_job_asks_for():
    """The last attempt had a part of them, and little to go on these: a start is reckoned with all 8."""
    attempt = replace(opened("a", "b", first_step=0), total_steps=71, pace_s=6.0)
    job = replace(state(attempts=(attempt,), cap_usd_per_hour=Decimal(1)), checkpoint=SAVED)

    # 60 s to start, 60 s to train and 210 s kept aside of 8 machines at 1 USD an hour are 0.7334 USD
    told = used_up(job, Decimal(10), Used(spent_usd=Decimal("9.90")), RULES.prepaid_rule, nodes=8).said()
    assert "--budget '10.64 USD' goes on from there, and pays for the 6 s to go" in told
    almost = used_up(job, Decimal("10.63"), Used(spent_usd=Decimal("9.90")), RULES.prepaid_rule, nodes=8)
    assert "pays for no more machine time" in almost.told
    longer = replace(job, attempts=(replace(attempt, total_steps=670),))  # 61 min of 2 machines, and 210 s of all 8
    told = used_up(longer, Decimal(10), Used(spent_usd=Decimal(10)), RULES.prepaid_rule, nodes=8).said()
    assert "--budget '12.50 USD' goes on from there, and pays for the 1 h to go" in told


def test_the_end_at_the_deadline_says_what_is_saved_and_how_the_job_goes_on():
    attempt = opened("a", "b", ending_reason=ExitReason.DEADLINE)
    job = replace(state(attempts=(attempt,)), checkpoint=CheckpointRef(step=70, sha256="0" * 64))
    ended = close_attempt(job, CloseAttempt(reason=ExitReason.DEADLINE), NOW)

    def said(again):
        return ended_at_limit(ended, Decimal(1), Used(), RULES.prepaid_rule, nodes=2, again=again).said()

    assert ended.message is None
    assert said(Resumption(is_late=True)) == (
        "the deadline is over, step 70 is saved:"
        " with a later one in the job file, gpucloud train digits goes on from there"
    )
    assert said(Resumption(budget_usd=Decimal("1.2"), is_late=True)) == (
        "the deadline is over, step 70 is saved:"
        " with a later one in the job file, gpucloud train digits --budget '1.20 USD' goes on from there"
    )


@pytest.mark.parametrize(("usd", "text"), [("1", "1"), ("0.5", "0.50"), ("100", "100"), ("0.123", "0.123")])
def test_sums_are_written_as_people_do(usd, text):
    assert plain_usd(Decimal(usd)) == text


def test_what_an_earlier_run_ended_for_names_no_command_that_goes_on_with_a_later_one() -> None:
    saved = state(checkpoint=CheckpointRef(step=40, sha256="0" * 64))
    assert overdue(saved).told == "the deadline is over, step 40 is saved"
    for budget_usd in (Decimal(1), Decimal(9)):
        end = used_up(saved, budget_usd, Used(spent_usd=Decimal("0.9")), PrepaidRule())
        assert end.told.endswith("step 40 is saved")
        assert end.said("FILE").startswith(f"{end.told}: gpucloud train FILE")
