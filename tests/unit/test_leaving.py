"""A script that saves by itself and is asked to stop: what time it has, and what is left for its upload."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpucloud.domain.checkpoint.layouts import KeepOrder, Leaving, Rule
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, OnNotice
from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.status import AttemptStatus, Outcome, Stop
from gpucloud.domain.state.state import ExitReason, Interruption, InterruptionKind
from gpucloud.domain.supervision.action import Action, Arm, BringHome, CloseAttempt, EndAttempt, Wait
from gpucloud.domain.supervision.budget import rules_for
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Homecoming, NodeSnapshot, Rules
from tests.unit.worlds import NOW as WORLD_NOW
from tests.unit.worlds import goal, opened, part, snapshot, state, up

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
ORDER = KeepOrder(
    code="/c",
    directory="/c/out",
    rule=Rule(),
    on_notice=OnNotice.SIGTERM,
    settle=timedelta(seconds=1),
    store="s3://b",
    prefix="jobs/x/checkpoints",
    attempt=1,
    keep=3,
    rank=0,
    folder="/a",
    first_rank=0,
    save=timedelta(seconds=90),
    upload=timedelta(seconds=120),
)


def told(at_s: float, uploads_s: float, *, alone: bool = False) -> Leaving:
    return ORDER.leaving(NOW, NOW + timedelta(seconds=at_s), timedelta(seconds=uploads_s), alone=alone)


def spans(leaving: Leaving) -> tuple[float, float, bool]:
    return (leaving.script - NOW).total_seconds(), (leaving.upload - NOW).total_seconds(), leaving.is_short


@pytest.mark.parametrize("uploads_s", [0.0, 20.0, 34.0, 40.0, 300.0])
def test_who_is_asked_by_the_user_has_all_the_time_that_the_supervisor_gives_and_its_upload_comes_after_that(uploads_s):
    assert spans(told(0.0, uploads_s)) == (90.0, 209.0, False)


@pytest.mark.parametrize(
    ("at_s", "uploads_s", "script_s", "is_short"),
    [
        (120, 0.1, 118.0, False),
        (120, 20, 89.0, False),
        (120, 40, 59.5, True),
        (120, 300, 59.5, True),
        (4, 9, 1.5, True),
    ],
)
def test_what_a_notice_leaves_is_for_the_upload_too_but_half_of_it_is_the_scripts(at_s, uploads_s, script_s, is_short):
    assert spans(told(at_s, uploads_s)) == (script_s, at_s - 1.0, is_short)


def test_a_node_that_uploads_nothing_leaves_in_the_time_for_saving():
    assert spans(told(0.0, 0.0, alone=True)) == (89.0, 89.0, False)
    assert spans(told(30.0, 0.0, alone=True)) == (29.0, 29.0, False)
    assert spans(told(120.0, 0.0, alone=True)) == (89.0, 89.0, False)


def test_a_supervisor_waits_for_the_upload_of_a_script_that_saves_by_itself():
    limits = Rules().limits
    own = rules_for(CheckpointPolicy(directory=CheckpointDirectory(path="out")), None, Rules()).limits
    assert (limits.leave, limits.overdue) == (timedelta(minutes=1), timedelta(minutes=2))
    assert (own.save, own.leave, own.overdue) == (timedelta(minutes=1), timedelta(minutes=3), timedelta(minutes=6))


# What a script wrote that hears of no end: it is killed in time for that to come home.


MUTE = goal(nodes=2, has_outputs=True, saves_nothing=True)
UNKNOWN = replace(MUTE, saves_nothing=False)
SAVES_NOTHING = "its script saves nothing, and is ended in time for its outputs to come home"
UNHEARD = "what the script wrote needs the time that is left, and it did not leave"
GOES_ON = Wait(why="running")


def running(*nodes: NodeSnapshot, attempt: Any = None, **changes: Any) -> Any:
    """A world in which attempt 1 is open on a and b."""
    known = changes.pop("interruptions", ())
    return snapshot(*nodes, state=state(attempts=(attempt or opened("a", "b"),), interruptions=known), **changes)


def killed(reason: ExitReason, message: str) -> EndAttempt:
    return EndAttempt(how=Stop.KILL, reason=reason, message=message)


def printed(steps_left: int | None) -> AttemptStatus:
    """A part whose script prints its steps, of a second each."""
    total = 30 + steps_left if steps_left is not None else None
    return part(1, step=30, phase="output", total_steps=total, step_seconds=1.0)


def at_the_budgets_end(left_s: float, goal: Goal, says: AttemptStatus, **changes: Any) -> Action:
    """What is done so long before the paid time ends, of which 60 s are for leaving, as the agents say."""
    until = WORLD_NOW + timedelta(seconds=left_s)
    nodes = (up("a", says), up("b", part(1)))
    told = tuple(replace(one, status=replace(one.status, leaves_s=60.0)) for one in nodes)
    plain = {"armed": until, "payable_until": None, "lasts_until": until}
    return decide(goal, running(*told, **{**plain, **changes}), Rules())


def test_outputs_of_a_script_that_saves_nothing_have_the_time_before_a_budgets_end_that_others_have_to_save():
    ended = killed(ExitReason.BUDGET, SAVES_NOTHING)
    assert (at_the_budgets_end(60, MUTE, part(1)), at_the_budgets_end(59, MUTE, part(1))) == (GOES_ON, ended)
    assert at_the_budgets_end(59, MUTE, printed(1000)) == ended
    assert at_the_budgets_end(59, MUTE, printed(None)) == ended
    assert at_the_budgets_end(1, replace(MUTE, has_outputs=False), part(1)) == GOES_ON
    assert at_the_budgets_end(59, MUTE, part(1, step=30)) == GOES_ON  # it uses the library: its agent asks it


def test_a_script_that_will_be_done_in_half_of_that_time_is_not_killed_before():
    ended = killed(ExitReason.BUDGET, SAVES_NOTHING)
    assert (at_the_budgets_end(59, MUTE, printed(29)), at_the_budgets_end(59, MUTE, printed(30))) == (GOES_ON, ended)
    assert at_the_budgets_end(30, MUTE, printed(1)) == ended


def test_a_script_of_which_nothing_is_known_may_leave_by_itself_for_half_of_that_time():
    ended = killed(ExitReason.BUDGET, UNHEARD)
    for says in (part(1), printed(1000)):
        assert (at_the_budgets_end(31, UNKNOWN, says), at_the_budgets_end(30, UNKNOWN, says)) == (GOES_ON, ended)
    assert at_the_budgets_end(1, replace(UNKNOWN, saves_alone=True), printed(9)) == GOES_ON  # its wrapper ends it
    assert at_the_budgets_end(1, UNKNOWN, part(1, step=30)) == GOES_ON


def test_no_script_is_killed_for_its_outputs_while_the_budget_pays_for_more_time():
    later = WORLD_NOW + timedelta(minutes=20)
    assert at_the_budgets_end(59, MUTE, part(1), payable_until=later, lasts_until=later) == Arm(until=later)


def test_a_script_that_saves_nothing_is_not_asked_to_when_its_budget_is_used_up():
    spent = {"payable_until": None, "lasts_until": None}
    for outputs, goal_of_it, how in ((False, MUTE, Stop.KILL), (False, UNKNOWN, Stop.SAVE)):
        done = at_the_budgets_end(900, replace(goal_of_it, has_outputs=outputs), part(1), **spent)
        assert done == EndAttempt(how=how, reason=ExitReason.BUDGET)


def on_notice(heard_s: float, goal: Goal, says: AttemptStatus, who: str = "a") -> Action:
    """What is done so long after it was heard of a notice of two minutes."""
    at = WORLD_NOW - timedelta(seconds=heard_s)
    nodes = [up("a", says), up("b", part(1))]
    noticed = [n if n.node.id != who else with_notice(n, at + timedelta(minutes=2)) for n in nodes]
    known = Interruption(node_id=who, kind=InterruptionKind.NOTICE, attempt=1, noticed_at=at)
    return decide(goal, running(*noticed, interruptions=(known,), payable_with_another=None), Rules())


def with_notice(node: NodeSnapshot, at: datetime) -> NodeSnapshot:
    return replace(node, status=replace(node.status, notice=Notice(action="terminate", at=at)))


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_script_that_saves_nothing_is_killed_at_a_notice_and_leaves_what_it_wrote_the_time(who):
    ended = killed(ExitReason.INTERRUPTED, SAVES_NOTHING)
    assert on_notice(0, MUTE, part(1), who) == ended
    assert on_notice(0, MUTE, printed(1000), who) == ended
    assert (on_notice(0, MUTE, printed(60), who), on_notice(0, MUTE, printed(61), who)) == (GOES_ON, ended)
    assert not isinstance(on_notice(0, replace(MUTE, has_outputs=False), part(1), who), EndAttempt)
    assert on_notice(0, replace(MUTE, self_driving=True), part(1), who) == ended


def test_who_has_not_left_by_half_of_a_notice_and_does_not_use_the_library_is_killed():
    ended = killed(ExitReason.INTERRUPTED, UNHEARD)
    assert (on_notice(59, UNKNOWN, printed(9)), on_notice(60, UNKNOWN, printed(9))) == (GOES_ON, ended)
    assert on_notice(119, UNKNOWN, part(1, step=30)) == GOES_ON


def test_an_attempt_that_was_killed_at_a_notice_counts_as_interrupted():
    over = part(1, Outcome.KILLED)
    ending = replace(opened("a", "b"), ordered=Stop.KILL, ending_reason=ExitReason.INTERRUPTED, ending_at=WORLD_NOW)
    known = Interruption(node_id="a", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=WORLD_NOW)
    world = running(up("a", over, notice=True), up("b", over), attempt=ending, interruptions=(known,))
    assert decide(MUTE, world, Rules()) == CloseAttempt(reason=ExitReason.INTERRUPTED)


def test_an_attempt_that_was_killed_before_its_budget_ends_brings_its_outputs_home_first():
    over = part(1, Outcome.KILLED)
    ending = replace(opened("a", "b"), ordered=Stop.KILL, ending_reason=ExitReason.BUDGET, ending_at=WORLD_NOW)
    soon = {"armed": WORLD_NOW + timedelta(seconds=59), "payable_until": None}
    world = running(up("a", over), up("b", over), attempt=ending, homecoming=Homecoming.NO, **soon)
    assert decide(MUTE, world, Rules()) == BringHome()
    assert decide(MUTE, replace(world, homecoming=Homecoming.DONE), Rules()) == CloseAttempt(reason=ExitReason.BUDGET)
