"""Attempts that end soon are followed by pauses, and a job whose steps cost too much stops."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobStatus, UsageInterval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import Finish, OpenAttempt, Resize, Wait
from gpucloud.domain.supervision.capacity import barren_in_a_row, pause_line, pause_until, saved_steps, standing
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules
from tests.unit.worlds import NOW, POOL, gone, opened, part, snapshot, state, up

GOAL, RULES, LIMITS = Goal(nodes=2, budget_usd=Decimal(1)), Rules(), Limits()


def ended(number, *, took=30.0, saved=None, ago=0.0, step_seconds=0.5, reason=ExitReason.LOST):
    end = NOW - timedelta(seconds=ago)
    times = {"ended_at": end, "reason": reason}
    attempt = opened("a", "b", number=number, saved_step=saved, last_step=number, step_seconds=step_seconds, **times)
    return transitions.replace(attempt, started_at=end - timedelta(seconds=took))


def barren(count, **changes):
    return tuple(ended(number, **changes) for number in range(1, count + 1))


def paid(hours, nodes=2):
    since = NOW - timedelta(hours=hours)
    return tuple(UsageInterval(node_id=f"n{i}", pool=POOL, launched_at=since) for i in range(nodes))


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, None), (1, None), (2, 5), (3, 10), (4, 20), (7, 160), (8, 300), (40, 300)]
)
def test_the_pause_doubles_from_5_seconds_to_5_minutes_and_one_bad_attempt_has_none(count, seconds):
    until = pause_until(state(attempts=barren(count)), LIMITS)
    assert until == (None if seconds is None else NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("attempts", "count"),
    [
        (barren(3), 3),
        ((*barren(2), ended(3, took=120.0)), 0),  # not soon
        ((*barren(2), ended(3, saved=10)), 0),  # saved something new
        ((ended(1, saved=10), ended(2, saved=10), ended(3, saved=10)), 2),  # nothing newer than the first
        ((ended(1, saved=10), ended(2, saved=20), ended(3)), 1),
    ],
)
def test_an_attempt_is_barren_that_ends_soon_without_a_newly_saved_step(attempts, count):
    assert barren_in_a_row(state(attempts=attempts), LIMITS) == count


def test_no_machine_is_asked_for_and_no_attempt_starts_during_a_pause():
    why = "pausing until 12:00:04 UTC: 2 attempts in a row ended soon, without a new checkpoint"
    storm = state(attempts=barren(2, ago=1.0))
    assert decide(GOAL, snapshot(group_size=0, state=storm), RULES) == Wait(why=why)
    assert decide(GOAL, snapshot(up("a"), up("b"), state=storm), RULES) == Wait(why=why)
    after = state(attempts=barren(2, ago=5.0))
    assert decide(GOAL, snapshot(group_size=0, state=after), RULES) == Resize(size=2)
    assert decide(GOAL, snapshot(up("a"), up("b"), state=after), RULES) == OpenAttempt(number=3, node_ids=("a", "b"))


def test_status_tells_the_pause_and_what_saved_steps_cost_until_the_job_is_over():
    attempts = tuple(ended(n, saved=600 if n == 1 else None, ago=1.0) for n in range(1, 6))
    storm = state(attempts=attempts, nodes=paid(1))
    assert standing(storm, NOW, LIMITS) == (
        "pausing until 12:00:19 UTC: 4 attempts in a row ended soon, without a new checkpoint",
        "the last 5 attempts took 2 h of machine time for 600 newly saved steps, 12.0 times what they cost undisturbed",
    )
    assert standing(transitions.replace(storm, status=JobStatus.STOPPED), NOW, LIMITS) == ()
    assert standing(state(attempts=(opened("a"),)), NOW, LIMITS) == ()


def test_a_job_that_is_told_to_go_on_does_not_pause_for_what_was():
    assert pause_until(state(attempts=barren(4), reopened_after=4), LIMITS) is None


# 2 machines for 1 h are 7,200 s; 600 steps of 0.5 s on 2 machines take 600 s undisturbed: 12 times as much.
@pytest.mark.parametrize(
    ("hours", "saved", "times"), [(1.0, 600, 12.0), (1.0, 360, 20.0), (1.0, 0, math.inf), (0.08, 600, None)]
)
def test_the_cost_of_newly_saved_steps_is_machine_time_over_what_they_take_undisturbed(hours, saved, times):
    attempts = tuple(ended(n, saved=saved * n // 5 or None) for n in range(1, 6))
    storm = state(attempts=attempts, nodes=paid(hours))
    cost = saved_steps(storm, NOW, LIMITS)
    assert (None if cost is None else cost.times) == times


def test_only_the_newest_attempts_are_judged():
    good = ended(1, took=3600.0, saved=10_000, ago=3600.0)
    late = tuple(ended(n, saved=10_000 + 10 * n, ago=10.0) for n in range(2, 7))
    cost = saved_steps(state(attempts=(good, *late), nodes=paid(3)), NOW, LIMITS)
    assert cost is not None
    assert (cost.saved, cost.paid) == (60, timedelta(hours=2))
    assert saved_steps(state(attempts=(good, *late[:3]), nodes=paid(3)), NOW, LIMITS) is None


def test_the_job_stops_when_a_newly_saved_step_costs_more_than_the_job_file_allows_and_says_the_figures():
    attempts = tuple(ended(n, saved=2 * n, took=121.0) for n in range(1, 6))
    world = snapshot(up("a"), up("b"), state=state(attempts=attempts, nodes=paid(1)))
    action = decide(GOAL, world, RULES)
    assert action == Finish(
        reason=ExitReason.INTERRUPTED,
        message="the last 5 attempts took 2 h of machine time for 10 newly saved steps, "
        "720.0 times what they cost undisturbed (checkpoint: give_up: 20x)",
    )
    assert transitions.finish(world.state, action, NOW).exit_code == 21
    assert isinstance(decide(Goal(nodes=2, budget_usd=Decimal(1), give_up=None), world, RULES), OpenAttempt)
    assert isinstance(decide(Goal(nodes=2, budget_usd=Decimal(1), give_up=800.0), world, RULES), OpenAttempt)


def test_an_attempt_remembers_its_newest_saved_step_and_its_median_step():
    known = snapshot(
        up("a", part(1, step=7, committed_step=5, step_seconds=0.25)), state=state(attempts=(opened("a"),))
    )
    attempt = transitions.record(known).attempts[-1]
    assert (attempt.saved_step, attempt.step_seconds) == (5, 0.25)
    later = snapshot(up("a", part(1, step=8, committed_step=None, step_seconds=None)), state=state(attempts=(attempt,)))
    attempt = transitions.record(later).attempts[-1]
    assert (attempt.saved_step, attempt.step_seconds) == (5, 0.25)


def test_an_attempt_that_is_over_has_saved_what_the_store_has_of_it():
    died = state(attempts=(opened("a", saved_step=20),))
    known = snapshot(gone("a"), state=died, checkpoint=CheckpointRef(step=33, sha256="0" * 64))
    assert transitions.record(known).attempts[-1].saved_step == 33


def test_a_wait_into_another_day_names_it():
    late = NOW.replace(hour=23, minute=59)
    assert pause_line(state(), late + timedelta(minutes=2), late, LIMITS).startswith(
        "pausing until 2026-03-02 00:01:00 UTC:"
    )


@pytest.mark.parametrize(
    ("steps", "words", "ends"),
    [
        ((600, 1200, 1800, 2400, 3000), "3000 new steps, 2.4 times what they cost undisturbed", False),
        ((600, 1, 1, 1, 1), "600 new steps, 12.0 times what they cost undisturbed", False),
        ((100, 90, 90, 90, 90), "100 new steps, 72.0 times what they cost undisturbed", True),
    ],
)
def test_of_a_script_that_prints_its_steps_and_saves_by_itself_steps_count_that_it_made(steps, words, ends):
    attempts = tuple(
        transitions.replace(ended(number, took=1400.0), last_step=step, printed_step=step)
        for number, step in enumerate(steps, 1)
    )
    storm = state(attempts=attempts, nodes=paid(1))

    assert str(saved_steps(storm, NOW, LIMITS)) == f"the last 5 attempts took 2 h of machine time for {words}"
    action = decide(GOAL, snapshot(up("a"), up("b"), state=storm), RULES)
    assert (isinstance(action, Finish) and action.reason is ExitReason.INTERRUPTED) == ends

    saved = transitions.replace(storm, attempts=(*attempts[:-1], transitions.replace(attempts[-1], saved_step=1)))
    assert saved_steps(saved, NOW, LIMITS).saved == 1
