"""Machines of another pool take over: asked for beside those that work, paid for first, given back in vain."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.job.spec import Market, Policy
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.state import (
    CapacityDecision,
    ExitReason,
    Interruption,
    InterruptionKind,
    Owner,
    Shortfall,
    Successor,
    UsageInterval,
)
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Appoint,
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    Dismiss,
    EndAttempt,
    Move,
    OpenAttempt,
    Relieve,
    Resize,
    TakeOver,
    Wait,
)
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import CapacityChoice, Goal, Homecoming, Limits, Readiness, Rules
from tests.unit.worlds import LATER, NOW, OTHER_POOL, POOL, gone, opened, part, refusal, snapshot, state, up

GOAL = Goal(nodes=2, budget_usd=Decimal(1), policy=Policy.UNIFORM)
RULES = Rules()
DEAR_POOL = replace(POOL, market=Market.ON_DEMAND)
SOONER = NOW + timedelta(minutes=20)


def offered(pool, cap="0.9", **changes):
    price = Decimal(cap)
    return Offer(pool=pool, usd_per_hour=price, cap_usd_per_hour=price, as_of=NOW, gpus=1, **changes)


DEAR, SPOT, OTHER = offered(DEAR_POOL, "1.2"), offered(POOL), offered(OTHER_POOL)


def to(mode, offer=None, shortfall=None):
    return CapacityChoice(
        mode=mode,
        offer=offer,
        capacity_decision=CapacityDecision(mode=mode.value, since=NOW, why="why", shortfall=shortfall),
    )


def works(pool, capacity_choice, *beside, members=("a", "b"), **changes):
    """Attempt 1 on two machines of the pool; `beside` are others that are there."""
    nodes = [up(name, part(), pool=pool) for name in members]
    of_state = {"pool": pool, "attempts": (opened(*members),), **changes.pop("of_state", {})}
    plain = {
        "group_size": len(nodes) + len(beside),
        "payable_with_successor": LATER,
        "capacity_choice": capacity_choice,
    }
    return snapshot(*nodes, *beside, **{**plain, "state": state(**of_state), **changes})


def asked(pool=DEAR_POOL):
    return {"successor": Successor(pool=pool, cap_usd_per_hour=Decimal("1.2"), at=NOW - timedelta(minutes=1))}


def fresh(name, pool=DEAR_POOL, readiness=Readiness.READY):
    return up(name, pool=pool, readiness=readiness)


# While an attempt works


@pytest.mark.parametrize(
    ("held", "capacity_choice", "changes", "expected"),
    [
        (POOL, to(Mode.SPOT, SPOT), {}, Wait(why="running")),
        (POOL, to(Mode.SPOT, OTHER), {}, Wait(why="running")),  # to another zone nothing moves that works
        (POOL, to(Mode.ON_DEMAND, DEAR), {}, Appoint(offer=DEAR)),
        (DEAR_POOL, to(Mode.SPOT, OTHER), {}, Appoint(offer=OTHER)),
        (DEAR_POOL, to(Mode.BOTH, OTHER), {}, Appoint(offer=OTHER)),
        (DEAR_POOL, to(Mode.ON_DEMAND), {}, Wait(why="running")),
        (POOL, None, {}, Wait(why="running")),
        # What is paid for both lasts less long: that comes first.
        (POOL, to(Mode.ON_DEMAND, DEAR), {"payable_with_successor": SOONER}, Arm(until=SOONER)),
        # What was asked for before in vain is given back first: a level does not say of which pool it is.
        (POOL, to(Mode.ON_DEMAND, DEAR), {"group_size": 4}, Resize(size=2)),
    ],
)
def test_others_are_asked_for_beside_what_works(held, capacity_choice, changes, expected):
    assert decide(GOAL, works(held, capacity_choice, **changes), RULES) == expected


@pytest.mark.parametrize(
    ("held", "capacity_choice", "changes", "leaves"),
    [
        # To wait, and where nothing can stand beside or nobody can pay both, what works saves and leaves…
        (DEAR_POOL, to(Mode.IDLE), {}, True),
        (POOL, to(Mode.ON_DEMAND, DEAR), {"payable_with_successor": None}, True),
        (POOL, to(Mode.ON_DEMAND, offered(DEAR_POOL, gpu="A100")), {}, True),
        (DEAR_POOL, to(Mode.SPOT, SPOT, Shortfall.MONEY), {"payable_with_successor": None}, True),
        # … but machines on demand are not left for spot ones that may never come, nor spot ones to wait.
        (DEAR_POOL, to(Mode.SPOT, SPOT), {"payable_with_successor": None}, False),
        (POOL, to(Mode.IDLE), {}, False),
    ],
)
def test_without_others_beside(held, capacity_choice, changes, leaves):
    action = decide(GOAL, works(held, capacity_choice, **changes), RULES)
    assert isinstance(action, EndAttempt) is leaves
    if leaves:
        assert (action.how, action.reason) == (Stop.SAVE, ExitReason.RESCHEDULED)


WANTED = to(Mode.ON_DEMAND, DEAR)


def test_they_are_asked_for_waited_for_and_take_over_when_all_stand_ready():
    def step(*beside, **changes):
        return decide(GOAL, works(POOL, WANTED, *beside, of_state=asked(), **changes), RULES)

    assert step(group_size=2) == Resize(size=4)
    assert step(group_size=4) == Wait(why="running")
    assert step(fresh("c"), fresh("d", readiness=Readiness.PREPARING)) == Wait(why="running")
    over = step(fresh("c"), fresh("d"))
    assert over == EndAttempt(
        how=Stop.SAVE, reason=ExitReason.RESCHEDULED, message="local.p2.xlarge on_demand in us-east-2a takes over"
    )


@pytest.mark.parametrize(
    ("saved", "launched", "apart", "moves"),
    [
        (61, 60, 90, True),  # so little of its work was not saved when they were asked for that it is not waited for
        (90, 60, 90, True),
        (130, 60, 90, False),
        (59, 60, 90, True),  # it has just saved
        (0, 60, 90, True),
        (136, 60, 90, True),  # the save is overdue, and may never come
        (130, 60, None, True),  # none came yet
    ],
)
def test_machines_that_stand_ready_wait_for_the_next_save_of_a_script_that_is_not_asked_for_one(
    saved, launched, apart, moves
):
    def ago(minutes):
        return NOW - timedelta(minutes=minutes)

    beside = [up(i, pool=DEAR_POOL, launched_at=ago(launched)) for i in "cd"]
    at_work = (opened("a", "b", last_step_at=ago(saved), apart_s=apart and 60.0 * apart),)
    world = works(POOL, WANTED, *beside, of_state=asked() | {"attempts": at_work})

    assert isinstance(decide(replace(GOAL, saves_unasked=True), world, RULES), EndAttempt) is moves
    assert isinstance(decide(GOAL, world, RULES), EndAttempt)


def test_a_script_that_is_not_asked_to_save_is_not_ended_at_once_for_machines_that_cannot_stand_beside():
    def move(saved, shortfall=None):
        idle = to(Mode.IDLE, None, shortfall)
        since = replace(idle.capacity_decision, since=NOW - timedelta(minutes=10))
        at_work = (opened("a", "b", last_step_at=NOW - timedelta(minutes=saved), apart_s=3600.0),)
        world = works(DEAR_POOL, replace(idle, capacity_decision=since), of_state={"attempts": at_work})
        return isinstance(decide(replace(GOAL, saves_unasked=True), world, RULES), EndAttempt)

    assert [move(saved) for saved in (1, 15, 21, 60, 91)] == [True, True, False, False, True]
    assert move(60, Shortfall.MONEY)


def test_spot_machines_that_stand_ready_wait_until_the_policy_says_so():
    both = works(DEAR_POOL, to(Mode.BOTH, SPOT), fresh("c", POOL), fresh("d", POOL), of_state=asked(POOL))
    assert decide(GOAL, both, RULES) == Wait(why="running")
    ready = decide(GOAL, replace(both, capacity_choice=to(Mode.SPOT, SPOT)), RULES)
    assert isinstance(ready, EndAttempt)


@pytest.mark.parametrize("capacity_choice", [to(Mode.SPOT, SPOT), to(Mode.ON_DEMAND, offered(OTHER_POOL)), None])
def test_they_are_given_back_when_nobody_wants_them_any_more(capacity_choice):
    dismissed = works(POOL, capacity_choice, fresh("c"), of_state=asked())
    assert decide(GOAL, dismissed, RULES) == Dismiss()
    after = replace(dismissed, state=transitions.dismiss(dismissed.state), group=replace(dismissed.group, size=4))
    assert decide(GOAL, after, RULES) == Resize(size=2)


def test_a_pool_that_refuses_them_cools_down_and_they_are_not_waited_for():
    refused = works(POOL, WANTED, of_state=asked(), group_size=4, refusals=(refusal(pool=DEAR_POOL, ago=5),))
    action = decide(GOAL, refused, RULES)
    assert isinstance(action, CoolDown)
    assert (action.pool, action.length, action.longest) == (DEAR_POOL, timedelta(minutes=1), timedelta(minutes=1))
    assert transitions.cool_down(refused.state, action, NOW).successor is None


def test_a_refusal_from_before_they_were_asked_for_says_nothing():
    old = works(POOL, WANTED, of_state=asked(), group_size=4, refusals=(refusal(pool=DEAR_POOL, ago=90),))
    assert decide(GOAL, old, RULES) == Wait(why="running")


def test_some_of_them_for_long_are_none():
    short = {"short_for": timedelta(seconds=120), "group_size": 4}
    some = works(POOL, WANTED, fresh("c"), of_state=asked(), **short)
    assert decide(GOAL, some, RULES).message == "1 of 2 machines after 120 s"
    booting = [fresh(name, readiness=Readiness.PREPARING) for name in "cd"]
    assert decide(GOAL, works(POOL, WANTED, *booting, of_state=asked(), **short), RULES) == Wait(why="running")


def test_an_order_to_move_stands_whatever_the_market_does_and_becomes_firm():
    moving = {"attempts": (opened("a", "b", ending_reason=ExitReason.RESCHEDULED, ending_at=NOW, ordered=Stop.SAVE),)}
    saving = works(POOL, to(Mode.SPOT, SPOT), of_state={**asked(), **moving})
    assert decide(GOAL, saving, RULES) == Wait(why="running")
    late = replace(saving, now=NOW + timedelta(seconds=60))
    assert decide(GOAL, late, RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.RESCHEDULED)


def test_ranks_that_saved_and_left_to_move_are_followed_by_an_attempt():
    attempt = opened("a", "b", ending_reason=ExitReason.RESCHEDULED, ending_at=NOW, ordered=Stop.SAVE)
    left = [up(name, part(outcome=Outcome.LEFT, step=30)) for name in "ab"]
    over = snapshot(*left, state=state(attempts=(attempt,), **asked()), capacity_choice=WANTED)
    assert decide(GOAL, over, RULES) == CloseAttempt(reason=ExitReason.RESCHEDULED)
    assert ExitReason.RESCHEDULED.retried


# Between two attempts


def between(*nodes, capacity_choice=WANTED, **changes):
    ended = opened("a", "b", reason=ExitReason.RESCHEDULED, ended_at=NOW, last_step=30, saved_step=30)
    of_state = {"attempts": (ended,), **changes.pop("of_state", {})}
    return snapshot(
        *nodes, **{"group_size": 4, "state": state(**of_state), "capacity_choice": capacity_choice, **changes}
    )


def test_they_take_over_the_others_go_and_the_next_attempt_is_theirs():
    there = [up("a"), up("b"), fresh("c"), fresh("d")]
    after = between(*there, of_state=asked())
    assert decide(GOAL, after, RULES) == TakeOver()
    taken = replace(after, state=transitions.take_over(after.state, NOW), capacity_choice=to(Mode.ON_DEMAND, DEAR))
    assert decide(GOAL, taken, RULES) == Resize(size=2)
    rid = replace(taken, group=replace(taken.group, size=2))
    assert decide(GOAL, rid, RULES) == OpenAttempt(number=2, node_ids=("c", "d"))


@pytest.mark.parametrize(
    ("nodes", "capacity_choice"),
    [
        ((up("a"), up("b"), fresh("c", OTHER.pool)), to(Mode.SPOT, OTHER)),  # not all of them are there
        ((up("a"), up("b"), fresh("c"), fresh("d")), to(Mode.IDLE)),
    ],
)
def test_else_they_are_given_back(nodes, capacity_choice):
    of_state = asked(nodes[2].node.pool)
    assert decide(GOAL, between(*nodes, of_state=of_state, capacity_choice=capacity_choice), RULES) == Dismiss()


def test_machines_on_demand_that_are_paid_take_over_though_some_are_still_to_come():
    """The attempt was interrupted before they stood ready: to buy all of them again would cost their minimum twice."""
    bought = fresh("c", readiness=Readiness.NO)
    assert decide(GOAL, between(up("a"), up("b"), bought, of_state=asked()), RULES) == TakeOver()


def test_results_come_home_before_their_machine_is_given_back_for_others():
    """Rank 0 was at a healthy machine, and another one's notice ended its attempt."""
    awaited = {"of_state": {"successor": None}, "homecoming": Homecoming.NO}
    back = between(up("a"), up("b"), group_size=2, **awaited)
    assert decide(GOAL, back, RULES) == BringHome()
    comes = replace(back, homecoming=Homecoming.ON_THE_WAY)
    assert decide(GOAL, comes, RULES) == Wait(
        why="waiting for the outputs until 12:02:00 UTC at the most: the machines that have them are to go"
    )
    late = replace(comes, now=NOW + timedelta(minutes=2))  # both kinds are paid, and nothing is trained
    assert decide(GOAL, late, RULES) == Resize(size=0)
    assert decide(GOAL, replace(back, homecoming=Homecoming.DONE), RULES) == Resize(size=0)
    there = [up("a"), up("b"), fresh("c"), fresh("d")]
    taken = between(*there, of_state={"pool": DEAR_POOL}, homecoming=Homecoming.NO)
    assert decide(GOAL, taken, RULES) == BringHome()
    assert decide(GOAL, replace(taken, homecoming=Homecoming.DONE), RULES) == Resize(size=2)


def test_no_other_machine_is_asked_for_in_place_of_a_noticed_one_while_those_that_take_over_come():
    noticed = up("b", part(), notice=True)
    known = (Interruption(node_id="b", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=NOW),)
    plain = {"payable_with_another": LATER, "group_size": 4}

    def step(**of_state):
        held = works(POOL, WANTED, fresh("c"), fresh("d", readiness=Readiness.PREPARING), of_state=of_state, **plain)
        nodes = tuple(noticed if n.node.id == "b" else n for n in held.nodes)
        return decide(GOAL, replace(held, nodes=nodes), RULES)

    assert step(interruptions=known) == Relieve(node_id="b")
    assert not isinstance(step(interruptions=known, **asked()), Relieve)


def late(by, choice=WANTED):
    """The choice where a change would be over so many seconds after the deadline."""
    return replace(choice, spare=timedelta(seconds=-by))


@pytest.mark.parametrize(("spare", "moves"), [(-1, False), (0, True), (9, True), (None, True)])
@pytest.mark.parametrize(("held", "choice"), [(POOL, WANTED), (DEAR_POOL, to(Mode.SPOT, SPOT))])
def test_machines_that_stand_ready_do_not_take_over_where_that_takes_longer_than_there_is_time(
    held, choice, spare, moves
):
    other = choice.offer.pool
    timely = replace(choice, spare=timedelta(seconds=spare) if spare is not None else None)
    both = works(held, timely, fresh("c", other), fresh("d", other), of_state=asked(other))
    assert isinstance(decide(GOAL, both, RULES), EndAttempt) is moves


@pytest.mark.parametrize(
    ("asked_ago", "by", "readiness", "expected"),
    [
        (29, 1, Readiness.READY, Wait(why="running")),  # one that works may be interrupted, and the pace measured anew
        (30, 1, Readiness.READY, Dismiss()),
        (30, 1, Readiness.PREPARING, Dismiss()),
        (30, 0, Readiness.PREPARING, Wait(why="running")),
        (3600, 1, Readiness.READY, Dismiss()),
    ],
)
def test_machines_that_may_not_take_over_are_given_back_after_a_changeover(asked_ago, by, readiness, expected):
    """Both are paid, and what works goes on to its end: they stood there for hours."""
    limits = Limits(changeover=timedelta(seconds=30))
    since = {"successor": replace(asked()["successor"], at=NOW - timedelta(seconds=asked_ago))}
    beside = [fresh(i, readiness=readiness) for i in "cd"]
    both = works(POOL, late(by), *beside, of_state=since)
    assert decide(GOAL, both, Rules(limits=limits)) == expected


def test_who_takes_a_job_over_gives_none_back_before_it_has_heard_how_far_the_job_has_come():
    """By the steps that are known all work of meanwhile is to do still, and the change seems late."""
    since = {"successor": replace(asked()["successor"], at=NOW - timedelta(hours=1))}
    owner = Owner(id="s2", host="h", pid=1, started="1", since=NOW)
    attempt = (opened("a", "b", last_step_at=NOW - timedelta(minutes=30)),)
    new = works(POOL, late(1), fresh("c"), fresh("d"), of_state={**since, "attempts": attempt, "owner": owner})
    assert decide(GOAL, new, RULES) == Wait(why="running")
    known = replace(new.state, owner=replace(owner, since=NOW - timedelta(minutes=40)))
    assert decide(GOAL, replace(new, state=known), RULES) == Dismiss()


def test_machines_are_held_a_changeover_or_while_a_save_is_awaited_for_them():
    def given_back(saved, asked_ago):
        since = {"successor": replace(asked()["successor"], at=NOW - timedelta(minutes=asked_ago))}
        at_work = (opened("a", "b", last_step_at=NOW - timedelta(minutes=saved), apart_s=7200.0),)
        beside = [up(i, pool=DEAR_POOL, launched_at=NOW - timedelta(minutes=asked_ago)) for i in "cd"]
        world = works(POOL, late(60), *beside, of_state={**since, "attempts": at_work})
        return decide(replace(GOAL, saves_unasked=True), world, RULES) == Dismiss()

    assert [given_back(70, ago) for ago in (11, 12, 34, 35)] == [False, False, False, True]
    assert [given_back(5, ago) for ago in (11, 12)] == [False, True]


def test_none_are_asked_for_that_could_not_take_over_in_time():
    assert decide(GOAL, works(POOL, late(1)), RULES) == Wait(why="running")
    assert decide(GOAL, works(POOL, late(0)), RULES) == Appoint(offer=DEAR)
    in_vain = works(POOL, late(1), group_size=4)
    assert decide(GOAL, in_vain, RULES) == Resize(size=2)


@pytest.mark.parametrize(("by", "leaves"), [(-359, False), (-360, True)])
def test_what_works_is_not_given_up_for_machines_that_would_begin_to_boot_too_late(by, leaves):
    """None can stand beside: a boot of 6 min comes before them."""
    alone = works(POOL, late(by), payable_with_successor=None)
    assert isinstance(decide(GOAL, alone, RULES), EndAttempt) is leaves


def test_machines_that_cannot_be_made_ready_to_take_over_are_given_back_and_their_pool_left_alone():
    """What works goes on, and both were paid for as long as it did."""
    failed = works(POOL, WANTED, fresh("c"), fresh("d", readiness=Readiness.FAILED), of_state=asked())
    action = decide(GOAL, failed, RULES)
    assert isinstance(action, CoolDown)
    assert (action.pool, action.code, action.message) == (DEAR_POOL, "Unprepared", "d could not be made ready")
    assert (action.length, action.longest) == (timedelta(minutes=5), timedelta(minutes=30))
    own = up("e", pool=POOL, readiness=Readiness.FAILED)
    beside = works(POOL, WANTED, fresh("c"), fresh("d", readiness=Readiness.PREPARING), own, of_state=asked())
    assert decide(GOAL, beside, RULES) == Wait(why="running")


@pytest.mark.parametrize(
    ("capacity_choice", "changes", "expected"),
    [
        (to(Mode.SPOT, SPOT), {"group_size": 0}, Resize(size=2)),
        (to(Mode.SPOT), {"group_size": 0}, Resize(size=2)),  # in its own pool, which nobody needs to offer again
        (to(Mode.IDLE), {"group_size": 2}, Resize(size=0)),
        (to(Mode.IDLE), {"group_size": 0}, Wait(why="waiting: why")),
        (to(Mode.ON_DEMAND, DEAR), {"group_size": 2}, Resize(size=0)),
        (to(Mode.ON_DEMAND, DEAR), {"group_size": 0}, Move(offer=DEAR)),
        (to(Mode.SPOT, OTHER), {"group_size": 0}, Move(offer=OTHER)),
    ],
)
def test_machines_come_from_where_the_course_says_and_a_job_that_waits_has_none(capacity_choice, changes, expected):
    assert decide(GOAL, between(capacity_choice=capacity_choice, **changes), RULES) == expected


def test_no_patience_ends_a_job_that_waits_for_its_deadline():
    long_ago = between(capacity_choice=to(Mode.IDLE), group_size=0, candidates=(SPOT,), of_state={"cooldowns": ()})
    assert decide(GOAL, replace(long_ago, now=NOW + timedelta(hours=9)), RULES) == Wait(
        why="waiting: why (as of 12:00:00 UTC)"
    )


def test_a_pool_that_refuses_is_asked_again_after_five_minutes_each_time():
    refused = between(capacity_choice=to(Mode.SPOT, SPOT), group_size=2, refusals=(refusal(),))
    action = decide(GOAL, refused, RULES)
    assert (action.pool, action.length, action.longest) == (POOL, timedelta(minutes=5), timedelta(minutes=5))


# Money


def test_the_dearest_of_all_machines_counts_for_as_long_as_one_of_them_may_live():
    intervals = (UsageInterval(node_id="a", pool=POOL, launched_at=NOW),)
    alone = state(nodes=intervals)
    asks = transitions.appoint(alone, Appoint(offer=DEAR), NOW)
    taken = transitions.take_over(asks, NOW)
    given_back = transitions.dismiss(asks)
    assert [one.dearest_usd_per_hour for one in (alone, asks, given_back)] == [
        Decimal("0.9"),
        Decimal("1.2"),
        Decimal("1.2"),
    ]
    back = transitions.appoint(taken, Appoint(offer=SPOT), NOW)
    assert transitions.take_over(back, NOW).dearest_usd_per_hour == Decimal("1.2")


@pytest.mark.parametrize(
    ("nodes", "size", "left"),
    [
        ((up("a", pool=DEAR_POOL), up("b")), 2, "1.2"),  # one of the dear ones lives
        ((up("a"),), 2, "1.2"),  # one may be on its way
        ((up("a"), up("b")), 2, "0"),
        ((gone("c"), up("a")), 1, "0"),
    ],
)
def test_what_was_left_is_forgotten_when_nothing_of_it_lives(nodes, size, left):
    before = state(left_usd_per_hour=Decimal("1.2"))
    assert transitions.record(snapshot(*nodes, group_size=size, state=before)).left_usd_per_hour == Decimal(left)


def test_a_job_that_turns_elsewhere_while_a_machine_still_leaves_pays_the_dearer_of_both():
    leaving = state(
        nodes=(UsageInterval(node_id="a", pool=DEAR_POOL, launched_at=NOW),), cap_usd_per_hour=Decimal("1.2")
    )
    moved = transitions.move(leaving, Move(offer=OTHER), "gpucloud-digits", NOW)
    assert (moved.cap_usd_per_hour, moved.dearest_usd_per_hour) == (Decimal("0.9"), Decimal("1.2"))
    assert transitions.move(replace(leaving, nodes=()), Move(offer=OTHER), None, NOW).dearest_usd_per_hour == Decimal(
        "0.9"
    )


def test_no_machines_are_asked_for_beside_others_that_the_cloud_would_refuse_so_near_to_their_shut_off():
    rules = Rules(prepaid_rule=PrepaidRule(ahead=timedelta(seconds=135)))
    soon, late = NOW + timedelta(seconds=134), NOW + timedelta(seconds=135)
    turning = to(Mode.ON_DEMAND, DEAR)
    assert isinstance(decide(GOAL, works(POOL, turning, payable_with_successor=late, armed=late), rules), Appoint)
    near = works(POOL, turning, payable_with_successor=soon, payable_until=soon, lasts_until=soon, armed=soon)
    assert not isinstance(decide(GOAL, near, rules), Appoint | Arm)
    asked = {"of_state": {"successor": Successor(pool=DEAR_POOL, cap_usd_per_hour=Decimal("1.2"), at=NOW)}}
    assert decide(GOAL, works(POOL, turning, armed=late, payable_until=late, **asked), rules) == Resize(size=4)
    assert not isinstance(decide(GOAL, works(POOL, turning, armed=soon, payable_until=soon, **asked), rules), Resize)
