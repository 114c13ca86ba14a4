"""A job on a range of nodes: when it starts on a part, when it goes on with fewer, and when it grows again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucloud.domain.job.spec import Market, Policy
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.status import OUTPUT, Outcome, Stop
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import Attempt, ExitReason, Interruption, InterruptionKind, Member, Successor
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    CloseAttempt,
    CoolDown,
    Done,
    EndAttempt,
    Finish,
    OpenAttempt,
    Replace,
    Resize,
    Wait,
)
from gpucloud.domain.supervision.deadline import observed, situation, task_of
from gpucloud.domain.supervision.elastic import enough_since
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import DriveTrial, Goal, Limits, Readiness, Rules
from tests.unit.test_capacity_decision import OFFERS
from tests.unit.worlds import NOW, OTHER_POOL, POOL, gone, opened, part, refusal, snapshot, state, up

GOAL = Goal(nodes=4, budget_usd=Decimal(100), least_nodes=2)
# Nothing was measured: a changeover is taken to be 12 min, and what remains of it between ready machines 6 min.
RULES = Rules(limits=Limits(changeover=timedelta(minutes=12)))


def minutes(number):
    return timedelta(minutes=number)


def ago(number):
    return NOW - minutes(number)


def boots(node_id, launched=5.0, **changes):
    return up(node_id, readiness=Readiness.PREPARING, launched_at=ago(launched), **changes)


def world(*nodes, **changes):
    return snapshot(*nodes, **{"group_size": 4, **changes})


def at_work(*node_ids, since=30.0, **changes):
    """An attempt on these nodes that has made steps for so many minutes."""
    return replace(opened(*node_ids, **changes), started_at=ago(since + 1), stepped_at=ago(since))


def training(*nodes, attempt, **changes):
    plain = {"attempts": (attempt,), **changes.pop("of_state", {})}
    return world(*nodes, state=state(**plain), **changes)


def members(*node_ids, age=120.0):
    return tuple(up(node_id, part(step=30), launched_at=ago(age)) for node_id in node_ids)


# Before an attempt


def test_all_nodes_are_asked_for():
    assert decide(GOAL, world(group_size=0), RULES) == Resize(size=4)


def test_fewer_than_the_least_are_waited_for():
    assert decide(GOAL, world(up("a"), boots("b")), RULES) == Wait(why="bootstrap")


@pytest.mark.parametrize(
    ("nodes", "waited", "starts"),
    [
        # Launched with those that are ready, the others are about to be: for as long as a restart would take.
        ((up("a"), up("b"), boots("c"), boots("d")), 0, None),
        ((up("a"), up("b"), boots("c"), boots("d")), 5.9, None),
        ((up("a"), up("b"), boots("c"), boots("d")), 6, "ab"),
        # What comes so much later is not waited for, nor what takes longer than a whole start, nor what is not there.
        ((up("a", launched_at=ago(8)), up("b", launched_at=ago(8)), boots("c", 1)), 0, "ab"),
        ((up("a", launched_at=ago(13)), up("b", launched_at=ago(13)), boots("c", 12.5)), 0, "ab"),
        ((up("a"), up("b")), 0, "ab"),
        # Nor what is being taken, or cannot be reached.
        ((up("a"), up("b"), up("c", notice=True)), 0, "ab"),
        # All of them need not wait.
        ((up("a"), up("b"), up("c"), up("d")), 0, "abcd"),
    ],
)
def test_an_attempt_starts_on_a_part_when_waiting_would_cost_more_than_a_restart(nodes, waited, starts):
    noted = (Interruption(node_id="c", kind=InterruptionKind.NOTICE, attempt=None, noticed_at=NOW),)
    seen_now = world(
        *nodes, enough_at=ago(waited), payable_with_another=None, state=state(interruptions=noted), group_size=4
    )
    action = decide(GOAL, seen_now, RULES)

    if starts is None:
        assert isinstance(action, Wait)
        assert action.why.startswith("waiting for more machines, at the latest until ")
        assert action.why.endswith(" UTC: 2 of 4 are ready")
    else:
        assert action == OpenAttempt(number=1, node_ids=tuple(starts))


def test_those_that_are_left_over_go_on_at_once():
    lost = opened("a", "b", "c", reason=ExitReason.INTERRUPTED, last_step=9)  # it began a minute ago
    left = (up("a", launched_at=ago(2)), up("b", launched_at=ago(2)))
    seen_now = world(*left, gone("c"), boots("d", 0.5), state=state(attempts=(lost,)))

    assert decide(GOAL, seen_now, RULES) == OpenAttempt(number=2, node_ids=("a", "b"))


def test_machines_that_are_up_are_enough_for_up():
    assert decide(replace(GOAL, until=Until.READY), world(up("a"), up("b")), RULES) == Done()


def test_a_pool_that_gives_no_more_is_asked_again_now_and_then_and_given_up_only_below_the_least():
    enough = {"group_size": 2, "short_for": None}
    full = (refusal(ago=5),)
    assert decide(GOAL, world(up("a"), up("b"), refusals=full, **enough), RULES) == OpenAttempt(
        number=1, node_ids=("a", "b")
    )
    assert decide(GOAL, world(up("a"), up("b"), refusals=(refusal(ago=11),), **enough), RULES) == Resize(size=4)
    short = world(up("a"), group_size=4, refusals=full, short_for=RULES.limits.gang)
    assert isinstance(decide(GOAL, short, RULES), CoolDown)


def test_with_enough_machines_a_bootstrap_that_failed_elsewhere_does_not_end_the_job():
    nodes = (up("a", launched_at=ago(9)), up("b", launched_at=ago(9)), up("c", readiness=Readiness.FAILED))

    assert decide(GOAL, world(*nodes, failed_bootstraps=2), RULES) == Replace(node_ids=("c",))
    assert isinstance(decide(GOAL, world(nodes[0], nodes[2], failed_bootstraps=2), RULES), Finish)


def test_the_wait_begins_when_there_are_enough_and_a_supervisor_that_follows_goes_on_with_it():
    def since(*nodes, **changes):
        return enough_since(GOAL, world(*nodes, state=state(**changes)), RULES.limits)

    new = (up("a", readiness=Readiness.NO), up("b", readiness=Readiness.NO))
    assert since(up("a"), boots("b")) is None
    assert since(up("a"), up("b"), boots("c")) == NOW
    assert since(up("a"), up("b"), boots("c"), enough_at=ago(3)) == ago(3)
    assert since(*new) is None
    assert since(*new, enough_at=ago(3)) == ago(3)
    assert since(up("a"), up("b"), up("c"), up("d"), enough_at=ago(3)) is None
    assert since(up("a"), up("b"), enough_at=ago(3), attempts=(opened("a", "b"),)) is None
    assert enough_since(Goal(nodes=2, budget_usd=Decimal(1)), world(up("a"), up("b")), RULES.limits) is None


def test_what_was_waited_for_is_in_the_books():
    assert transitions.record(world(up("a"), up("b"), enough_at=ago(3))).enough_at == ago(3)


# While an attempt works


@pytest.mark.parametrize(
    ("size", "new", "since", "grows"),
    [
        # A restart of six minutes on three nodes is made up for in 18 minutes by one more, in nine by one more of two:
        # a machine is taken to stay as long as it has been there.
        (3, (18,), 30, True),
        (3, (17.9,), 30, False),
        (2, (12,), 30, True),
        (2, (6, 6), 30, True),
        (2, (5.9, 5.9), 30, False),
        (2, (20, 13), 30, True),
        # An attempt that has just begun is left alone.
        (3, (60,), 5.9, False),
        (3, (60,), 6, True),
    ],
)
def test_more_nodes_are_worth_a_new_attempt_when_they_make_up_for_it(size, new, since, grows):
    own = "abc"[:size]
    others = tuple(up("wxyz"[number], launched_at=ago(age)) for number, age in enumerate(new))
    action = decide(GOAL, training(*members(*own), *others, attempt=at_work(*own, since=since)), RULES)

    if grows:
        assert isinstance(action, EndAttempt)
        assert (action.how, action.reason) == (Stop.SAVE, ExitReason.RESIZED)
    else:
        assert action == Wait(why="running")


@pytest.mark.parametrize(
    ("why_not", "change"),
    [
        ("it is not known to save what it trains", {"attempt": replace(at_work("a", "b"), stepped_at=None)}),
        ("the rest of the work is over sooner", {"left": 4}),
        ("the money is gone sooner", {"budget_usd": Decimal("0.7")}),
        ("others take over", {"successor": Successor(pool=OTHER_POOL, cap_usd_per_hour=Decimal(1), at=NOW)}),
        ("it lies in another pool", {"pool": OTHER_POOL}),
        ("it is silent", {"silent": 5.0}),
    ],
)
def test_a_new_attempt_is_not_worth_it_when(why_not, change):
    def action(change):
        attempt = change.pop("attempt", at_work("a", "b"))
        left = change.pop("left", 900)
        steps = {"total_steps": 1000, "last_step": 1000 - left, "pace_s": 60.0, "last_step_at": NOW}
        spare = up("c", launched_at=ago(60), pool=change.pop("pool", POOL), silent=change.pop("silent", 0.0))
        wanted = replace(GOAL, budget_usd=change.pop("budget_usd", GOAL.budget_usd))
        of_state = {"attempts": (replace(attempt, **steps),), **change}
        return decide(wanted, training(*members("a", "b"), spare, attempt=attempt, of_state=of_state), RULES)

    assert action({}).reason is ExitReason.RESIZED
    assert not isinstance(action(change), EndAttempt), why_not


def test_a_machine_that_is_about_to_be_ready_too_is_waited_for():
    attempt = at_work("a", "b")
    one = up("c", launched_at=ago(13))
    both = training(*members("a", "b"), one, boots("d", 11.9), attempt=attempt)
    late = training(*members("a", "b"), one, boots("d", 12), attempt=attempt)

    assert decide(GOAL, both, RULES) == Wait(why="running")
    assert decide(GOAL, late, RULES).reason is ExitReason.RESIZED


def test_a_script_that_saves_when_it_likes_grows_when_it_has_just_saved():
    goal = replace(GOAL, saves_alone=True, saves_unasked=True)
    attempt = at_work("a", "b")
    spare = up("c", launched_at=ago(20))
    late = training(*members("a", "b"), spare, attempt=replace(attempt, last_step_at=ago(5)))
    just = training(*members("a", "b"), spare, attempt=replace(attempt, last_step_at=ago(1)))

    assert decide(goal, late, RULES) == Wait(why="running")
    assert decide(goal, just, RULES).reason is ExitReason.RESIZED
    assert decide(replace(GOAL, saves_alone=True), late, RULES).reason is ExitReason.RESIZED  # asked, it saves


def test_a_script_that_saves_nothing_grows_only_where_all_its_work_is_made_up_for():
    goal, spare = replace(GOAL, saves_nothing=True), up("c", launched_at=ago(60))
    said = [up(i, part(step=30, phase=OUTPUT), launched_at=ago(120)) for i in "ab"]
    old, young = at_work("a", "b", since=30.0), at_work("a", "b", since=10.0)

    assert decide(goal, training(*said, spare, attempt=old), RULES) == Wait(why="running")
    assert decide(goal, training(*said, spare, attempt=young), RULES).reason is ExitReason.RESIZED
    assert decide(GOAL, training(*said, spare, attempt=old), RULES).reason is ExitReason.RESIZED
    assert decide(goal, training(*members("a", "b"), spare, attempt=old), RULES).reason is ExitReason.RESIZED  # it told


def test_a_measured_restart_counts_and_not_the_guess():
    def ended(number):
        took = {"ending_at": ago(60) - timedelta(seconds=10), "ended_at": ago(60), "reason": ExitReason.RESIZED}
        return replace(at_work("a", "b", number=number, **took), started_at=ago(90.5), stepped_at=ago(90))

    own = replace(at_work("a", "b", number=4), started_at=ago(30.5))
    world_now = training(
        *(up(i, part(4, step=30), launched_at=ago(120)) for i in "ab"),
        up("c", launched_at=ago(1.5)),
        attempt=own,
        of_state={"attempts": (*map(ended, (1, 2, 3)), own)},
    )
    assert decide(GOAL, world_now, RULES).reason is ExitReason.RESIZED  # 40 s on two nodes, made up for in 80 s


def test_once_decided_the_ranks_save_and_leave_and_what_does_not_listen_is_killed():
    def after(seconds):
        ending_reason = {"ending_reason": ExitReason.RESIZED, "ending_at": NOW - timedelta(seconds=seconds)}
        attempt = at_work("a", "b", ordered=Stop.SAVE, **ending_reason)
        return training(*members("a", "b"), attempt=attempt)

    assert decide(GOAL, after(59), RULES) == Wait(why="running")
    assert decide(GOAL, after(60), RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.RESIZED)


def test_the_attempt_that_left_to_grow_is_followed_by_one_on_all():
    left = tuple(up(i, part(outcome=Outcome.LEFT)) for i in "ab")
    attempt = at_work("a", "b", ending_reason=ExitReason.RESIZED, ending_at=NOW, ordered=Stop.SAVE)
    assert decide(GOAL, training(*left, up("c"), attempt=attempt), RULES) == CloseAttempt(reason=ExitReason.RESIZED)

    closed = replace(attempt, reason=ExitReason.RESIZED, ended_at=NOW, last_step=30, saved_step=30)
    follows = training(up("a"), up("b"), up("c"), attempt=closed)
    assert decide(GOAL, follows, RULES) == OpenAttempt(number=2, node_ids=("a", "b", "c"))


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({"group_size": 2}, True),
        ({"group_size": 4}, False),  # the group tries by itself
        ({"group_size": 2, "refusals": (refusal(ago=299),)}, False),
        ({"group_size": 2, "refusals": (refusal(ago=300),)}, True),
        ({"group_size": 2, "payable_until": None}, False),
    ],
)
def test_machines_that_the_cloud_refused_are_asked_for_again_while_the_others_work(changes, asks):
    action = decide(GOAL, training(*members("a", "b"), attempt=at_work("a", "b"), **changes), RULES)
    assert (action == Resize(size=4)) is asks


@pytest.mark.parametrize(("seconds", "asks"), [(134, False), (135, True)])
def test_no_machine_is_asked_for_that_the_cloud_would_refuse_so_near_to_its_shut_off(seconds, asks):
    """Refused each time, it would be asked for in turns with all else that there is to do."""
    rules = Rules(prepaid_rule=PrepaidRule(ahead=timedelta(seconds=135)))
    armed = NOW + timedelta(seconds=seconds)
    short = {"group_size": 2, "armed": armed, "payable_until": armed, "payable_with_another": armed}
    action = decide(GOAL, training(*members("a", "b"), attempt=at_work("a", "b"), **short), rules)
    assert (action == Resize(size=4)) is asks
    action = decide(GOAL, snapshot(**{**short, "group_size": 0}), rules)
    assert action == (Resize(size=4) if asks else Wait(why="waiting for a later shut-off"))


def test_a_machine_that_cannot_take_part_is_replaced_while_the_others_work_but_not_for_ever():
    broken = up("c", readiness=Readiness.FAILED)
    world_now = training(*members("a", "b"), broken, attempt=at_work("a", "b"))

    assert decide(GOAL, replace(world_now, failed_bootstraps=1), RULES) == Replace(node_ids=("c",))
    assert decide(GOAL, replace(world_now, failed_bootstraps=2), RULES) == Wait(why="running")


def test_machines_that_were_dismissed_are_given_back_and_the_jobs_own_kept():
    stranger = up("x", pool=replace(POOL, market=Market.ON_DEMAND))
    world_now = training(*members("a", "b", "c"), stranger, attempt=at_work("a", "b", "c"))

    assert decide(GOAL, world_now, RULES) == Resize(size=3)


def test_where_a_deadline_is_kept_on_demand_an_attempt_has_all_nodes():
    on_demand = {"state": state(pool=replace(POOL, market=Market.ON_DEMAND)), "enough_at": ago(30)}
    two = tuple(up(i, pool=replace(POOL, market=Market.ON_DEMAND)) for i in "ab")
    assert decide(GOAL, world(*two, **on_demand), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))
    assert decide(replace(GOAL, policy=Policy.GREEDY), world(*two, **on_demand), RULES) == Wait(why="bootstrap")


def test_a_job_that_drives_itself_decides_alike():
    own = replace(GOAL, self_driving=True, within_rights=True)
    assert decide(own, world(group_size=2), RULES) == Resize(size=4)
    assert decide(own, world(up("a"), up("b")), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))

    attempt = at_work("a", "b")
    spare = up("c", launched_at=ago(12))
    assert decide(own, training(*members("a", "b"), attempt=attempt, group_size=2), RULES) == Resize(size=4)
    assert decide(own, training(*members("a", "b"), spare, attempt=attempt), RULES).reason is ExitReason.RESIZED


def test_a_job_on_its_own_machines_is_launched_when_enough_are_there():
    goal = replace(GOAL, until=Until.LAUNCHED, began_at=ago(10))
    able = DriveTrial(number=goal.number, refused=None)
    assert decide(goal, world(boots("a", trial=able), boots("b")), RULES) == Done()
    assert decide(goal, world(boots("a", trial=able)), RULES) != Done()


def test_a_policy_hears_what_part_of_its_nodes_a_job_has():
    goal = replace(
        GOAL, policy=Policy.GREEDY, first_at=NOW, deadline_at=NOW + timedelta(hours=9), work=timedelta(hours=6)
    )
    case = situation(goal, training(*members("a", "b", "c"), attempt=at_work("a", "b", "c"), candidates=OFFERS), RULES)

    assert case is not None
    assert (task_of(case).nodes, task_of(case).least_nodes) == (4, 2)
    assert (observed(case).holding.mode, observed(case).holding.nodes) == (Mode.SPOT, 3)
    assert [(zone.up, zone.nodes) for zone in observed(case).zones] == [(False, 3), (True, 0)]


# However machines come and go


@dataclass
class Model:
    """Machines that come and go while attempts work; only what `decide` says ends one."""

    dice: random.Random
    leaves: float
    attempt: Attempt | None = None
    machines: dict[str, float] = field(default_factory=dict)
    came: int = 0
    minute: float = 0.0
    grown: list[float] = field(default_factory=list)
    free_at: float = 0.0

    def tick(self):
        self.minute += 1
        for name in [name for name in self.machines if self.dice.random() < self.leaves]:
            del self.machines[name]
        if len(self.machines) < 4 and self.dice.random() < 0.2:
            self.came += 1
            self.machines[f"m{self.came}"] = self.minute
        own = [member.node_id for member in self.attempt.members] if self.attempt else []
        if not set(own) <= self.machines.keys():
            self.attempt, self.free_at = None, self.minute + 6
        if self.attempt is None:
            self.open()
        elif self.grows():
            self.grown.append(self.minute)
            self.attempt, self.free_at = None, self.minute + 6

    def open(self):
        if self.minute >= self.free_at and len(self.machines) >= 2:
            who = tuple(Member(node_id=name, rank=rank) for rank, name in enumerate(self.machines))
            at = NOW + minutes(self.minute)
            self.attempt = Attempt(number=1, members=who, port=1, started_at=at, stepped_at=at)

    def grows(self):
        own = {member.node_id for member in self.attempt.members}
        nodes = (
            up(name, part(step=30) if name in own else None, launched_at=NOW + minutes(launched))
            for name, launched in self.machines.items()
        )
        now = NOW + minutes(self.minute)
        found = training(*nodes, attempt=self.attempt, now=now, armed=now + minutes(30))
        action = decide(GOAL, found, RULES)
        return isinstance(action, EndAttempt) and action.reason is ExitReason.RESIZED


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), leaves=st.sampled_from((0.0, 0.005, 0.05, 0.2)))
def test_growing_never_takes_more_than_half_of_the_time_nor_happens_more_often_than_machines_come(seed, leaves):
    model = Model(random.Random(seed), leaves)
    for _ in range(240):
        model.tick()

    assert len(model.grown) <= model.came
    assert all(later - earlier >= 12 for earlier, later in zip(model.grown, model.grown[1:], strict=False))
    if not leaves:
        assert model.attempt is not None
        assert len(model.attempt.members) == 4
        assert len(model.grown) <= 2
