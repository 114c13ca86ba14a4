"""Another budget for a job that runs: how low it may be, what becomes of the shut-off, what is written down."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.state import BudgetWish, CheckpointRef, JobStatus
from gpucloud.domain.supervision.action import ChangeBudget
from gpucloud.domain.supervision.budget import Standing, least_to_lower_to, plain_usd, shut_off, used_up
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.seen import Goal, Rules
from tests.unit.worlds import NOW, opened, part, seen, state, up

GOAL = Goal(nodes=2)
RULES = Rules()
RUNNING = (up("a", part(step=30)), up("b", part(step=30)))


def wish(usd, name="one", by="me@here"):
    return BudgetWish(id=name, by=by, at=NOW, usd=Decimal(usd))


def decided(*wishes, nodes=RUNNING, spent="0.2", **changes):
    job = state(attempts=(opened("a", "b"),), **changes)
    return decide(GOAL, seen(*nodes, state=job, budget_wishes=wishes, spent_usd=Decimal(spent)), RULES)


def test_a_raise_is_written_down_with_who_and_from_what_to_what():
    action = decided(wish("5"))

    assert isinstance(action, ChangeBudget)
    (change,) = action.changes
    assert (change.by, change.old_usd, change.new_usd, change.refused) == ("me@here", 1, 5, None)
    assert (action.budget_usd, action.until, action.taken) == (5, None, ("one",))


def test_a_lower_budget_brings_the_shut_off_closer_to_what_it_pays_for():
    # 2 machines at 0.9 USD an hour at the most: 0.4 - 0.2 spent - 0.105 of reserve pay for 190 s of both.
    action = decided(wish("0.4"))

    assert action.budget_usd == Decimal("0.4")
    assert action.until == NOW + timedelta(seconds=190)


def test_a_budget_below_what_is_spent_and_what_saving_costs_is_refused_with_the_least_sum():
    action = decided(wish("0.2"))

    assert (action.budget_usd, action.until) == (1, NOW + timedelta(seconds=1390))  # what the 1 USD pays for
    # 0.2 spent + 60 s to save and 210 s in reserve of 2 machines at 0.9 USD an hour
    assert action.changes[0].refused.endswith("at least 0.34 USD")


def test_two_wishes_at_once_are_both_written_down_and_the_last_stands():
    action = decided(wish("5", "one"), wish("3", "two", "you@there"))

    assert [(c.old_usd, c.new_usd, c.by) for c in action.changes] == [(1, 5, "me@here"), (5, 3, "you@there")]
    assert action.budget_usd == 3


def test_a_wish_that_is_in_the_books_is_not_taken_up_again():
    first = decided(wish("5"))
    action = decided(wish("5"), budget_usd=Decimal(5), budget_changes=first.changes)

    assert (action.changes, action.budget_usd, action.taken) == ((), 5, ("one",))


def test_a_budget_that_was_never_kept_can_be_raised_to_less_than_the_least():
    action = decided(wish("0.21"), budget_usd=Decimal("0.2"), spent="0.2")

    assert action.changes[0].refused is None


def standing(alive=2, spent="0.2", needed=2):
    return Standing(now=NOW, spent_usd=Decimal(spent), alive=alive, needed=needed)


@pytest.mark.parametrize(
    ("alive", "changes", "least"),
    [
        (2, {}, "0.335"),  # save 60 s + reserve 210 s of 2 machines at 0.9 USD an hour
        (1, {}, "0.2675"),
        (0, {}, "0.335"),  # a start: 60 s + 210 s
        (0, {"status": JobStatus.FAILED}, "0.2"),
    ],
)
def test_the_least_budget_is_what_is_spent_and_what_must_follow(alive, changes, least):
    assert least_to_lower_to(state(**changes), standing(alive), RULES) == Decimal(least)


def test_machines_that_live_have_an_end_whatever_the_budget_is():
    assert shut_off(state(budget_usd=Decimal("0.1")), standing(), RULES) == NOW
    assert shut_off(state(budget_usd=Decimal(100)), standing(), RULES) == NOW + timedelta(minutes=30)


def test_the_end_at_the_wall_names_the_budget_and_the_command_that_goes_on():
    job = replace(state(budget_usd=Decimal("0.50")), checkpoint=CheckpointRef(step=70, sha256="0" * 64))

    assert used_up(job) == (
        "the budget of 0.50 USD is used up, step 70 is saved: gpucloud train digits --budget 1USD goes on from there"
    )


@pytest.mark.parametrize(("usd", "text"), [("1", "1"), ("0.5", "0.50"), ("100", "100"), ("0.123", "0.123")])
def test_sums_are_written_as_people_do(usd, text):
    assert plain_usd(Decimal(usd)) == text
