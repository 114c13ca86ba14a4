"""What is decided, case by case, and over the whole product of small worlds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.domain.checkpoint.manifest import Counts, Why
from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.job.spec import IdlePolicy, Market
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import EndCause, Fault, NodeState, Notice, PeerReport
from gpucloud.domain.node.status import DONE, OUTPUT, UNTOLD, Outcome, Stop
from gpucloud.domain.node.use import DeviceUse, GpuUse
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import (
    CheckpointRef,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobStatus,
    Owner,
    Quarantine,
    UsageInterval,
)
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    Done,
    Drill,
    EndAttempt,
    Finish,
    Inspect,
    Move,
    NoteInterruptions,
    OpenAttempt,
    Prepare,
    Provision,
    QuarantineNodes,
    Relieve,
    Replace,
    Resize,
    TearDown,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.capacity import barren_in_a_row
from gpucloud.domain.supervision.membership import barred, quarantined
from gpucloud.domain.supervision.reconcile import decide, fruitless
from gpucloud.domain.supervision.renewal import renew
from gpucloud.domain.supervision.snapshot import (
    Goal,
    Homecoming,
    Inspection,
    InUse,
    Readiness,
    Rules,
    Supervising,
    goal_of,
)
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.supervise.story import tell_story
from tests.unit.worlds import (
    LATER,
    NOW,
    OTHER_POOL,
    POOL,
    cooldown,
    gone,
    offer,
    opened,
    order,
    part,
    refusal,
    snapshot,
    state,
    up,
)

GOAL = Goal(nodes=2, budget_usd=Decimal(1))
IDLE_GOAL = Goal(nodes=2, budget_usd=Decimal(1), idle=IdlePolicy(below=30, lasting=timedelta(minutes=15)))
IDLE = GpuUse(covered=timedelta(minutes=15), devices=(DeviceUse(node_id="a", index=0, use=5.0),))
RULES = Rules()
REPORT = "what takes longer belongs in `with run.phase(...)`"


LAUNCHED = tuple(
    UsageInterval(node_id=node_id, pool=POOL, launched_at=NOW - timedelta(hours=4), ended_at=NOW)
    for node_id in ("a", "b")
)
QUICK = replace(opened("a", "b"), reason=ExitReason.LOST, stepped_at=NOW - timedelta(hours=4) + timedelta(minutes=1))
SLOW = replace(QUICK, stepped_at=NOW - timedelta(hours=4) + timedelta(minutes=9))
LONG = replace(
    opened("a", "b", number=2), reason=ExitReason.LOST, first_step=1, stepped_at=NOW - timedelta(hours=1), last_step=9
)
"""It made again what was lost before it, and said so after three hours."""


def interruption(node_id, kind=InterruptionKind.NOTICE, attempt=1):
    return Interruption(node_id=node_id, kind=kind, attempt=attempt, noticed_at=NOW)


def running(*nodes, attempt=None, **changes):
    """A world in which attempt 1 is open on a and b."""
    known = changes.pop("interruptions", ())
    return snapshot(*nodes, state=state(attempts=(attempt or opened("a", "b"),), interruptions=known), **changes)


# Towards an attempt


def test_without_a_group_it_is_made_first():
    assert decide(GOAL, snapshot(exists=False, armed=None, group_size=0), RULES) == Provision()


@pytest.mark.parametrize(
    ("left_s", "of_group", "of_state", "ends"),
    [
        # A start takes half a changeover of 12 min at the least as long as none was seen: nothing is rented for less.
        (359, {"group_size": 0}, {}, True),
        (360, {"group_size": 0}, {}, False),
        (359, {"group_size": 0, "exists": False}, {}, True),
        # What was asked for in time is waited for; a group that just lost its machines asks anew by itself.
        (300, {"group_size": 2}, {"bare_at": NOW - timedelta(seconds=60)}, False),
        (300, {"group_size": 2}, {"bare_at": NOW}, True),
        # The shortest start that was seen counts, whatever else was lost with it; a longer one makes it no longer.
        (100, {"group_size": 0}, {"attempts": (QUICK, LONG), "nodes": LAUNCHED}, False),
        (50, {"group_size": 0}, {"attempts": (QUICK, LONG), "nodes": LAUNCHED}, True),
        (3600, {"group_size": 0}, {"attempts": (LONG,), "nodes": LAUNCHED}, False),
        # Where all that were seen took longer than half of a changeover, so does the next.
        (539, {"group_size": 0}, {"attempts": (SLOW, LONG), "nodes": LAUNCHED}, True),
        (540, {"group_size": 0}, {"attempts": (SLOW, LONG), "nodes": LAUNCHED}, False),
        # Hosts that the user has cost nothing more.
        (5, {"group_size": 0}, {"pool": replace(POOL, market=Market.OWNED)}, False),
    ],
)
def test_nothing_is_rented_for_less_time_than_a_start_takes(left_s, of_group, of_state, ends):
    goal = Goal(nodes=2, budget_usd=Decimal(10), deadline_at=NOW + timedelta(seconds=left_s))
    action = decide(goal, snapshot(**of_group, state=state(**of_state)), Rules())
    assert isinstance(action, Finish) is ends
    if ends:
        assert action.reason is ExitReason.DEADLINE
        least = {QUICK: 1, SLOW: 9}.get(of_state.get("attempts", (None,))[0], 6)
        assert action.message.endswith(
            f"left until the deadline, and a start takes {least} min at the least: no machine is rented for it"
        )


def test_machines_that_are_there_begin_however_near_the_deadline_is():
    goal = Goal(nodes=2, budget_usd=Decimal(10), deadline_at=NOW + timedelta(seconds=60))
    assert isinstance(decide(goal, snapshot(up("a"), up("b")), Rules()), OpenAttempt)


def test_the_shut_off_is_armed_before_the_level_is_set():
    assert decide(GOAL, snapshot(armed=None, group_size=0), RULES) == Arm(until=LATER)


def test_the_level_is_set_once_the_shut_off_is_read_back():
    assert decide(GOAL, snapshot(group_size=0), RULES) == Resize(size=2)


def test_a_budget_for_a_few_minutes_starts_machines_instead_of_arming_for_ever():
    armed = NOW + timedelta(minutes=9)
    later = {"armed": armed, "group_size": 0, "state": state(paid_until=armed)}
    assert decide(GOAL, snapshot(**later, payable_until=armed + timedelta(seconds=1)), RULES) == Resize(size=2)
    assert decide(GOAL, snapshot(**later, payable_until=LATER), RULES) == Arm(until=LATER)


def test_the_least_time_that_is_armed_is_not_armed_anew_for_what_arming_took():
    least = NOW + RULES.prepaid_rule.least
    armed = snapshot(group_size=0, armed=least - timedelta(seconds=2), payable_until=least)
    late = snapshot(group_size=0, armed=least - timedelta(seconds=16), payable_until=least)

    assert decide(GOAL, armed, RULES) == Resize(size=2)
    assert decide(GOAL, late, RULES) == Arm(until=least)


def test_nodes_that_run_are_prepared_and_pending_ones_are_waited_for():
    nodes = (up("a", readiness=Readiness.NO), up("b", readiness=Readiness.NO, state=NodeState.PENDING))

    assert decide(GOAL, snapshot(*nodes), RULES) == Prepare(node_ids=("a",))


def test_a_machine_whose_host_key_is_not_known_yet_is_not_spoken_to_and_is_replaced_after_ten_minutes():
    young = up("a", readiness=Readiness.NO, host_key=None, launched_at=NOW - timedelta(minutes=9))
    old = up("b", readiness=Readiness.NO, host_key=None, launched_at=NOW - timedelta(minutes=10))
    assert decide(GOAL, snapshot(young, up("b")), RULES) == Wait(why="bootstrap")
    assert decide(GOAL, snapshot(young, old), RULES) == Replace(node_ids=("b",))


def test_the_attempt_opens_when_enough_nodes_are_ready_and_told():
    assert decide(GOAL, snapshot(up("a"), up("b")), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))


def test_agents_are_told_before_an_attempt_opens():
    assert decide(GOAL, snapshot(up("a"), up("b", told=False)), RULES) == Tell(node_ids=("b",))


def test_up_is_done_when_the_machines_are_ready():
    assert decide(replace(GOAL, until=Until.READY), snapshot(up("a"), up("b")), RULES) == Done()


def test_members_that_stay_keep_their_order_so_that_rank_0_seldom_moves():
    first = opened("b", "a", reason=ExitReason.INTERRUPTED, last_step=5)
    world = snapshot(up("c"), up("b"), gone("a"), state=state(attempts=(first,)))

    assert decide(GOAL, world, RULES) == OpenAttempt(number=2, node_ids=("b", "c"))


def test_a_budget_that_cannot_pay_for_a_start_ends_the_job():
    action = decide(GOAL, snapshot(up("a"), up("b"), payable_until=None), RULES)

    assert isinstance(action, Finish)
    assert action.reason is ExitReason.BUDGET


def test_a_bootstrap_that_fails_once_costs_the_node_and_twice_the_job():
    nodes = (up("a", readiness=Readiness.FAILED), up("b"))

    assert decide(GOAL, snapshot(*nodes, failed_bootstraps=1), RULES) == Replace(node_ids=("a",))
    assert decide(GOAL, snapshot(*nodes, failed_bootstraps=2), RULES) == Finish(
        reason=ExitReason.UNPREPARED, message="no pip"
    )


def test_five_attempts_without_a_new_step_are_enough():
    lost = tuple(
        opened("a", "b", number=n, reason=ExitReason.LOST, last_step=7 if n == 1 else None) for n in range(1, 7)
    )

    assert fruitless(lost) == 5
    assert isinstance(decide(GOAL, snapshot(up("a"), up("b"), state=state(attempts=lost)), RULES), Finish)


def untold(number, *, minutes, reason=ExitReason.LOST, **changes):
    """An attempt of a script that tells no step, as long as that."""
    start = NOW - timedelta(hours=100 - 10 * number)
    attempt = opened("a", "b", number=number, reason=reason, **changes)
    return replace(attempt, started_at=start, ended_at=start + timedelta(minutes=minutes))


@pytest.mark.parametrize(
    ("attempts", "goal", "end"),
    [
        ([untold(n, minutes=300) for n in range(1, 10)], GOAL, None),
        ([untold(n, minutes=300, reason=ExitReason.INTERRUPTED) for n in range(1, 10)], GOAL, None),
        (
            [untold(n, minutes=11) for n in range(1, 6)],
            GOAL,
            "5 attempts in a row ended within 12 min, and the script tells no steps: what they made cannot be seen",
        ),
        ([untold(n, minutes=12 if n == 3 else 3) for n in range(1, 6)], GOAL, None),
        (
            [untold(n, minutes=300, reason=ExitReason.HUNG) for n in range(1, 6)],
            GOAL,
            "5 attempts in a row made no new step",
        ),
        (
            [untold(n, minutes=300, last_step=90 if n == 1 else None) for n in range(1, 7)],
            GOAL,
            "5 attempts in a row made no new step",
        ),
        (
            [untold(n, minutes=300) for n in range(1, 6)],
            replace(GOAL, uses_library=True),
            "5 attempts in a row made no new step",
        ),
        (
            [untold(n, minutes=300) for n in range(1, 6)],
            replace(GOAL, saves_alone=True),
            "5 attempts in a row saved nothing new",
        ),
    ],
)
def test_of_a_script_that_tells_nothing_only_short_attempts_show_that_no_other_is_worth_it(attempts, goal, end):
    action = decide(goal, snapshot(up("a"), up("b"), state=state(attempts=tuple(attempts))), RULES)

    if end is None:
        assert action == OpenAttempt(number=len(attempts) + 1, node_ids=("a", "b"))
    else:
        assert action == Finish(reason=ExitReason.LOST, message=end)


def test_what_ended_soon_is_short_however_quickly_machines_come():
    rules = replace(RULES, limits=replace(RULES.limits, changeover=timedelta(seconds=30)))
    attempts = tuple(untold(n, minutes=1.5) for n in range(1, 6))

    action = decide(GOAL, snapshot(up("a"), up("b"), state=state(attempts=attempts)), rules)

    assert isinstance(action, Finish)
    assert action.message.startswith("5 attempts in a row ended within 2 min, and")


def test_what_is_made_after_a_script_began_anew_is_not_fruitless():
    """Attempt 1 saved step 1000; the script began anew in attempt 2, and each later one goes on."""
    first = replace(opened("a"), reason=ExitReason.LOST, last_step=1000, saved_step=1000)
    anew = replace(opened("a", number=2), reason=ExitReason.LOST, last_step=150, saved_step=150, begun_anew=True)
    later = tuple(
        replace(opened("a", number=number), reason=ExitReason.LOST, last_step=150 * number, saved_step=150 * number)
        for number in (3, 4, 5)
    )
    assert fruitless((first, anew, *later)) == 0
    same = replace(later[-1], number=6)
    assert fruitless((first, anew, *later, same)) == 1
    soon = [replace(one, ended_at=one.started_at) for one in (first, anew, *later)]
    assert barren_in_a_row(state(attempts=tuple(soon)), RULES.limits) == 0


def test_attempts_that_commit_what_a_longer_one_had_lost_are_not_fruitless():
    steps = ((57, 40), (47, None), (None, None), (43, None), (50, 50), (55, None))
    lost = tuple(
        opened("a", "b", number=n, reason=ExitReason.LOST, last_step=last, saved_step=saved)
        for n, (last, saved) in enumerate(steps, 1)
    )

    assert fruitless(lost) == 1


def test_reopening_forgives_fruitless_attempts():
    lost = tuple(opened("a", "b", number=n, reason=ExitReason.LOST) for n in range(1, 6))
    world = snapshot(up("a"), up("b"), state=state(attempts=lost, reopened_after=5))

    assert decide(GOAL, world, RULES) == OpenAttempt(number=6, node_ids=("a", "b"))


def test_a_notice_before_any_attempt_is_written_down_and_another_machine_is_asked_for():
    world = snapshot(up("a"), up("b", notice=True))
    noted = replace(world, state=state(interruptions=(interruption("b", attempt=None),)))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("b", attempt=None),))
    assert decide(GOAL, noted, RULES) == Relieve(node_id="b")


# During an attempt


def test_members_that_have_not_heard_are_told():
    assert decide(GOAL, running(up("a", part(1)), up("b", told=False)), RULES) == Tell(node_ids=("b",))


def test_a_running_attempt_is_left_alone():
    assert decide(GOAL, running(up("a", part(1, step=3)), up("b", part(1))), RULES) == Wait(why="running")


def test_a_notice_is_written_down_before_anything_is_done():
    world = running(up("a", part(1)), up("b", part(1), notice=True))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("b"),))


def test_with_a_notice_another_machine_is_asked_for_at_once():
    world = running(up("a", part(1)), up("b", part(1), notice=True), interruptions=(interruption("b"),))

    assert decide(GOAL, world, RULES) == Relieve(node_id="b")


def test_a_machine_is_asked_for_once_for_each_that_is_taken():
    world = running(up("a", part(1)), up("b", part(1), notice=True, relieved=True), interruptions=(interruption("b"),))

    assert decide(GOAL, world, RULES) == Wait(why="running")


def test_a_machine_that_was_relieved_and_that_nobody_takes_is_ended():
    """Its notice was its own word, whatever time it names."""
    heard = replace(interruption("b"), noticed_at=NOW - timedelta(seconds=179))
    world = running(up("a", part(1)), up("b", part(1), notice=True, relieved=True), interruptions=(heard,))
    later = replace(world, now=NOW + timedelta(seconds=1))

    assert decide(GOAL, world, RULES) == Wait(why="running")
    assert decide(GOAL, later, RULES) == Replace(node_ids=("b",))


def naming_the_year_3000(one):
    """What runs on a machine writes its notice itself, and names any time."""
    return replace(one, status=replace(one.status, notice=Notice(action="terminate", at=NOW.replace(year=3000))))


def test_a_machine_beside_the_attempt_has_its_notice_written_down_before_another_is_asked_for():
    liar = naming_the_year_3000(up("c", notice=True))
    world = running(up("a", part(1)), up("b", part(1)), liar, up("d"))
    noted = replace(world, state=replace(world.state, interruptions=(interruption("c", attempt=None),)))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("c", attempt=None),))
    assert decide(GOAL, noted, RULES) == Relieve(node_id="c")


UNHEARD = "did not come home: whatever the script had written there by then went with the machines of attempt 1"
"""Of outputs that were never seen: they may never have been."""


@pytest.mark.parametrize(
    ("reason", "missing"),
    [
        (ExitReason.INTERRUPTED, [f"{UNHEARD}, which was to be followed by another one"]),
        (ExitReason.STOPPED, []),  # its outputs were seen to when it was closed, and it may have gone on since
    ],
)
def test_a_job_that_ends_between_two_attempts_says_that_its_outputs_stayed(reason, missing):
    ended = transitions.left_behind(state(attempts=(replace(opened("a"), reason=reason),)), ("results/",))

    assert [one.why for one in ended.missing_outputs] == missing
    assert transitions.left_behind(state(attempts=()), ("results/",)).missing_outputs == ()


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (opened("a"), f"{UNHEARD}, which was ended without a last save"),
        (replace(opened("a"), reason=ExitReason.LOST), UNHEARD),  # they went, whatever was to follow
    ],
)
def test_a_job_that_is_given_up_as_it_stands_says_that_its_outputs_stayed(attempt, why):
    ended = transitions.abandon(state(attempts=(attempt,)), NOW, ("results/",))

    assert [(one.path, one.why) for one in ended.missing_outputs] == [("results/", why)]


def test_a_machine_that_we_end_ourselves_is_no_interruption_while_the_cloud_still_lists_it():
    ours = up("b", relieved=True, end_cause=EndCause.CHOICE, readiness=Readiness.FAILED)
    assert not isinstance(decide(GOAL, snapshot(up("a"), ours), RULES), NoteInterruptions)
    taken = up("b", relieved=True)
    assert isinstance(decide(GOAL, snapshot(up("a"), taken), RULES), NoteInterruptions)


def test_only_what_had_a_part_in_an_attempt_is_back_with_the_next_one():
    attempts = (opened("a", "b", reason=ExitReason.INTERRUPTED), replace(opened("a", "d"), number=2))
    noted = (interruption("b"), interruption("c", attempt=None))
    nodes = [up(i, part(2, step=5, first_step=4)) for i in "ad"]
    recorded = transitions.record(snapshot(*nodes, state=state(attempts=attempts, interruptions=noted)))

    assert [i.resumed_at for i in recorded.interruptions] == [NOW, None]


def test_story_and_report_tell_a_notice_beside_the_attempt_from_one_in_it():
    noted = (interruption("b"), interruption("c", attempt=None))
    world = running(up("a", part(1, step=3)), up("b", part(1)), up("c"), interruptions=noted)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    told = report(world.state, spend, (), world.group, None)

    assert tell_story(NoteInterruptions(interruptions=noted), world) == (
        "b has a notice: saving; c has a notice: it has no part in an attempt"
    )
    assert [one["attempt"] for one in report_json(told)["interruptions"]] == [1, None]
    rows = [line.split() for line in report_text(told).splitlines() if " notice " in line]
    assert rows == [["b", "notice", "1", "-"], ["c", "notice", "none", "-"]]


def test_a_notice_beside_the_attempt_is_no_reason_to_end_it():
    attempt = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW, ordered=Stop.SAVE)
    left = (up("a", part(1, Outcome.FAILED)), up("b", part(1, Outcome.FAILED)), up("c", notice=True, relieved=True))
    failed = running(*left, interruptions=(interruption("c", attempt=None),), failed_for=timedelta(minutes=2))
    stopped = running(*left, attempt=attempt, interruptions=(interruption("c", attempt=None),))

    assert decide(GOAL, failed, RULES) == CloseAttempt(reason=ExitReason.USER_ERROR)
    assert decide(GOAL, stopped, RULES) == CloseAttempt(reason=ExitReason.STOPPED)


@pytest.mark.parametrize("says", ["the year 3000", "nothing any more", "nothing ever"])
def test_a_machine_that_was_relieved_outstays_whatever_it_says(says):
    """Counted from when we heard of it, and where nobody wrote that down, from now."""
    liar = naming_the_year_3000(up("c", notice=True, relieved=True))
    mute = {"the year 3000": liar, "nothing any more": replace(liar, status=None, readiness=Readiness.PREPARING)}
    world = running(up("a", part(1)), up("b", part(1)), mute.get(says, up("c", relieved=True)))
    noted = replace(world, state=replace(world.state, interruptions=(interruption("c", attempt=None),)))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("c", attempt=None),))
    assert not isinstance(decide(GOAL, replace(noted, now=NOW + timedelta(seconds=179)), RULES), Replace)
    assert decide(GOAL, replace(noted, now=NOW + timedelta(seconds=180)), RULES) == Replace(node_ids=("c",))


@pytest.mark.parametrize("relieved", [True, False])
def test_money_is_not_kept_for_longer_than_a_cloud_warns_ahead_whatever_a_machine_says(relieved):
    liar = naming_the_year_3000(up("a", notice=True, relieved=relieved))
    more = () if relieved else (up("c"),)
    world = snapshot(liar, up("b"), *more, payable_until=None, payable_with_another=None)
    noted = replace(world, state=state(interruptions=(interruption("a", attempt=None),)))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("a", attempt=None),))
    assert decide(GOAL, replace(noted, now=NOW + timedelta(seconds=179)), RULES) == Wait(
        why="waiting until machines have left"
    )
    assert decide(GOAL, replace(noted, now=NOW + timedelta(seconds=181)), RULES) == Finish(reason=ExitReason.BUDGET)


def test_no_more_machines_are_relieved_at_once_than_the_job_has():
    noticed = [up(name, part(1), notice=True) for name in "ab"]
    relieved = [up(name, notice=True, relieved=True) for name in "cd"]
    known = tuple(interruption(name) for name in "abcd")

    assert decide(GOAL, running(*noticed, *relieved[:1], interruptions=known), RULES) == Relieve(node_id="a")
    assert decide(GOAL, running(*noticed, *relieved, interruptions=known), RULES) == Wait(why="running")


def test_no_machine_is_asked_for_so_near_to_the_shut_off_that_the_cloud_starts_none():
    world = running(up("a", part(1)), up("b", part(1), notice=True), interruptions=(interruption("b"),))
    near = replace(RULES, prepaid_rule=replace(RULES.prepaid_rule, ahead=LATER - NOW + timedelta(seconds=1)))

    assert decide(GOAL, world, near) == Wait(why="running")


def test_peers_of_a_frozen_machine_are_ended_before_it_is_gone():
    known = (interruption("b", InterruptionKind.FROZEN),)
    world = running(up("a", part(1)), up("b", part(1), silent=9), interruptions=known)

    assert decide(GOAL, world, RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)


def test_an_attempt_that_the_user_ended_is_stopped_not_interrupted():
    attempt = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW, ordered=Stop.SAVE)
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT)))
    later = LATER + timedelta(minutes=9)

    assert decide(GOAL, running(*left, attempt=attempt, payable_until=later), RULES) == CloseAttempt(
        reason=ExitReason.STOPPED
    )


def test_the_shut_off_comes_closer_before_one_machine_more_is_asked_for():
    sooner = NOW + timedelta(minutes=20)
    world = running(
        up("a", part(1)), up("b", part(1), notice=True), interruptions=(interruption("b"),), payable_with_another=sooner
    )

    assert decide(GOAL, world, RULES) == Arm(until=sooner)


def test_a_machine_that_could_not_be_reached_to_be_prepared_is_tried_again_while_an_attempt_needs_it():
    world = running(up("a", part(1)), up("b", readiness=Readiness.NO, silent=30))
    assert decide(GOAL, world, RULES) == Prepare(node_ids=("b",))


@pytest.mark.parametrize(("relieved", "then"), [(False, Relieve(node_id="b")), (True, Wait(why="bootstrap"))])
def test_while_a_machine_is_to_come_in_place_of_another_the_shut_off_is_not_raised_for_those_of_now(relieved, then):
    """Raised for two and lowered for three in turns, it was set as fast as the cloud answered."""
    sooner = NOW + timedelta(minutes=14)
    world = snapshot(
        up("a"),
        up("b", notice=True, relieved=relieved),
        state=state(interruptions=(interruption("b"),)),
        armed=sooner,
        payable_until=sooner if relieved else NOW + timedelta(minutes=22),  # one that is relieved is counted beside
        payable_with_another=NOW + timedelta(minutes=9) if relieved else sooner,
    )

    assert decide(GOAL, world, RULES) == then


def test_a_machine_that_the_budget_cannot_pay_for_is_not_asked_for_early():
    world = running(
        up("a", part(1)), up("b", part(1), notice=True), interruptions=(interruption("b"),), payable_with_another=None
    )

    assert decide(GOAL, world, RULES) == Wait(why="running")


def test_all_ranks_saved_and_left_after_a_notice_is_an_interruption():
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT), notice=True))

    assert decide(GOAL, running(*left, interruptions=(interruption("b"),)), RULES) == CloseAttempt(
        reason=ExitReason.INTERRUPTED
    )


UNHEARD_NOTICE = CheckpointRef(step=70, sha256="0" * 64, why=Why.NOTICE)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, InterruptionKind.NOTICE),
        (
            {"checkpoint": replace(UNHEARD_NOTICE, why=Why.DUE)},
            InterruptionKind.LOST,
        ),  # saved before it went, by the clock
        ({"checkpoint": replace(UNHEARD_NOTICE, step=40)}, InterruptionKind.LOST),  # another attempt's
        ({"owner": NOW - timedelta(minutes=1)}, InterruptionKind.LOST),  # it would have been heard
        ({"nodes": (up("a", part(2)), gone("b"))}, InterruptionKind.LOST),  # only recommended to leave: others work on
        ({"nodes": (up("a", part(2, Outcome.LEFT)),)}, InterruptionKind.NOTICE),  # the cloud lists it no longer
    ],
)
def test_a_notice_that_nobody_heard_is_known_by_what_was_saved_for_it(changes, kind):
    owner = Owner(id="o", host="vm", pid=1, started="1", since=changes.get("owner", NOW + timedelta(seconds=1)))
    nodes = changes.get("nodes", (up("a", part(2, Outcome.LEFT)), gone("b")))
    before = opened("a", "b", reason=ExitReason.INTERRUPTED, saved_step=40)
    known = state(attempts=(before, opened("a", "b", number=2)), owner=owner)
    world = snapshot(*nodes, state=known, checkpoint=changes.get("checkpoint", UNHEARD_NOTICE))
    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("b", kind, attempt=2),))


def test_a_machine_gone_without_notice_ends_the_others_at_once():
    world = running(up("a", part(1)), gone("b"))
    noted = running(up("a", part(1)), gone("b"), interruptions=(interruption("b", InterruptionKind.LOST),))

    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(interruption("b", InterruptionKind.LOST),))
    assert decide(GOAL, noted, RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)


def test_an_attempt_with_a_lost_machine_is_lost_even_when_the_survivors_script_failed():
    world = running(
        up("a", part(1, Outcome.FAILED)), gone("b"), interruptions=(interruption("b", InterruptionKind.LOST),)
    )

    assert decide(GOAL, world, RULES) == CloseAttempt(reason=ExitReason.LOST)


def test_a_silent_machine_is_believed_lost_only_when_another_one_answers_and_a_witness_agrees():
    limit = RULES.limits.silent.total_seconds()
    frozen = running(up("a", part(1)), up("b", part(1), silent=limit, peer_report=PeerReport.DEAD))
    offline = running(up("a", part(1), silent=limit), up("b", part(1), silent=limit))

    assert decide(GOAL, frozen, RULES) == NoteInterruptions(interruptions=(interruption("b", InterruptionKind.FROZEN),))
    assert decide(GOAL, offline, RULES) == Wait(why="no machine answers")


def test_prepaid_time_is_not_renewed_for_machines_that_would_not_hear_of_it():
    near = NOW + timedelta(seconds=50)
    silent = (up("a", part(1), silent=9), up("b", part(1), silent=9))
    one_hears = (up("a", part(1), silent=0.3), up("b", part(1), silent=9))
    less = NOW + timedelta(seconds=30)

    assert decide(GOAL, running(*silent, armed=near), RULES) == Wait(why="no machine answers")
    assert decide(GOAL, snapshot(up("a", silent=9), up("b", silent=9), armed=near), RULES) == Wait(
        why="no machine answers"
    )
    assert decide(GOAL, running(*one_hears, armed=near), RULES) == Arm(until=LATER)
    assert decide(GOAL, running(*silent, armed=near, payable_until=less), RULES) == Arm(until=less)


def test_a_job_that_ends_for_good_gets_no_more_time_than_an_end_takes():
    def renewed(armed_s, **changes):
        nodes = (up("a", part(1)), up("b", part(1)))
        world = running(*nodes, armed=NOW + timedelta(seconds=armed_s))
        attempt = replace(world.state.attempts[-1], **changes)
        world = replace(world, state=replace(world.state, attempts=(attempt,)))
        found = renew(GOAL, world, RULES.prepaid_rule, RULES.limits)
        return None if found is None else (found.until - NOW).total_seconds()

    stopped = {"ending_reason": ExitReason.STOPPED}
    assert renewed(345) == (LATER - NOW).total_seconds()
    assert renewed(345, ending_reason=ExitReason.RESIZED) == renewed(345)  # another attempt follows
    assert renewed(345, **stopped) is None
    assert renewed(100, **stopped) == 240


def test_machines_that_never_answered_again_are_asked_for_anew_when_their_time_is_over():
    over = NOW - timedelta(seconds=1)
    ended = (gone("a", EndCause.SCHEDULE), gone("b", EndCause.SCHEDULE))

    assert decide(GOAL, running(*ended, armed=over, group_size=0), RULES) == CloseAttempt(reason=ExitReason.LOST)
    assert decide(GOAL, snapshot(*ended, armed=over, group_size=0), RULES) == Arm(until=LATER)
    assert decide(GOAL, snapshot(*ended, armed=LATER, group_size=0), RULES) == Resize(size=2)


def test_a_frozen_machine_is_ended_by_name():
    known = (interruption("b", InterruptionKind.FROZEN),)
    attempt = opened("a", "b", ending_reason=ExitReason.LOST, ordered=Stop.KILL)
    world = running(up("a", part(1, Outcome.KILLED)), up("b", part(1), silent=9), attempt=attempt, interruptions=known)

    assert decide(GOAL, world, RULES) == Replace(node_ids=("b",))


def test_no_machine_is_asked_for_where_the_job_ends_with_its_attempt():
    frozen = (interruption("b", InterruptionKind.FROZEN),)
    attempt = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW, ordered=Stop.KILL)
    saving = running(up("a", part(1)), up("b", part(1), silent=9), attempt=attempt, interruptions=frozen)
    saved = running(up("a", part(1, Outcome.KILLED)), up("b", part(1), silent=9), attempt=attempt, interruptions=frozen)
    asked = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW, ordered=Stop.SAVE)
    noticed = running(
        up("a", part(1)), up("b", part(1), notice=True), attempt=asked, interruptions=(interruption("b"),)
    )
    noticed = replace(noticed, payable_with_another=LATER)

    assert decide(GOAL, saving, RULES) == Wait(why="running")
    assert decide(GOAL, saved, RULES) == CloseAttempt(reason=ExitReason.STOPPED)
    assert not isinstance(decide(GOAL, noticed, RULES), Relieve | Replace)


def test_a_script_that_raises_is_believed_after_the_cloud_was_given_a_moment():
    failed = running(up("a", part(1, Outcome.FAILED)), up("b", part(1, Outcome.FAILED)))

    assert isinstance(decide(GOAL, replace(failed, failed_for=timedelta(0)), RULES), Wait)
    assert decide(GOAL, replace(failed, failed_for=RULES.limits.settle), RULES) == CloseAttempt(
        reason=ExitReason.USER_ERROR
    )


def test_peers_of_a_script_that_raised_are_ended():
    world = running(up("a", part(1)), up("b", part(1, Outcome.FAILED)), failed_for=RULES.limits.settle)

    assert decide(GOAL, world, RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.USER_ERROR)


def test_success_needs_every_member():
    done = (up("a", part(1, Outcome.DONE)), up("b", part(1, Outcome.DONE)))

    assert decide(GOAL, running(*done), RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)
    assert decide(GOAL, running(done[0], up("b", part(1))), RULES) == Wait(why="running")


def test_success_stays_success_whatever_was_ordered_meanwhile():
    attempt = opened("a", "b", ending_reason=ExitReason.STOPPED, ordered=Stop.SAVE)
    done = (up("a", part(1, Outcome.DONE)), up("b", part(1, Outcome.DONE)))

    assert decide(GOAL, running(*done, attempt=attempt), RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)


def test_the_user_is_obeyed_by_saving_first_and_killing_after_the_limit():
    nodes = (up("a", part(1)), up("b", part(1)))
    slow = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW - RULES.limits.save, ordered=Stop.SAVE)

    assert decide(GOAL, running(*nodes, wanted_end=ExitReason.STOPPED), RULES) == EndAttempt(
        how=Stop.SAVE, reason=ExitReason.STOPPED
    )
    assert decide(GOAL, running(*nodes, attempt=slow, wanted_end=ExitReason.STOPPED), RULES) == EndAttempt(
        how=Stop.KILL, reason=ExitReason.STOPPED
    )


def test_idle_gpus_end_the_job_by_saving_first_and_killing_after_the_limit():
    nodes = (up("a", part(1)), up("b", part(1)))
    why = (
        "the GPUs were used 5 % on average over 15 min of training, less than the 30 % of `idle:`; "
        "no cause stands out: `gpucloud train --profile` shows where the time goes"
    )
    slow = opened("a", "b", ending_reason=ExitReason.IDLE, ending_at=NOW - RULES.limits.save, ordered=Stop.SAVE)
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT)))

    assert decide(IDLE_GOAL, running(*nodes, use=IDLE), RULES) == EndAttempt(
        how=Stop.SAVE, reason=ExitReason.IDLE, message=why
    )
    assert decide(IDLE_GOAL, running(*nodes, attempt=slow), RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.IDLE)
    assert decide(IDLE_GOAL, running(*left, attempt=slow), RULES) == CloseAttempt(reason=ExitReason.IDLE)
    assert decide(GOAL, running(*nodes, use=IDLE), RULES) == Wait(why="running")


def test_the_message_of_an_idle_end_is_the_jobs_and_the_job_may_go_on_later():
    ordered = transitions.order_end(
        state(attempts=(opened("a"),)), EndAttempt(how=Stop.SAVE, reason=ExitReason.IDLE, message="why"), NOW
    )
    ended = transitions.close_attempt(ordered, CloseAttempt(reason=ExitReason.IDLE), NOW)
    assert (ended.status, ended.exit_reason, ended.exit_code, ended.message) == (
        JobStatus.STOPPED,
        ExitReason.IDLE,
        16,
        "why",
    )
    taken = transitions.close_attempt(ordered, CloseAttempt(reason=ExitReason.INTERRUPTED), NOW)
    assert (taken.status, taken.message) == (JobStatus.WAITING, None)


@pytest.mark.parametrize(
    ("phase", "age_s", "hung"),
    [("train", 61.0, True), ("train", 59.0, False), ("save", 999.0, False), ("evaluate", 999.0, False)],
)
def test_no_step_for_long_is_a_hang_only_while_training(phase, age_s, hung):
    world = running(up("a", part(1, step=9, phase=phase, age_s=age_s)), up("b", part(1)))

    message = f"no step for 61 s (median 0.1 s; {REPORT}); stacks are in the log"
    wanted = EndAttempt(how=Stop.ABORT, reason=ExitReason.HUNG, message=message) if hung else Wait(why="running")
    assert decide(GOAL, world, RULES) == wanted


def test_a_stop_that_no_machine_hears_is_carried_out_by_the_cloud_after_twice_the_time_for_a_save():
    ordered = {"ending_reason": ExitReason.STOPPED, "ordered": Stop.KILL}
    deaf = [up("a", part(1, step=5), silent=99), up("b", part(1, step=5), silent=99)]
    early = opened("a", "b", **ordered, ending_at=NOW - timedelta(seconds=119))
    late = opened("a", "b", **ordered, ending_at=NOW - timedelta(seconds=120))
    stop = {"wanted_end": ExitReason.STOPPED}
    assert not isinstance(decide(GOAL, running(*deaf, attempt=early, **stop), RULES), CloseAttempt)
    assert decide(GOAL, running(*deaf, attempt=late, **stop), RULES) == CloseAttempt(reason=ExitReason.STOPPED)


@pytest.mark.parametrize(
    ("stuck", "home", "wanted"),
    [
        (up("b", part(1, step=5)), Homecoming.NO, BringHome()),
        (up("b", part(1, step=5), silent=99), Homecoming.NO, BringHome()),
        (up("b", part(1, step=5)), Homecoming.ON_THE_WAY, Wait(why="bringing the outputs home")),
        (up("b", part(1, step=5)), Homecoming.DONE, CloseAttempt(reason=ExitReason.STOPPED)),
    ],
    ids=["answers", "silent", "on the way", "home"],
)
def test_a_rank_that_cannot_end_costs_nobody_the_outputs_of_the_first(stuck, home, wanted):
    ordered = {"ending_reason": ExitReason.STOPPED, "ordered": Stop.KILL}
    late = opened("a", "b", **ordered, ending_at=NOW - timedelta(seconds=120))
    first = up("a", part(1, Outcome.DONE))
    world = running(first, stuck, attempt=late, wanted_end=ExitReason.STOPPED, homecoming=home)
    assert decide(GOAL, world, RULES) == wanted


def test_a_hang_is_not_armed_before_the_first_steps():
    world = running(up("a", part(1, step=0, step_seconds=None, age_s=999.0)), up("b", part(1)))

    assert decide(GOAL, world, RULES) == Wait(why="running")


def test_a_machine_that_the_shut_off_ended_was_not_taken_by_the_cloud():
    world = running(up("a", part(1)), gone("b", EndCause.SCHEDULE))

    assert decide(GOAL, world, RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)


def test_ranks_that_left_by_themselves_at_the_wall_ended_by_budget():
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT)))

    near = NOW + timedelta(seconds=30)
    ending = state(attempts=(opened("a", "b"),), paid_until=near)
    at_the_wall = snapshot(*left, state=ending, armed=near, payable_until=near)
    raised = replace(at_the_wall, payable_until=near + timedelta(minutes=9))

    assert decide(GOAL, at_the_wall, RULES) == CloseAttempt(reason=ExitReason.BUDGET)
    assert decide(GOAL, raised, RULES) == CloseAttempt(reason=ExitReason.INTERRUPTED)


def test_paid_time_that_was_prolonged_just_after_the_ranks_were_asked_to_leave_is_used():
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT)))

    assert decide(GOAL, running(*left, payable_until=LATER), RULES) == CloseAttempt(reason=ExitReason.INTERRUPTED)


def test_the_prepaid_time_is_renewed_when_half_of_it_is_gone():
    nodes = (up("a", part(1)), up("b", part(1)))
    near, far = NOW + timedelta(minutes=14), NOW + timedelta(minutes=16)

    assert decide(GOAL, running(*nodes, armed=near), RULES) == Arm(until=LATER)
    assert decide(GOAL, running(*nodes, armed=far), RULES) == Wait(why="running")


def test_the_prepaid_time_is_cut_when_it_promises_more_than_the_budget():
    world = running(up("a", part(1)), up("b", part(1)), payable_until=NOW + timedelta(minutes=20))

    assert decide(GOAL, world, RULES) == Arm(until=NOW + timedelta(minutes=20))


def test_of_a_script_that_saves_by_itself_the_first_save_is_the_moment_for_a_drill():
    said = {"phase": "script", "total_steps": None, "step_seconds": None, "first_step": 501}
    goal = replace(GOAL, drill=True, saves_alone=True)

    none = running(up("a", part(1, step=500, committed_step=500, **said)), up("b", part(1)))
    assert decide(goal, none, RULES) == Wait(why="running")
    saved = running(up("a", part(1, step=600, committed_step=600, **said)), up("b", part(1)))
    assert decide(goal, saved, RULES) == Drill(node_id="b")


def test_scripts_that_save_by_themselves_are_all_asked_when_one_machine_has_a_notice():
    goal = replace(GOAL, saves_alone=True)
    nodes = (up("a", part(1)), up("b", part(1), notice=True))
    asked = opened("a", "b", ending_reason=ExitReason.INTERRUPTED, ending_at=NOW, ordered=Stop.SAVE)

    noticed = running(*nodes, interruptions=(interruption("b"),))
    assert decide(goal, noticed, RULES) == EndAttempt(how=Stop.SAVE, reason=ExitReason.INTERRUPTED)
    again = running(*nodes, attempt=asked, interruptions=(interruption("b"),))
    assert decide(goal, again, RULES) == Relieve(node_id="b")
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT), notice=True))
    over = running(*left, attempt=asked, interruptions=(interruption("b"),))
    assert decide(goal, over, RULES) == CloseAttempt(reason=ExitReason.INTERRUPTED)


def test_a_script_that_tells_no_step_is_drilled_after_a_while_all_the_same():
    goal = replace(GOAL, drill=True)
    nodes = (up("a", part()), up("b", part()))
    early = replace(opened("a", "b"), started_at=NOW - timedelta(seconds=29))
    assert decide(goal, running(*nodes, attempt=early), RULES) == Wait(why="running")
    late = replace(early, started_at=NOW - timedelta(seconds=30))
    assert decide(goal, running(*nodes, attempt=late), RULES) == Drill(node_id="b")


def test_a_drill_waits_for_the_first_step_of_a_script_that_will_tell_it_and_no_longer_than_ten_minutes():
    goal = replace(GOAL, drill=True, uses_library=True)
    nodes = (up("a", part()), up("b", part()))

    def after(seconds):
        began = replace(opened("a", "b"), started_at=NOW - timedelta(seconds=seconds))
        return decide(goal, running(*nodes, attempt=began), RULES)

    waits = Wait(why="the drill waits for the script's first step, 10 min at the most")
    assert [after(29), after(30), after(599)] == [Wait(why="running"), waits, waits]
    assert after(600) == Drill(node_id="b")


KEPT = "the newest checkpoint is that of step"


@pytest.mark.parametrize(
    ("of_script", "step", "saved", "said"),
    [
        ({}, 49, 40, f"at step 49 of 100, without run.done(): {KEPT} 40"),
        ({}, 49, 49, f"at step 49 of 100, without run.done(): {KEPT} 49"),
        ({}, 100, 90, f"at step 100 of 100, without run.done(): {KEPT} 90"),
        ({"total_steps": None}, 49, None, "at step 49, without run.done(): nothing is saved"),
        ({}, 100, 100, None),  # nothing is lost
        ({"phase": DONE}, 49, 40, None),  # it meant to
        ({"phase": OUTPUT}, 49, None, None),  # it knows nothing of gpucloud.resume
        ({"phase": UNTOLD}, 49, 40, None),
    ],
)
def test_that_a_script_of_gpucloud_resume_ended_before_its_end_is_said(of_script, step, saved, said):
    done = (up("a", part(1, Outcome.DONE, step, **of_script)), up("b", part(1, Outcome.DONE)))
    ref = CheckpointRef(step=saved, sha256="a" * 64) if saved is not None else None
    world = running(*done, attempt=replace(opened("a", "b"), first_step=1, last_step=step), checkpoint=ref)
    message = f"its script ended with 0 {said}" if said is not None else None
    closed = decide(GOAL, world, RULES)
    assert closed == CloseAttempt(reason=ExitReason.SUCCEEDED, message=message)
    assert transitions.close_attempt(world.state, closed, NOW).message == message
    told = tell_story(closed, world)
    assert told.endswith(f"; {message}" if message else ("succeeded", f"checkpoint at step {saved}")[saved is not None])


NO_ROOM = "there is no memory for it: 3 KiB wanted"


def test_the_message_of_an_end_is_that_of_the_reason_that_stands():
    def said(*orders):
        now = state(attempts=(opened("a"),))
        for reason, message in orders:
            now = transitions.order_end(now, EndAttempt(how=Stop.SAVE, reason=reason, message=message), NOW)
        return now.attempts[-1].ending_reason, now.message

    more, stop, idle, hung = ExitReason.RESIZED, ExitReason.STOPPED, ExitReason.IDLE, ExitReason.HUNG
    assert said((more, "1 more machine is ready"), (stop, None)) == (stop, None)
    assert said((more, "1 more machine is ready"), (idle, "unused")) == (idle, "unused")
    assert said((idle, "unused"), (idle, None)) == (idle, "unused")
    assert said((stop, None), (hung, "no step")) == (stop, None)
    assert said((idle, "unused"), (stop, None)) == (idle, "unused")


@pytest.mark.parametrize("saved", [2, None])
@pytest.mark.parametrize("goes", [False, True])
def test_a_run_that_is_done_without_its_last_save_tells_which_step_is_saved_and_why(saved, goes):
    ref = CheckpointRef(step=saved, sha256="a" * 64) if saved is not None else None
    done = up("a", part(1, Outcome.DONE, 6, total_steps=6, phase=DONE, unsaved=NO_ROOM))
    attempt = replace(opened("a"), first_step=1, last_step=5, counts=Counts.STEPS)
    seen = transitions.since(transitions.record(running(done, attempt=attempt, checkpoint=ref)), running(done), 1)
    # Its machine may go before its end is written down.
    world = snapshot(*(() if goes else (done,)), state=seen, checkpoint=ref)
    closed = decide(replace(GOAL, nodes=1), world, RULES)
    kept = f"the newest checkpoint is that of step {saved}" if saved else "nothing is saved"
    assert closed.message == f"its last step, 6, is not saved, as {NO_ROOM}; {kept}"
    assert tell_story(closed, world).endswith(
        f": succeeded{', checkpoint at step 2' if saved else ''}; {closed.message}"
    )
    over = transitions.close_attempt(seen, closed, NOW)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    told = report(over, spend, (), world.group, None)
    as_json = report_json(told)
    assert (as_json["status"], as_json["message"], as_json["last_step"]) == ("succeeded", closed.message, saved)
    assert as_json["attempts"][0]["kept_to_step"] == (saved or 0)
    assert f"1–6, {'kept to 2' if saved else 'none kept'}" in report_text(told)
    assert closed.message in report_text(told)


@pytest.mark.parametrize(
    ("outcome", "reason", "is_outdated", "said"),
    [
        (
            Outcome.DONE,
            ExitReason.SUCCEEDED,
            True,
            "attempt 1 ran as it was started: what the last start changed has not run",
        ),
        (Outcome.DONE, ExitReason.SUCCEEDED, False, None),
        (
            Outcome.FAILED,
            ExitReason.USER_ERROR,
            True,
            "ValueError: x; attempt 1 ran as it was started: what the last start changed has not run",
        ),
        (Outcome.LEFT, ExitReason.INTERRUPTED, True, None),  # the next attempt runs it
    ],
)
def test_an_end_by_a_script_of_before_the_last_start_says_so(outcome, reason, is_outdated, said):
    nodes = (up("a", part(1, outcome, 40)), up("b", part(1, outcome)))
    attempt = replace(opened("a", "b"), first_step=1, last_step=40, outdated=is_outdated)
    world = running(*nodes, attempt=attempt)
    over = transitions.close_attempt(world.state, CloseAttempt(reason=reason), NOW, failure="ValueError: x")
    told = "ValueError: x" if reason is ExitReason.USER_ERROR else None
    assert over.message == (said or told)
    assert ("has not run" in tell_story(CloseAttempt(reason=reason), world)) == (said is not None)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    as_json = report_json(report(over, spend, (), world.group, None))
    assert (as_json["attempts"][0]["outdated"], as_json["message"]) == (is_outdated, over.message)


LOST = f"its last checkpoint is not saved: the store is full; {KEPT} 40"


@pytest.mark.parametrize(
    ("outcomes", "reason", "said"),
    [
        ((Outcome.DONE, Outcome.DONE), ExitReason.SUCCEEDED, LOST),
        ((Outcome.FAILED, Outcome.DONE), ExitReason.USER_ERROR, LOST),
        ((Outcome.DONE, Outcome.FAILED), ExitReason.USER_ERROR, None),  # its own exception says why
        ((Outcome.BARRED, Outcome.DONE), ExitReason.LOST, LOST),  # another attempt may save it
    ],
)
def test_that_a_directory_s_last_checkpoint_is_not_saved_is_the_message_of_its_end(outcomes, reason, said):
    told = part(1, outcomes[0], 40, phase=UNTOLD, unsaved="the store is full")
    nodes, ref = (up("a", told), up("b", part(1, outcomes[1]))), CheckpointRef(step=40, sha256="a" * 64)
    world = running(*nodes, attempt=opened("a", "b"), checkpoint=ref, failed_for=timedelta(9))
    closed = decide(replace(GOAL, saves_alone=True), world, RULES)
    assert closed == CloseAttempt(reason=reason, message=said)


def ended_unsaved(number, saved, **changes):
    ends = {"reason": ExitReason.LOST, "unsaved": "its last checkpoint is not saved: away", "saved_step": saved}
    return replace(opened("a", number=number), ended_at=NOW - timedelta(minutes=1), **{**ends, **changes})


@pytest.mark.parametrize("saves_alone", [True, False])
@pytest.mark.parametrize(
    ("before", "saved", "reason"),
    [
        ((), 40, ExitReason.LOST),
        ((ended_unsaved(1, 30),), 40, ExitReason.LOST),  # the store has taken one since
        ((ended_unsaved(1, 40),), 40, ExitReason.USER_ERROR),
        ((ended_unsaved(1, None),), None, ExitReason.USER_ERROR),
        ((ended_unsaved(1, 40), ended_unsaved(2, 40, unsaved=None)), 40, ExitReason.USER_ERROR),  # that was interrupted
        ((ended_unsaved(1, 40, unsaved=None),), 40, ExitReason.LOST),
        (tuple(ended_unsaved(number, 9 * number) for number in range(1, 5)), 40, ExitReason.USER_ERROR),  # each anew
    ],
)
def test_a_last_save_that_its_store_refuses_has_the_training_paid_once_more_and_no_oftener(
    before, saved, reason, saves_alone
):
    ref = CheckpointRef(step=saved, sha256="a" * 64) if saved is not None else None
    number = len(before) + 1
    told = part(number, Outcome.BARRED, 50, phase=UNTOLD if saves_alone else "train", unsaved="the store said 507")
    begun = (*before, replace(opened("a", number=number), last_step=50))

    def closed(**changes):
        world = snapshot(up("a", told), state=state(attempts=begun, **changes), checkpoint=ref, failed_for=None)
        return decide(replace(GOAL, nodes=1, saves_alone=saves_alone), world, RULES), world

    decided, world = closed()
    kept = f"the newest checkpoint is that of step {saved}" if saved is not None else "nothing is saved"
    what = "last checkpoint is not saved:" if saves_alone else "last step, 50, is not saved, as"
    assert decided == CloseAttempt(reason=reason, message=f"its {what} the store said 507; {kept}")
    over = transitions.close_attempt(world.state, decided, NOW)
    assert (over.message, over.attempts[-1].unsaved) == (
        (decided.message, None) if reason is ExitReason.USER_ERROR else (None, decided.message)
    )
    assert closed(reopened_after=len(before))[0].reason is ExitReason.LOST  # what was refused before is mended


@pytest.mark.parametrize(
    ("steps", "told", "saves_alone", "reason"),
    [
        ({"first_step": 1}, (1, 0), False, ExitReason.USER_ERROR),  # it counts its steps, and made none
        ({"first_step": 331}, (331, 330), False, ExitReason.USER_ERROR),
        ({"first_step": 1, "last_step": 330}, (1, 330), False, ExitReason.SUCCEEDED),
        ({"first_step": 1}, (1, 3), False, ExitReason.SUCCEEDED),  # the state has not heard of its steps yet
        (
            {"first_step": 1},
            (1, 0),
            True,
            ExitReason.SUCCEEDED,
        ),  # what is known of it is what was kept of its directory
        ({"first_step": 1}, None, False, ExitReason.SUCCEEDED),  # what it said last is not known
        ({}, None, False, ExitReason.SUCCEEDED),  # nothing is known of it
    ],
)
def test_a_run_that_trained_no_step_is_not_called_succeeded(steps, told, saves_alone, reason):
    phase = UNTOLD if saves_alone else DONE
    first = part(1, Outcome.DONE) if told is None else part(1, Outcome.DONE, told[1], first_step=told[0], phase=phase)
    done = (up("a", first), up("b", part(1, Outcome.DONE)))
    world = running(*done, attempt=replace(opened("a", "b"), **steps), failed_for=timedelta(0))
    closed = decide(replace(GOAL, saves_alone=saves_alone), world, RULES)
    assert isinstance(closed, CloseAttempt)
    assert closed.reason is reason
    said = transitions.close_attempt(world.state, closed, NOW).message
    assert said == ("the script ended without having trained a step" if reason is ExitReason.USER_ERROR else None)


def test_an_attempt_that_resumes_at_the_last_step_has_nothing_left_to_train():
    before = replace(opened("a", "b"), first_step=1, last_step=330, reason=ExitReason.INTERRUPTED)
    now = replace(opened("a", "b", number=2), first_step=331)
    done = (up("a", part(2, Outcome.DONE, 330, first_step=331, phase=DONE)), up("b", part(2, Outcome.DONE)))
    for earlier in (before, replace(before, last_step=None)):  # of which nothing need have been seen
        world = snapshot(*done, state=state(attempts=(earlier, now)))
        assert decide(GOAL, world, RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)


@pytest.mark.parametrize(
    ("saves_nothing", "first_step", "told", "how"),
    [
        (True, None, part(1), Stop.KILL),
        (False, None, part(1), Stop.SAVE),
        (True, 1, part(1), Stop.SAVE),  # it has told steps before
        (True, None, part(1, step=3), Stop.SAVE),  # its own word counts more than what its code tells
    ],
)
def test_a_script_that_saves_nothing_is_not_waited_for_when_the_user_ends_the_job(saves_nothing, first_step, told, how):
    goal = replace(GOAL, saves_nothing=saves_nothing)
    attempt = replace(opened("a", "b"), first_step=first_step)
    world = running(up("a", told), up("b", part(1)), attempt=attempt, wanted_end=ExitReason.STOPPED)
    assert decide(goal, world, RULES) == EndAttempt(how=how, reason=ExitReason.STOPPED)


@pytest.mark.parametrize(
    ("saving", "uses_library", "saves_nothing"),
    [
        (Saving.RESUME, True, False),
        (Saving.DIRECTORY, False, False),
        (Saving.NONE, False, True),
        (Saving.NOTHING, False, True),
        (Saving.UNKNOWN, False, False),
    ],
)
def test_a_goal_says_what_is_known_of_how_the_script_saves(saving, uses_library, saves_nothing):
    goal = goal_of(order(), Supervising(saving=saving))
    assert (goal.uses_library, goal.saves_nothing) == (uses_library, saves_nothing)


def test_a_drill_takes_the_last_member_once_in_mid_run():
    nodes = (up("a", part(1, step=40)), up("b", part(1)))
    goal = replace(GOAL, drill=True)
    drilled = replace(running(*nodes), state=state(attempts=(opened("a", "b"),), drilled=1))

    assert decide(goal, running(up("a", part(1, step=39)), nodes[1]), RULES) == Wait(why="running")
    assert decide(goal, running(*nodes), RULES) == Drill(node_id="b")
    assert decide(goal, drilled, RULES) == Wait(why="running")


def test_a_drill_takes_no_machine_that_its_cloud_does_not_take_and_none_once_it_was_refused():
    goal = replace(GOAL, drill=True, drills_spot=True)
    a, b = up("a", part(1, step=40)), up("b", part(1))
    on_demand = replace(b, node=replace(b.node, pool=replace(b.node.pool, market=Market.ON_DEMAND)))
    alone = replace(a, node=replace(a.node, pool=on_demand.node.pool))
    refused = replace(running(a, b), state=state(attempts=(opened("a", "b"),), drill_refused="no such role"))

    assert decide(goal, running(a, b), RULES) == Drill(node_id="b")
    assert decide(goal, running(a, on_demand), RULES) == Drill(node_id="a")
    assert decide(goal, running(alone, on_demand), RULES) == Wait(why="running")
    assert decide(goal, refused, RULES) == Wait(why="running")


# After the end


def test_an_ended_job_is_torn_down_unless_it_succeeded_and_is_kept():
    succeeded = snapshot(state=state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED))
    failed = snapshot(state=state(status=JobStatus.FAILED, exit_reason=ExitReason.USER_ERROR))
    kept = replace(GOAL, keep=True)

    assert decide(GOAL, succeeded, RULES) == TearDown()
    assert decide(kept, succeeded, RULES) == Done()
    assert decide(kept, failed, RULES) == TearDown()
    assert decide(GOAL, replace(failed, state=replace(failed.state, torn_down=True)), RULES) == Done()


def test_an_ended_job_is_torn_down_once_results_that_nobody_has_brought_were_asked_for():
    stopped = snapshot(state=state(status=JobStatus.STOPPED, exit_reason=ExitReason.STOPPED))
    asked = replace(stopped, homecoming=Homecoming.NO)
    drives = replace(GOAL, self_driving=True)
    assert decide(GOAL, asked, RULES) == decide(drives, asked, RULES) == BringHome()
    coming = replace(stopped, homecoming=Homecoming.ON_THE_WAY)
    why = "waiting for the outputs while they come, no longer than 10 min without any of them"
    shut_off = f"{why}, and no later than 12:30:00 UTC, when the machines shut themselves off"
    assert decide(GOAL, coming, RULES) == Wait(why=shut_off)
    own = replace(coming, state=replace(coming.state, pool=replace(POOL, market=Market.OWNED)))
    assert decide(GOAL, own, RULES) == Wait(why=why)
    assert decide(GOAL, replace(stopped, homecoming=Homecoming.DONE), RULES) == TearDown()
    assert decide(GOAL, replace(asked, state=replace(asked.state, torn_down=True)), RULES) == Done()


# Which pool


def cool(fault=Fault.CAPACITY):
    return CoolDown(
        pool=POOL,
        fault=fault,
        code="InsufficientInstanceCapacity",
        message="none there now",
        length=timedelta(minutes=5),
        longest=timedelta(minutes=30),
    )


def test_a_pool_that_refuses_while_nothing_runs_in_it_cools_down_at_once():
    assert decide(GOAL, snapshot(group_size=0, refusals=(refusal(),)), RULES) == cool()
    assert decide(GOAL, snapshot(group_size=2, refusals=(refusal(Fault.QUOTA),)), RULES) == cool(Fault.QUOTA)


def test_the_rest_of_a_gang_is_waited_for_and_then_the_part_is_given_back():
    pending = up("a", readiness=Readiness.NO, state=NodeState.PENDING)
    refused = {"group_size": 1, "refusals": (refusal(),)}
    assert decide(GOAL, snapshot(pending, **refused, short_for=timedelta(seconds=119)), RULES) == Wait(
        why="the cloud has no more machines now"
    )
    assert decide(GOAL, snapshot(pending, **refused, short_for=timedelta(seconds=120)), RULES) == cool()
    cooling = state(cooldowns=(cooldown(),))
    assert decide(GOAL, snapshot(pending, group_size=1, state=cooling), RULES) == Resize(size=0)
    assert decide(GOAL, snapshot(pending, group_size=0, state=cooling), RULES) == Wait(why="giving machines back")


def test_a_gang_that_stays_partial_without_a_word_is_given_back_too():
    world = snapshot(up("a"), short_for=timedelta(seconds=120))
    action = decide(GOAL, world, RULES)
    assert isinstance(action, CoolDown)
    assert action.message == "1 of 2 machines after 120 s"


@pytest.mark.parametrize(("fault", "said"), [(None, ""), (Fault.TRANSIENT, "; its last word: try later (Transient)")])
def test_a_pool_that_gives_no_machine_and_does_not_say_why_refuses_after_ten_minutes(fault, said):
    refusals = (replace(refusal(fault, ago=20.0), message="try later", code="Transient"),) if fault else ()

    def bare(minutes):
        return snapshot(refusals=refusals, state=state(bare_at=NOW - timedelta(minutes=minutes)))

    assert isinstance(decide(GOAL, bare(9.9), RULES), Wait)
    action = decide(GOAL, bare(10), RULES)
    assert isinstance(action, CoolDown)
    assert (action.pool, action.fault, action.message) == (POOL, Fault.CAPACITY, f"no machine after 10 min{said}")


def test_a_job_whose_only_pool_gives_nothing_and_says_nothing_ends_after_an_hour_of_that():
    own, now = state(), NOW
    for _ in range(2000):
        cooling = any(one.until > now for one in own.cooldowns)
        one = snapshot(
            state=own,
            now=now,
            armed=now + timedelta(minutes=30),
            payable_until=now + timedelta(minutes=30),
            group_size=0 if cooling else 2,
        )
        one = replace(one, state=transitions.since(own, one, 2))
        action, own = decide(GOAL, one, RULES), one.state
        if isinstance(action, CoolDown):
            own = transitions.cool_down(own, action, now)
        if isinstance(action, Finish):
            break
        now += timedelta(seconds=10)
    assert action.reason is ExitReason.NO_CAPACITY
    assert "no machine after 10 min" in action.message
    assert timedelta(hours=1) <= now - NOW <= timedelta(hours=2)


def test_a_group_that_is_to_have_no_machines_or_has_some_lacks_none():
    lacking = transitions.since(state(), snapshot(), 2)
    assert (lacking.bare_at, transitions.since(lacking, snapshot(now=NOW + timedelta(seconds=9)), 2).bare_at) == (
        NOW,
        NOW,
    )
    for other in (snapshot(up("a")), snapshot(group_size=0), snapshot(exists=False)):
        assert transitions.since(lacking, other, 2).bare_at is None


def test_the_pool_is_asked_again_while_part_of_a_gang_waits():
    world = snapshot(up("a"), group_size=1, refusals=(refusal(ago=11),), short_for=timedelta(seconds=30))
    assert decide(GOAL, world, RULES) == Resize(size=2)


def test_the_best_offer_that_is_not_cooling_is_next():
    cooling = state(cooldowns=(cooldown(), cooldown(OTHER_POOL)))
    third = offer(replace(POOL, zone="us-west-2a"))
    world = snapshot(group_size=0, state=cooling, candidates=(offer(POOL), offer(OTHER_POOL), third))
    assert decide(GOAL, world, RULES) == Move(offer=third)


def test_a_refusal_from_before_the_job_turned_to_the_pool_says_nothing():
    world = snapshot(group_size=0, state=state(pool_at=NOW - timedelta(seconds=5)), refusals=(refusal(ago=6),))
    assert decide(GOAL, world, RULES) == Resize(size=2)


def test_without_any_pool_the_job_waits_at_no_cost_and_gives_up_after_an_hour():
    waiting = snapshot(group_size=0, state=state(cooldowns=(cooldown(),)))
    assert decide(GOAL, waiting, RULES) == Wait(
        why="no capacity: asking again at 12:04:00 UTC, and until 12:59:00 UTC at the most"
    )
    late = snapshot(group_size=0, state=state(cooldowns=(cooldown(ago=3600),)))
    assert decide(GOAL, late, RULES) == Finish(
        reason=ExitReason.NO_CAPACITY,
        message="no pool had machines for 1.0 h; the last said: none there now (InsufficientInstanceCapacity)",
    )


def test_a_quota_does_not_grow_by_waiting():
    world = snapshot(group_size=0, state=state(cooldowns=(cooldown(fault=Fault.QUOTA),)))
    action = decide(GOAL, world, RULES)
    assert action == Finish(
        reason=ExitReason.NO_CAPACITY,
        message="none there now (InsufficientInstanceCapacity): gpucloud quota request",
    )


@pytest.mark.parametrize("fault", [Fault.PERMISSION, Fault.PARAMETER, Fault.UNKNOWN])
def test_what_no_other_pool_can_help_stops_the_job(fault):
    action = decide(GOAL, snapshot(group_size=0, refusals=(refusal(fault),)), RULES)
    assert isinstance(action, Finish)
    assert (action.reason, action.reason.exit_code) == (ExitReason.REFUSED, 13)


def test_the_line_that_stops_the_job_says_what_to_do():
    told = replace(refusal(Fault.PERMISSION), hint="let it use the key")
    action = decide(GOAL, snapshot(group_size=0, refusals=(told,)), RULES)
    assert isinstance(action, Finish)
    assert action.message is not None
    assert action.message.endswith("none there now (InsufficientInstanceCapacity); let it use the key")


@pytest.mark.parametrize("fault", [Fault.THROTTLING, Fault.TRANSIENT])
def test_what_may_succeed_later_is_asked_again_later(fault):
    assert isinstance(decide(GOAL, snapshot(group_size=0, refusals=(refusal(fault),)), RULES), Wait)
    assert decide(GOAL, snapshot(group_size=0, refusals=(refusal(fault, ago=11),)), RULES) == Resize(size=2)


def test_a_pool_that_refuses_again_is_left_alone_for_longer_each_time():
    lengths = []
    now = state()
    for _ in range(5):
        now = transitions.cool_down(now, cool(), NOW)
        lengths.append((now.cooldowns[0].until - NOW).total_seconds() / 60)
    assert lengths == [5, 10, 20, 30, 30]
    assert len(now.cooldowns) == 1


# The gate


def bad(node_id, why="GPU 0: Xid 79", ago=1.0):
    return Quarantine(node_id=node_id, why=why, at=NOW - timedelta(seconds=ago))


def looked(*found, done=True, number=1):
    return {
        "inspects": True,
        "inspection": Inspection(number=number, node_ids=("a", "b"), done=done, bad=tuple(found)),
    }


def test_a_job_without_gpus_opens_its_attempt_without_a_look():
    assert decide(GOAL, snapshot(up("a"), up("b"), inspects=False), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))


def test_gpus_are_looked_at_before_every_attempt_and_waited_for():
    first = opened("a", "b", reason=ExitReason.INTERRUPTED, last_step=5)
    nodes = (up("a"), up("b"))
    again = state(attempts=(first,))
    assert decide(GOAL, snapshot(*nodes, inspects=True), RULES) == Inspect(number=1, node_ids=("a", "b"))
    assert decide(GOAL, snapshot(*nodes, **looked(done=False)), RULES) == Wait(why="checking the GPUs")
    assert decide(GOAL, snapshot(*nodes, **looked()), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))
    assert decide(GOAL, snapshot(*nodes, **looked(), state=again), RULES) == Inspect(number=2, node_ids=("a", "b"))


def test_other_members_are_looked_at_anew():
    assert decide(GOAL, snapshot(up("a"), up("c"), **looked()), RULES) == Inspect(number=1, node_ids=("a", "c"))


def test_a_node_found_bad_is_written_down_and_then_replaced():
    world = snapshot(up("a"), up("b"), **looked(("b", "GPU 0: Xid 79")))
    assert decide(GOAL, world, RULES) == QuarantineNodes(nodes=(("b", "GPU 0: Xid 79"),))
    known = replace(world, state=state(quarantined=(bad("b"),)))
    assert decide(GOAL, known, RULES) == Replace(node_ids=("b",))


def in_use(since_s, looked_s):
    since, over_at = (NOW - timedelta(seconds=seconds) for seconds in (since_s, looked_s))
    used = InUse(node_id="b", why="GPU 0: it is in use by python (pid 7)", since=since)
    look = Inspection(number=1, node_ids=("a", "b"), done=True, in_use=(used,), over_at=over_at)
    return snapshot(up("a"), up("b"), inspects=True, inspection=look)


def test_a_gpu_that_others_use_is_looked_at_again_and_only_after_a_while_is_another_machine_taken():
    until = "waiting for GPUs that others use until 12:01:30 UTC: b: GPU 0: it is in use by python (pid 7)"
    assert decide(GOAL, in_use(30, 9), RULES) == Wait(why=until)
    assert decide(GOAL, in_use(30, 10), RULES) == Inspect(number=1, node_ids=("a", "b"))
    late = decide(GOAL, in_use(120, 1), RULES)
    said = "GPU 0: it is in use by python (pid 7)"
    assert late == QuarantineNodes(nodes=(("b", said),), may_pass=frozenset({"b"}))
    known = transitions.quarantine(state(), late, NOW)
    assert decide(GOAL, replace(in_use(120, 1), state=known), RULES) == Replace(node_ids=("b",))
    assert (quarantined(known), barred(known)) == ({"b"}, frozenset())


def test_a_node_that_the_gate_refused_is_quarantined_and_not_counted_as_a_failed_bootstrap():
    refused = up("b", readiness=Readiness.FAILED, refused="3 GPUs, 4 expected")
    world = snapshot(up("a"), refused)
    assert decide(GOAL, world, RULES) == QuarantineNodes(nodes=(("b", "3 GPUs, 4 expected"),))


def test_three_bad_nodes_in_a_row_are_a_bad_pool():
    three = state(quarantined=(bad("x"), bad("y"), bad("z", "GPU 3: Xid 48")))
    action = decide(GOAL, snapshot(up("a"), state=three, group_size=2), RULES)
    assert isinstance(action, CoolDown)
    assert (action.pool, action.code, action.message) == (
        POOL,
        "Quarantined",
        "3 nodes in a row were bad: z: GPU 3: Xid 48",
    )


def test_from_a_bad_pool_the_job_turns_to_another_and_without_one_it_stops_with_the_findings():
    cooling = replace(cooldown(), code="Quarantined", message="3 nodes in a row were bad: z: GPU 3: Xid 48")
    known = state(cooldowns=(cooling,), quarantined=(bad("x"), bad("y"), bad("z")))
    assert decide(GOAL, snapshot(group_size=0, state=known, candidates=(offer(),)), RULES) == Move(offer=offer())
    assert decide(GOAL, snapshot(group_size=0, state=known), RULES) == Finish(
        reason=ExitReason.UNPREPARED, message="3 nodes in a row were bad: z: GPU 3: Xid 48"
    )


def bad_pools(*left_s):
    pools = (POOL, OTHER_POOL)
    found = zip(pools, left_s, strict=False)
    message = "3 nodes in a row were bad: z: no CUDA"
    return tuple(replace(cooldown(pool, left=left), code="Quarantined", message=message) for pool, left in found)


def test_after_two_bad_pools_no_third_one_is_paid():
    known = state(cooldowns=bad_pools(1500.0, 1700.0))
    assert decide(GOAL, snapshot(group_size=0, state=known, candidates=(offer(),)), RULES) == Finish(
        reason=ExitReason.UNPREPARED,
        message=f"2 pools in a row had bad machines; {OTHER_POOL}: 3 nodes in a row were bad: z: no CUDA",
    )


def test_a_bad_pool_before_the_last_step_is_not_counted_with_one_after_it():
    # Cooled down 300 s and 100 s ago, for half an hour; the attempt that made a step began 200 s ago.
    good = replace(opened("a", "b", reason=ExitReason.LOST, last_step=4), started_at=NOW - timedelta(seconds=200))
    known = state(cooldowns=bad_pools(1500.0, 1700.0), attempts=(good,), pool=POOL)
    third = offer(replace(POOL, zone="us-east-2c"))
    assert decide(GOAL, snapshot(group_size=0, state=known, candidates=(third,)), RULES) == Move(offer=third)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_at": NOW},
        {"forgiven": 3},
        {"attempts": (replace(opened("a", "b", reason=ExitReason.LOST, last_step=4), started_at=NOW),)},
    ],
)
def test_what_was_before_another_pool_a_new_start_or_a_step_does_not_count(changes):
    known = state(quarantined=(bad("x"), bad("y"), bad("z")), **changes)
    assert not isinstance(decide(GOAL, snapshot(up("a"), up("b"), state=known), RULES), CoolDown)


def test_a_member_that_falls_ill_saves_with_the_others_and_is_killed_when_it_does_not():
    nodes = (up("a", part(1)), up("b", part(1), unhealthy="GPU 1: Xid 94"))
    quarantined = {"quarantined": (bad("b"),)}
    late = opened("a", "b", ending_reason=ExitReason.INTERRUPTED, ending_at=NOW - RULES.limits.save, ordered=Stop.SAVE)
    known = state(attempts=(opened("a", "b"),), **quarantined)
    assert decide(GOAL, running(*nodes), RULES) == QuarantineNodes(nodes=(("b", "GPU 1: Xid 94"),))
    assert decide(GOAL, snapshot(*nodes, state=known), RULES) == EndAttempt(
        how=Stop.SAVE, reason=ExitReason.INTERRUPTED
    )
    assert decide(GOAL, snapshot(*nodes, state=state(attempts=(late,), **quarantined)), RULES) == EndAttempt(
        how=Stop.KILL, reason=ExitReason.INTERRUPTED
    )
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT), unhealthy="GPU 1: Xid 94"))
    assert decide(GOAL, snapshot(*left, state=state(attempts=(late,), **quarantined)), RULES) == CloseAttempt(
        reason=ExitReason.INTERRUPTED
    )


def test_a_script_that_failed_on_an_ill_node_is_not_the_users_error():
    failed = (up("a", part(1, Outcome.FAILED)), up("b", part(1, Outcome.FAILED), unhealthy="GPU 1: Xid 79"))
    known = state(attempts=(opened("a", "b"),), quarantined=(bad("b"),))
    assert decide(GOAL, snapshot(*failed, state=known, failed_for=timedelta(seconds=9)), RULES) == CloseAttempt(
        reason=ExitReason.LOST
    )


def test_a_script_that_failed_beside_ranks_that_their_own_agent_killed_is_not_the_users_error():
    failed = (up("a", part(1, Outcome.KILLED)), up("b", part(1, Outcome.FAILED)))
    world = running(*failed, failed_for=timedelta(seconds=9))
    assert decide(GOAL, world, RULES) == CloseAttempt(reason=ExitReason.LOST)


@pytest.mark.parametrize("beside", [Outcome.FAILED, Outcome.LEFT, Outcome.BARRED])
def test_where_what_was_saved_could_not_be_read_another_attempt_tries(beside):
    world = running(up("a", part(1, Outcome.BARRED)), up("b", part(1, beside)), failed_for=timedelta(seconds=9))
    assert decide(GOAL, world, RULES) == CloseAttempt(reason=ExitReason.LOST)


def test_a_script_that_failed_beside_machines_that_the_shut_off_ended_is_not_the_users_error():
    running_to_the_last = replace(gone("a", EndCause.SCHEDULE), status=up("a", part(1)).status)
    failed = replace(gone("b", EndCause.SCHEDULE), status=up("b", part(1, Outcome.FAILED)).status)
    done = replace(gone("a", EndCause.SCHEDULE), status=up("a", part(1, Outcome.FAILED)).status)
    late = {"failed_for": timedelta(minutes=2)}
    assert decide(GOAL, running(running_to_the_last, failed, **late), RULES) == CloseAttempt(reason=ExitReason.LOST)
    assert decide(GOAL, running(done, failed, **late), RULES) == CloseAttempt(reason=ExitReason.USER_ERROR)


def test_a_member_that_heard_of_the_end_before_it_began_never_begins():
    lost = opened("a", "b", ending_reason=ExitReason.LOST, ordered=Stop.KILL)
    known = (interruption("b", InterruptionKind.LOST),)
    heard = running(replace(up("a"), heard=True), gone("b"), attempt=lost, interruptions=known)
    not_yet = running(up("a"), gone("b"), attempt=lost, interruptions=known)

    assert decide(GOAL, heard, RULES) == CloseAttempt(reason=ExitReason.LOST)
    assert isinstance(decide(GOAL, not_yet, RULES), Wait)


def test_money_that_is_kept_for_machines_that_leave_is_waited_for():
    noted = {"state": state(interruptions=(interruption("a", attempt=None),))}
    leaves = snapshot(
        up("a", notice=True, relieved=True), up("b"), payable_until=None, payable_with_another=None, **noted
    )
    old = NOW - timedelta(hours=1)
    comes_back = snapshot(
        up("a", notice=True, launched_at=old), up("b"), payable_until=None, payable_with_another=None, **noted
    )
    not_charged = snapshot(up("a", notice=True), up("b"), payable_until=None, payable_with_another=None, **noted)
    came_back = snapshot(up("a", notice=True), up("b"), up("c"), payable_until=None, payable_with_another=None, **noted)
    fresh = NOW - timedelta(seconds=30)
    unheard = (up("a", readiness=Readiness.PREPARING), up("b"), up("c", launched_at=fresh))
    unheard = snapshot(*unheard, payable_until=None, payable_with_another=None)
    late = replace(leaves, now=NOW + timedelta(minutes=3, seconds=1))

    assert decide(GOAL, leaves, RULES) == Wait(why="waiting until machines have left")
    assert decide(GOAL, comes_back, RULES) == Finish(reason=ExitReason.BUDGET)
    assert decide(GOAL, not_charged, RULES) == Wait(why="waiting until machines have left")
    assert decide(GOAL, came_back, RULES) == Wait(why="waiting until machines have left")
    assert decide(GOAL, unheard, RULES) == Wait(why="waiting until machines have left")
    assert decide(GOAL, late, RULES) == Finish(reason=ExitReason.BUDGET)
    assert decide(GOAL, replace(unheard, now=late.now), RULES) == Finish(reason=ExitReason.BUDGET)


def test_a_bad_node_that_was_to_come_next_is_replaced_while_the_attempt_goes_on():
    known = state(attempts=(opened("a", "b"),), quarantined=(bad("c"),))
    world = snapshot(up("a", part(1)), up("b", part(1)), up("c"), state=known)
    assert decide(GOAL, world, RULES) == Replace(node_ids=("c",))


def test_the_books_keep_the_first_reason_and_a_new_start_forgives():
    first = transitions.quarantine(state(), QuarantineNodes(nodes=(("a", "Xid 79"),)), NOW)
    again = transitions.quarantine(first, QuarantineNodes(nodes=(("a", "Xid 48"), ("b", "ECC"))), LATER)
    assert [(one.node_id, one.why, one.at) for one in again.quarantined] == [("a", "Xid 79", NOW), ("b", "ECC", LATER)]
    cooled = replace(again, cooldowns=(replace(cooldown(), code="Quarantined"), cooldown(OTHER_POOL)))
    reopened = transitions.reopen(cooled)
    assert (reopened.forgiven, len(reopened.quarantined)) == (2, 2)
    assert reopened.cooldowns == ()


def test_the_model_that_is_paid_for_changes_with_the_offer():
    moved = transitions.move(state(gpu="A100"), Move(offer=replace(offer(), gpu="H100")), None, NOW)
    assert moved.gpu == "H100"


# The whole product of small worlds


NODES = {
    "none": lambda _: None,
    "pending": lambda i: up(i, readiness=Readiness.NO, state=NodeState.PENDING),
    "unprepared": lambda i: up(i, readiness=Readiness.NO),
    "preparing": lambda i: up(i, readiness=Readiness.PREPARING),
    "broken": lambda i: up(i, readiness=Readiness.FAILED),
    "ready": up,
    "untold": lambda i: up(i, told=False),
    "refused": lambda i: up(i, readiness=Readiness.FAILED, refused="2 GPUs, 4 expected"),
    "unhealthy": lambda i: up(i, part(1, step=50), unhealthy="GPU 0: Xid 79"),
    "noticed": lambda i: up(i, part(1), notice=True),
    "relieved": lambda i: up(i, part(1), notice=True, relieved=True),
    "silent": lambda i: up(i, part(1), silent=9),
    "running": lambda i: up(i, part(1, step=50)),
    "done": lambda i: up(i, part(1, Outcome.DONE)),
    "left": lambda i: up(i, part(1, Outcome.LEFT)),
    "failed": lambda i: up(i, part(1, Outcome.FAILED)),
    "killed": lambda i: up(i, part(1, Outcome.KILLED)),
    "barred": lambda i: up(i, part(1, Outcome.BARRED)),
    "interrupted": gone,
    "shut off": lambda i: gone(i, EndCause.SCHEDULE),
}
ATTEMPTS = {
    "none yet": (),
    "open": (opened("a", "b"),),
    "ending_reason": (opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW, ordered=Stop.SAVE),),
    "killed": (opened("a", "b", ending_reason=ExitReason.LOST, ending_at=NOW, ordered=Stop.KILL),),
    "interrupted": (opened("a", "b", reason=ExitReason.INTERRUPTED, last_step=9),),
}
GROUPS = {
    "absent": {"exists": False, "armed": None, "group_size": 0},
    "unarmed": {"armed": None, "group_size": 0},
    "armed": {"group_size": 0},
    "wanted": {},
}
WISHES = {
    "nothing": {},
    "stop": {"wanted_end": ExitReason.STOPPED},
    "idle": {"use": IDLE},
    "poor": {"payable_until": None, "payable_with_another": None},
    "failing": {"failed_for": timedelta(seconds=5), "failed_bootstraps": 1},
    "refused": {"refusals": (refusal(),), "short_for": timedelta(seconds=120)},
    "cooling": {"cooldowns": (cooldown(),), "candidates": (offer(POOL), offer())},
    "a look": {"inspects": True},
    "found": {**looked(("b", "GPU 0: Xid 79")), "quarantined": (bad("a"),)},
    "bad pool": {"inspects": True, "quarantined": (bad("x"), bad("y"), bad("a"))},
    "dry": {"cooldowns": (cooldown(), cooldown(OTHER_POOL)), "candidates": (offer(POOL), offer())},
}


def worlds(beside=tuple(NODES)):
    for attempts, a, b, group, wish in itertools.product(ATTEMPTS, NODES, beside, GROUPS, WISHES):
        nodes = tuple(n for n in (NODES[a]("a"), NODES[b]("b")) if n is not None)
        wishes = dict(WISHES[wish])
        stored = state(attempts=ATTEMPTS[attempts], cooldowns=wishes.pop("cooldowns", ()))
        stored = replace(stored, quarantined=wishes.pop("quarantined", ()))
        yield (
            f"attempt {attempts}, a {a}, b {b}, group {group}, {wish}",
            snapshot(*nodes, state=stored, **GROUPS[group], **wishes),
        )


@pytest.mark.parametrize("goal", [IDLE_GOAL, replace(IDLE_GOAL, least_nodes=1)], ids=["all nodes", "a range"])
def test_no_world_breaks_what_must_always_hold(goal):
    count = 0
    for name, world in worlds():
        action = decide(goal, world, RULES)
        broken = [text for text, holds in laws(world, action) if not holds]
        assert not broken, f"{name}: {action} breaks: {broken}"
        count += 1
    assert count == len(ATTEMPTS) * len(NODES) ** 2 * len(GROUPS) * len(WISHES)


def laws(world, action):
    attempt = world.state.attempt
    by_id = {n.node.id: n for n in world.nodes}
    growing = isinstance(action, Relieve) or (isinstance(action, Resize) and action.size > 0)
    counted = [n for n in world.nodes if n.node.state is not NodeState.TERMINATED and not n.node.relieved]
    cooling = {c.pool for c in world.state.cooldowns}
    yield (
        "the job turns to another pool only when nothing is left in the old one, and never to one that cools",
        not isinstance(action, Move) or (not counted and world.group.size == 0 and action.offer.pool not in cooling),
    )
    yield (
        "nothing is asked of a pool that cools",
        not (isinstance(action, Resize) and action.size > 0 and world.state.pool in cooling),
    )
    yield (
        "machines start only behind a shut-off that lies ahead",
        not (growing and (world.group.armed_until is None or world.group.armed_until <= NOW)),
    )
    yield "one attempt at a time", not (isinstance(action, OpenAttempt) and attempt is not None)
    yield (
        "an attempt opens on ready, told, untaken nodes",
        not isinstance(action, OpenAttempt)
        or all(
            by_id[i].readiness is Readiness.READY and by_id[i].told and by_id[i].status.notice is None
            for i in action.node_ids
        ),
    )
    out = {one.node_id for one in world.state.quarantined}
    yield (
        "no attempt opens on a quarantined node, nor on one that was not looked at where that is wanted",
        not isinstance(action, OpenAttempt)
        or (not out & set(action.node_ids) and (not world.inspects or world.inspection.done)),
    )
    yield (
        "only who lives and is not known yet is quarantined",
        not isinstance(action, QuarantineNodes)
        or all(by_id[i].node.state is not NodeState.TERMINATED and i not in out for i, _ in action.nodes),
    )
    yield "a look is for jobs with GPUs", not isinstance(action, Inspect) or (world.inspects and attempt is None)
    yield "an attempt is closed only when it is open", not isinstance(action, CloseAttempt) or attempt is not None
    yield "the job is never finished over an open attempt", not isinstance(action, Finish) or attempt is None
    yield (
        "success is every member's",
        action != CloseAttempt(reason=ExitReason.SUCCEEDED)
        or all(by_id[i].status.attempt.outcome is Outcome.DONE for i in ("a", "b")),
    )
    yield (
        "only what is seen to be idle ends as idle, and it is asked to save first",
        not isinstance(action, EndAttempt)
        or action.reason is not ExitReason.IDLE
        or (world.use is not None and action.how is Stop.SAVE),
    )
    yield (
        "orders only become firmer",
        not isinstance(action, EndAttempt) or (action.how is Stop.KILL or attempt.ordered is Stop.NO),
    )
    yield (
        "nothing is promised beyond what is payable",
        not isinstance(action, Arm) or (action.until in (world.payable_until, world.payable_with_another)),
    )
    yield (
        "nobody is told who is gone or silent",
        not isinstance(action, Tell)
        or all(not by_id[i].silent_for and by_id[i].node.state is NodeState.RUNNING for i in action.node_ids),
    )
    yield (
        "without money nothing starts",
        world.payable_until is not None or not (growing or isinstance(action, OpenAttempt | Arm)),
    )
