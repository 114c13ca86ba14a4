"""Whose fault a setup is that fails: the job's own, or one machine's."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.bootstrap.facts import FailedSetup, parse_failed_setup
from gpucloud.domain.node.node import NodeState
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Finish, Prepare, Replace, Wait
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, NodeSnapshot, Readiness, Rules
from tests.unit.worlds import opened, snapshot, state, up

GOAL, RULES = Goal(nodes=2, budget_usd=Decimal(1)), Rules()
WHY = "setup: `pip install nothing` ended with exit code 1: no such package"


def failed(node_id: str) -> NodeSnapshot:
    return replace(up(node_id, readiness=Readiness.FAILED), setup_failed=WHY)


@pytest.mark.parametrize("other", [failed("b"), up("b", readiness=Readiness.FAILED), up("b", readiness=Readiness.NO)])
def test_a_setup_that_worked_nowhere_ends_the_job_as_its_own_error_and_buys_no_other_machine(
    other: NodeSnapshot,
) -> None:
    # Machines that failed beside one another are one round, so that the limit of rounds is not reached.
    over = Finish(reason=ExitReason.USER_ERROR, message=WHY)
    assert decide(GOAL, snapshot(failed("a"), other, failed_bootstraps=1), RULES) == over
    assert over.reason.exit_code == 20


def test_while_another_machine_is_at_the_same_setup_nothing_is_ended_and_none_is_bought() -> None:
    there = snapshot(failed("a"), up("b", readiness=Readiness.PREPARING), failed_bootstraps=1)
    assert decide(GOAL, there, RULES) == Wait(why="bootstrap")


def test_a_machine_whose_setup_fails_where_another_ones_works_is_replaced() -> None:
    assert decide(GOAL, snapshot(failed("a"), up("b"), failed_bootstraps=1), RULES) == Replace(node_ids=("a",))


def test_a_setup_that_worked_for_an_attempt_before_is_the_machines_fault_or_the_networks() -> None:
    trained = state(attempts=(opened("a", "b", reason=ExitReason.INTERRUPTED, last_step=5),))
    assert decide(GOAL, snapshot(failed("c"), state=trained, failed_bootstraps=1), RULES) == Replace(node_ids=("c",))
    twice = snapshot(replace(failed("c"), error=WHY), state=trained, failed_bootstraps=2)
    assert decide(GOAL, twice, RULES) == Finish(reason=ExitReason.UNPREPARED, message=WHY)


def test_a_mended_job_whose_setup_fails_on_the_held_machines_ends_at_once_again() -> None:
    script = opened("a", "b", reason=ExitReason.USER_ERROR, last_step=5)
    reopened = replace(state(attempts=(script,)), reopened_after=1)
    there = snapshot(failed("a"), failed("b"), state=reopened, failed_bootstraps=1)
    assert decide(GOAL, there, RULES) == Finish(reason=ExitReason.USER_ERROR, message=WHY)


def test_a_setup_that_failed_on_a_machine_that_is_gone_says_nothing_of_those_that_came_after_it() -> None:
    # Another one's setup worked meanwhile, and that machine was lost before an attempt: nobody knows any more.
    gone = replace(failed("a"), node=replace(failed("a").node, state=NodeState.TERMINATED))
    young = (up("b", readiness=Readiness.NO), up("c", readiness=Readiness.NO))
    assert decide(GOAL, snapshot(gone, *young, failed_bootstraps=1), RULES) == Prepare(node_ids=("b", "c"))


def test_what_the_user_wants_comes_before_the_setups_fault() -> None:
    there = snapshot(failed("a"), failed("b"), wanted_end=ExitReason.STOPPED)
    assert decide(GOAL, there, RULES) == Finish(reason=ExitReason.STOPPED)


def test_a_nodes_answer_of_a_failed_setup_is_read_as_others_words() -> None:
    said = FailedSetup(command="a\x1b]0;x\x07\nb" + "c" * 1000, exit_code=3, log="one\n\x1b[2Jtwo\n\n")
    found = parse_failed_setup(b"note: x\n" + to_json(said).encode() + b"\n")
    assert found == said
    assert str(found) == f"`a b{'c' * 297}` ended with exit code 3"
    assert found.in_short().endswith("exit code 3: two")
    assert parse_failed_setup(b'{"command": 1}') is None
    assert parse_failed_setup(b"") is None
    empty = FailedSetup(command="false", exit_code=1, log="")
    assert (empty.in_short(), empty.shown()) == (str(empty), "`false` ended with exit code 1:")
