"""When an attempt hangs, and what is done then."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.job.quantities import parse_span
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import CloseAttempt, EndAttempt, Wait
from gpucloud.domain.supervision.membership import hang_limit, hung, patience
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules
from gpucloud.usecases.supervise.act import Announcements, hang_words
from tests.unit.worlds import NOW, opened, part, snapshot, state, up

GOAL, RULES = Goal(nodes=1, budget_usd=Decimal(1)), Rules()
REPORT = "what takes longer belongs in `with run.phase(...)`"


def during(attempt, **progress):
    return snapshot(up("a", part(attempt.number, step=9, **progress)), group_size=1, state=state(attempts=(attempt,)))


def over(reason, number=1):
    return opened("a", number=number, reason=reason, ended_at=NOW)


@pytest.mark.parametrize(
    ("median", "reasons", "limit"),
    [
        (0.4, [], 60),
        (12.0, [], 60),
        (12.2, [], 61),
        (600.0, [], 3000),
        (0.4, [ExitReason.HUNG], 120),
        (0.4, [ExitReason.HUNG, ExitReason.HUNG], 240),
        (0.4, [ExitReason.HUNG, ExitReason.INTERRUPTED], 60),
        (0.4, [ExitReason.HUNG] * 40, 60 * 1024),
    ],
)
def test_a_step_may_take_five_medians_a_minute_at_least_and_twice_as_long_after_each_hang(median, reasons, limit):
    attempts = tuple(over(reason, number) for number, reason in enumerate(reasons, 1))
    assert hang_limit(median, (*attempts, opened("a", number=99)), Limits()) == timedelta(seconds=limit)


@pytest.mark.parametrize(
    ("phase", "age_s", "hangs", "why"),
    [
        ("start", 1800.0, 0, None),
        ("start", 1801.0, 0, "no first step within 30 min (what "),
        ("start", 3600.0, 1, None),
        ("start", 3601.0, 1, "no first step within 60 min (what "),
        ("start", 7200.0, 2, None),
        ("start", 7201.0, 2, "no first step within 120 min (what "),
        ("start", 7201.0, 9, "no first step within 120 min (what "),
        ("evaluate", 9999.0, 0, None),
        ("save", 9999.0, 0, None),
    ],
)
def test_a_script_has_half_an_hour_for_its_first_step_twice_as_long_after_a_hang_four_times_at_most(
    phase, age_s, hangs, why
):
    before = tuple(over(ExitReason.HUNG, number) for number in range(1, hangs + 1))
    attempt = opened("a", number=hangs + 1)
    node = up("a", part(attempt.number, step=0, step_seconds=None, phase=phase, age_s=age_s))
    said = hung(attempt, snapshot(node, group_size=1, state=state(attempts=(*before, attempt))), Limits())
    whole = why and why + "takes longer belongs in `with run.phase(...)`); stacks are in the log"
    assert said == whole


def test_an_attempt_that_makes_no_first_step_is_ended_as_one_that_hangs():
    action = decide(GOAL, during(opened("a"), step_seconds=None, phase="start", age_s=9999.0), RULES)
    assert isinstance(action, EndAttempt)
    assert (action.how, action.reason) == (Stop.ABORT, ExitReason.HUNG)


def test_a_script_that_tells_of_no_steps_may_take_as_long_as_it_likes():
    silent = snapshot(up("a", part(1)), group_size=1, state=state(attempts=(opened("a"),)))
    assert decide(GOAL, silent, RULES) == Wait(why="running")


def test_a_hang_is_told_with_its_figures_and_the_ranks_say_where_they_are_before_they_are_killed():
    action = decide(GOAL, during(opened("a"), step_seconds=0.4, age_s=63.2), RULES)
    assert action == EndAttempt(
        how=Stop.ABORT,
        reason=ExitReason.HUNG,
        message=f"no step for 63 s (median 0.4 s; {REPORT}); stacks are in the log",
    )
    ordered = transitions.order_end(state(attempts=(opened("a"),)), action, NOW).attempts[-1]
    assert (ordered.ending_reason, ordered.ordered) == (ExitReason.HUNG, Stop.ABORT)


@pytest.mark.parametrize(("ago", "wanted"), [(9.9, Wait), (10.0, EndAttempt)])
def test_an_agent_that_does_not_see_to_it_is_told_to_kill(ago, wanted):
    ending_reason = {"ending_reason": ExitReason.HUNG, "ending_at": NOW - timedelta(seconds=ago), "ordered": Stop.ABORT}
    action = decide(GOAL, during(opened("a", **ending_reason), step_seconds=0.4, age_s=70.0), RULES)
    assert isinstance(action, wanted)
    if isinstance(action, EndAttempt):
        assert (action.how, action.reason) == (Stop.KILL, ExitReason.HUNG)


@pytest.mark.parametrize("outcome", [Outcome.KILLED, Outcome.FAILED])
def test_an_attempt_that_hung_is_followed_by_another_however_its_ranks_ended(outcome):
    attempt = opened("a", ending_reason=ExitReason.HUNG, ending_at=NOW, ordered=Stop.ABORT)
    world = snapshot(up("a", part(1, outcome)), group_size=1, state=state(attempts=(attempt,)))
    action = decide(GOAL, world, RULES)
    assert action == CloseAttempt(reason=ExitReason.HUNG)
    assert transitions.close_attempt(world.state, action, NOW).status.value == "waiting"


def test_what_is_taken_for_a_hang_is_told_once_and_again_when_it_is_longer():
    told = "would be taken for a hang, and started again, from a checkpoint where it has one: "
    usual = ", or 5 times its usual step or 1.5 times its longest where that is longer"
    twice = ", or 10 times its usual step or 3 times its longest where that is longer"
    announcements = Announcements()

    def news(*attempts, **progress):
        node = up("a", part(attempts[-1].number, step=9, **progress))
        world = snapshot(node, group_size=1, state=state(attempts=attempts))
        return [line for line in announcements.news(Wait(why="running"), world, Limits()) if "hang" in line]

    assert news(opened("a"), phase="start", step_seconds=None) == [
        f"{told}no first step within 30 min, then none for 1 min{usual}"
    ]
    assert news(opened("a"), step_seconds=0.4) == []
    assert news(over(ExitReason.INTERRUPTED), opened("a", number=2), step_seconds=0.4) == []
    slow = "; longer now, for the attempt before may have been slow alone"
    assert news(over(ExitReason.HUNG), opened("a", number=2), step_seconds=0.4) == [
        f"{told}no first step within 1 h, then none for 2 min{twice}{slow}"
    ]


def test_of_a_script_of_which_no_step_is_read_nothing_is_taken_for_a_hang():
    def news(**progress):
        world = snapshot(up("a", part(1, step=9, **progress)), group_size=1, state=state(attempts=(opened("a"),)))
        return [line for line in Announcements().news(Wait(why="running"), world, Limits()) if "hang" in line]

    assert news(phase="script", step_seconds=None) == []
    assert news(phase="output", step_seconds=0.5) == [
        "would be taken for a hang, and started again, from a checkpoint where it has one: no other step in the output"
        " for 10 min, or 5 times its usual step or 1.5 times its longest where that is longer"
    ]


@pytest.mark.parametrize("phase", ["train", "output"])
@pytest.mark.parametrize(("hangs", "usual", "longest"), [(0, 5, 1.5), (1, 10, 3.0), (5, 160, 48.0)])
def test_what_is_told_to_be_taken_for_a_hang_is_what_is(phase, hangs, usual, longest):
    before = tuple(over(ExitReason.HUNG, number) for number in range(1, hangs + 1))
    limits = Limits()

    def limit(step, longest_s=None):
        attempts = (*before, opened("a", number=hangs + 1, longest_step_s=longest_s))
        stands = part(hangs + 1, step=9, phase=phase, step_seconds=step).shown
        words = hang_words(stands, attempts, limits)
        assert f"or {usual} times its usual step or {longest:g} times its longest" in words
        least = re.search(r"for ([^,]*), or", words)[1]
        assert parse_span(least) == patience(replace(stands, step_seconds=0.1), (*before, opened("a")), limits)
        return patience(stands, attempts, limits).total_seconds()

    assert limit(1000.0) == 1000.0 * usual
    assert limit(0.4, 5000.0) == 5000.0 * longest
