"""What a job with a deadline is to run on: spot while it can wait, on demand when it cannot, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.job.spec import Market, Policy
from gpucloud.domain.market.policies import Choice, Mode, Reason
from gpucloud.domain.node.status import OUTPUT
from gpucloud.domain.offer import EfaLayout, Offer
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import CheckpointRef, ExitReason, Owner, Shortfall, Successor, UsageInterval
from gpucloud.domain.supervision.capacity import can_overlap
from gpucloud.domain.supervision.deadline import capacity_choice, lesson
from gpucloud.domain.supervision.snapshot import Goal, Limits, Readiness, Rules
from gpucloud.domain.supervision.transitions import with_steps
from tests.unit.worlds import NOW, OTHER_POOL, POOL, cooldown, opened, part, snapshot, state, up

# A start takes 12 min as long as none was seen: the nets of a job with 6 h of work are at 24 min and 12 min of slack.
RULES = Rules(limits=Limits(changeover=timedelta(minutes=12)))
DEAR = replace(POOL, market=Market.ON_DEMAND)
WORK = timedelta(hours=6)


STEPS = {"total_steps": 720, "last_step": 360, "pace_s": 60.0, "last_step_at": NOW}


def hours(number):
    return timedelta(hours=number)


def minutes(number):
    return timedelta(minutes=number)


def priced(pool, usd):
    return Offer(pool=pool, usd_per_hour=Decimal(usd), cap_usd_per_hour=Decimal("1"), as_of=NOW, gpus=1)


OFFERS = (priced(POOL, "0.3"), priced(OTHER_POOL, "0.4"), priced(DEAR, "1"))
DOWN = (cooldown(POOL), cooldown(OTHER_POOL))


def goal(slack, policy=Policy.GREEDY, work=WORK, **changes):
    """A goal with 6 h of work and so much more time."""
    plain = {"budget_usd": Decimal(20), "policy": policy, "work": work}
    plain.update({"first_at": NOW, "deadline_at": NOW + work + slack})
    return Goal(**{"nodes": 1, **plain, **changes})


def world(*nodes, **changes):
    """A job that began now, with money for everything; one machine is wanted."""
    of_state = {"paid_until": None, **changes.pop("of_state", {})}
    plain = {"group_size": len(nodes), "candidates": OFFERS, "state": state(**of_state)}
    return snapshot(*nodes, **{**plain, **changes})


def working(pool, **changes):
    """A machine of the pool on which an attempt steps: half of its 12 h of work are done, without any time used."""
    attempt = opened("a", stepped_at=NOW - minutes(1), **STEPS)
    return world(up("a", pool=pool), of_state={"pool": pool, "attempts": (attempt,), **changes})


def where(found):
    return (found.mode, found.offer.pool if found.offer is not None else None)


@pytest.mark.parametrize(
    ("policy", "slack", "cooldowns", "expected"),
    [
        (Policy.GREEDY, minutes(60), (), (Mode.SPOT, POOL)),
        (Policy.GREEDY, minutes(60), (cooldown(POOL),), (Mode.SPOT, OTHER_POOL)),
        (Policy.GREEDY, minutes(60), DOWN, (Mode.IDLE, None)),
        (Policy.GREEDY, minutes(24), (), (Mode.SPOT, POOL)),
        (Policy.GREEDY, minutes(23), (), (Mode.ON_DEMAND, DEAR)),
        (Policy.GREEDY, minutes(23), DOWN, (Mode.ON_DEMAND, DEAR)),
        (Policy.UNIFORM, minutes(60), (), (Mode.SPOT, POOL)),
        (Policy.LEARNED, minutes(60), (), (Mode.SPOT, POOL)),
        (Policy.ON_DEMAND, hours(60), (), (Mode.ON_DEMAND, DEAR)),
        # A pool whose cooldown is over is worth another try.
        (Policy.GREEDY, minutes(60), (cooldown(POOL, left=-1.0),), (Mode.SPOT, POOL)),
        # Nobody has machines on demand for a moment: spot is better than nothing.
        (Policy.GREEDY, minutes(20), (cooldown(DEAR),), (Mode.ON_DEMAND, POOL)),
        (Policy.GREEDY, minutes(20), (cooldown(DEAR), *DOWN), (Mode.IDLE, None)),
    ],
)
def test_without_machines(policy, slack, cooldowns, expected):
    assert where(capacity_choice(goal(slack, policy), world(of_state={"cooldowns": cooldowns}), RULES)) == expected


def test_behind_the_straight_line_uniform_progress_turns_to_machines_on_demand():
    late = world(of_state={"cooldowns": DOWN})
    assert capacity_choice(goal(hours(3), Policy.UNIFORM, first_at=NOW - hours(1)), late, RULES).mode is Mode.ON_DEMAND
    assert capacity_choice(goal(hours(3), Policy.GREEDY, first_at=NOW - hours(1)), late, RULES).mode is Mode.IDLE


@pytest.mark.parametrize(
    ("slack", "successor", "mode"),
    [
        (minutes(60), None, Mode.SPOT),
        (minutes(12), None, Mode.SPOT),
        (minutes(11), None, Mode.ON_DEMAND),  # taken now, it would be late: others take over while it works
        (minutes(17), Successor(pool=DEAR, cap_usd_per_hour=Decimal(1), at=NOW), Mode.ON_DEMAND),  # not in turns
        (minutes(18), Successor(pool=DEAR, cap_usd_per_hour=Decimal(1), at=NOW), Mode.SPOT),
        (minutes(5), None, Mode.SPOT),  # too late for a change: what works goes on
    ],
)
def test_spot_machines_that_work(slack, successor, mode):
    assert capacity_choice(goal(slack), working(POOL, successor=successor), RULES).mode is mode


@pytest.mark.parametrize(
    ("reason", "mode"), [(Reason.ASKED, Mode.SPOT), (Reason.EXPECTED, Mode.SPOT), (Reason.BUDGET, Mode.ON_DEMAND)]
)
def test_spot_machines_that_work_are_left_alone_where_a_change_is_too_late_whoever_asks_for_it(
    monkeypatch, reason, mode
):
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", Says(Mode.ON_DEMAND, reason=reason))
    late = capacity_choice(goal(minutes(5)), working(POOL), RULES)
    assert late.mode is mode
    assert late.spare == (None if reason is Reason.BUDGET else -minutes(1))
    assert capacity_choice(goal(minutes(6)), working(POOL), RULES).mode is Mode.ON_DEMAND


@pytest.mark.parametrize(("left", "mode"), [(minutes(6), Mode.ON_DEMAND), (minutes(5), Mode.SPOT)])
def test_a_part_of_the_nodes_is_left_where_the_change_gains_time_though_it_comes_late(left, mode):
    """Half of the nodes take twice as long for the rest: 6 min more where 6 min are left, as long as the change."""
    world_now = working(POOL)
    steps = {"total_steps": 720, "last_step": 720 - left // minutes(1) * 2, "pace_s": 60.0}
    attempt = replace(world_now.state.attempts[0], **steps, last_step_at=NOW)
    half = replace(world_now, state=replace(world_now.state, attempts=(attempt,)))
    two = goal(minutes(0), nodes=2, least_nodes=1, deadline_at=NOW + left)
    found = capacity_choice(two, half, RULES)
    assert (found.mode, found.spare) == (mode, left - minutes(6))


def test_none_are_bought_to_take_over_from_a_script_that_begins_anew_with_them():
    """While they boot it works on, and all of that would be lost as well: it never moves to them."""
    printing = replace(working(POOL), nodes=(up("a", part(1, step=360, phase=OUTPUT), pool=POOL),))
    attempt = replace(printing.state.attempts[0], started_at=NOW - minutes(2))
    young = replace(printing, state=replace(printing.state, attempts=(attempt,)))
    assert capacity_choice(goal(minutes(11), saves_nothing=True), young, RULES).mode is Mode.SPOT
    assert capacity_choice(goal(minutes(11)), young, RULES).mode is Mode.ON_DEMAND


@pytest.mark.parametrize(("slack", "mode"), [(8, Mode.SPOT), (9, Mode.ON_DEMAND)])
def test_where_some_were_bought_in_vain_others_are_bought_only_with_more_time(slack, mode):
    began = {"started_at": NOW - hours(1), "stepped_at": NOW - minutes(54)}
    attempt = replace(working(POOL).state.attempts[0], **began)
    vain = UsageInterval(node_id="b", pool=DEAR, launched_at=NOW - minutes(40), ended_at=NOW - minutes(20))
    before = replace(vain, launched_at=NOW - minutes(70))
    assert capacity_choice(goal(minutes(slack)), working(POOL, attempts=(attempt,), nodes=(vain,)), RULES).mode is mode
    never = working(POOL, attempts=(attempt,), nodes=(before,))
    assert capacity_choice(goal(minutes(6)), never, RULES).mode is Mode.ON_DEMAND


def test_no_change_is_made_that_costs_more_work_than_there_is_time_for():
    def mode(saved, **changes):
        world_now = working(POOL)
        attempt = replace(world_now.state.attempts[0], last_step_at=NOW - minutes(saved))
        now = replace(world_now, state=replace(world_now.state, attempts=(attempt,)))
        return capacity_choice(goal(minutes(10), **changes), now, RULES).mode

    unasked = {"saves_unasked": True}
    assert [mode(saved, **unasked) for saved in (0, 30)] == [Mode.ON_DEMAND, Mode.SPOT]
    assert mode(30) is Mode.ON_DEMAND  # it saves when it is asked


def test_a_script_whose_saves_are_no_longer_seen_is_kept_where_it_is_as_one_that_saves_nothing():
    def mode(saved, apart_s, **changes):
        world_now = working(DEAR, checkpoint=CheckpointRef(step=3, sha256="a" * 64))
        attempt = replace(world_now.state.attempts[0], last_step_at=NOW - hours(saved), apart_s=apart_s)
        now = replace(world_now, state=replace(world_now.state, attempts=(attempt,)))
        return capacity_choice(goal(hours(80), Policy.UNIFORM, **changes), now, RULES).mode

    hourly = 3600.0
    assert [mode(saved, hourly, saves_unasked=True) for saved in (1, 2, 20)] == [
        Mode.SPOT,
        Mode.ON_DEMAND,
        Mode.ON_DEMAND,
    ]
    assert mode(1, None, saves_unasked=True) is Mode.ON_DEMAND  # none came yet
    assert mode(20, hourly) is Mode.SPOT  # it saves when it is asked


def test_a_script_that_saves_nothing_is_kept_where_it_is_as_with_checkpoint_none():
    printing = up("a", part(1, step=360, phase=OUTPUT), pool=DEAR)
    silent = replace(working(DEAR), nodes=(printing,))
    assert capacity_choice(goal(hours(40), Policy.UNIFORM), silent, RULES).mode is Mode.SPOT
    assert capacity_choice(goal(hours(40), Policy.UNIFORM, saves_nothing=True), silent, RULES).mode is Mode.ON_DEMAND
    kept = replace(silent, state=replace(silent.state, checkpoint=CheckpointRef(step=3, sha256="a" * 64)))
    assert (
        capacity_choice(goal(hours(40), Policy.UNIFORM, saves_nothing=True), kept, RULES).mode is Mode.SPOT
    )  # its word counts


@pytest.mark.parametrize(("slack", "mode"), [(minutes(20), Mode.SPOT), (minutes(18), Mode.ON_DEMAND)])
def test_spot_machines_that_boot_for_longer_than_was_thought_are_given_up(slack, mode):
    """The machine was launched 5 min ago: 7 min of its start are to come, and another start must still fit in."""
    boots = world(up("a", readiness=Readiness.NO))
    assert capacity_choice(goal(slack), boots, RULES).mode is mode


def test_machines_that_are_too_few_are_nothing_yet_and_are_asked_for_where_the_others_are():
    half = world(up("a", pool=OTHER_POOL), group_size=2, of_state={"pool": OTHER_POOL})
    two = replace(goal(minutes(60)), nodes=2)
    assert where(capacity_choice(two, half, RULES)) == (Mode.SPOT, OTHER_POOL)
    assert capacity_choice(replace(two, deadline_at=NOW + WORK + minutes(20)), half, RULES).mode is Mode.ON_DEMAND


def test_machines_on_demand_are_left_for_spot_only_where_those_can_stand_beside():
    ahead = goal(hours(40), Policy.UNIFORM)
    assert where(capacity_choice(ahead, working(DEAR), RULES)) == (Mode.SPOT, POOL)
    elsewhere = tuple(replace(one, gpu="A100") if one.pool.market is Market.SPOT else one for one in OFFERS)
    assert capacity_choice(ahead, replace(working(DEAR), candidates=elsewhere), RULES).mode is Mode.ON_DEMAND
    assert capacity_choice(goal(hours(40), Policy.GREEDY), working(DEAR), RULES).mode is Mode.ON_DEMAND


def test_machines_with_efa_stand_beside_others_of_their_zone_only():
    fabric = EfaLayout(interfaces=4, cards=4)
    there = replace(OFFERS[0], efa=fabric)
    state = replace(working(DEAR).state, efa=(fabric,), gpu=there.gpu, pool=replace(DEAR, zone=there.pool.zone))
    assert can_overlap(there, state)
    near = replace(there, pool=replace(there.pool, zone=there.pool.zone[:-1] + "z"))
    assert not can_overlap(near, state)
    assert can_overlap(replace(near, efa=EfaLayout()), replace(state, efa=(EfaLayout(),)))


def test_machines_on_demand_stay_while_the_others_boot_and_the_deadline_asks_for_them():
    successor = Successor(pool=POOL, cap_usd_per_hour=Decimal(1), at=NOW)
    both = working(DEAR, successor=successor)
    assert capacity_choice(goal(minutes(11), Policy.UNIFORM), both, RULES).mode is Mode.ON_DEMAND
    assert capacity_choice(goal(hours(40), Policy.UNIFORM), both, RULES).mode is Mode.SPOT


class Says:
    """Stands for the policies: it says the same, whatever is seen."""

    def __init__(self, mode, zone=None, reason=Reason.EXPECTED):
        self.choice = Choice(mode=mode, zone=zone, reason=reason)

    def __call__(self, *_):
        return self.choice


BESIDE = Successor(pool=POOL, cap_usd_per_hour=Decimal(1), at=NOW)


@pytest.mark.parametrize(
    ("successor", "ready", "says", "slack", "mode"),
    [
        # Machines on demand do not wait.
        (None, False, Says(Mode.IDLE), hours(5), Mode.ON_DEMAND),
        # Those that were asked for beside them are waited for and take over, though the policy would not ask now …
        (BESIDE, False, Says(Mode.ON_DEMAND), hours(5), Mode.BOTH),
        (BESIDE, False, Says(Mode.IDLE), hours(5), Mode.BOTH),
        (BESIDE, True, Says(Mode.ON_DEMAND), hours(5), Mode.SPOT),
        (BESIDE, True, Says(Mode.BOTH, str(POOL)), hours(5), Mode.SPOT),
        # … but not where the deadline or the budget stands against it.
        (BESIDE, True, Says(Mode.ON_DEMAND), minutes(17), Mode.ON_DEMAND),
        (BESIDE, False, Says(Mode.ON_DEMAND, reason=Reason.DEADLINE), hours(5), Mode.ON_DEMAND),
        (BESIDE, True, Says(Mode.ON_DEMAND, reason=Reason.BUDGET), hours(5), Mode.ON_DEMAND),
    ],
)
def test_what_was_begun_is_ended_before_another_mind_counts(monkeypatch, successor, ready, says, slack, mode):
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", says)
    works = working(DEAR, successor=successor)
    if ready:
        both = (*works.nodes, up("b"))
        works = replace(works, nodes=both, group=replace(works.group, nodes=tuple(n.node for n in both), size=2))
    assert capacity_choice(goal(slack), works, RULES).mode is mode


SAYS_DEAR = Says(Mode.ON_DEMAND)


class TakesSpot(Says):
    """Says the same as long as no spot pool can be asked, and spot where one can."""

    def __call__(self, _policy, task, observation, _tables=None):
        cheaper = [zone for zone in observation.zones if zone.usd_per_hour < task.on_demand_usd_per_hour]
        up = next((zone.zone for zone in cheaper if zone.up), None)
        return self.choice if up is None else Choice(mode=Mode.SPOT, zone=up, reason=Reason.EXPECTED)


DEAR_WITHOUT_SPOT = TakesSpot(Mode.ON_DEMAND)
OLD, NEW = {"ago": 285.0, "left": 15.0}, {"ago": 10.0, "left": 290.0}  # a pool is excluded for 5 min
ALL_OLD = (cooldown(POOL, **OLD), cooldown(OTHER_POOL, **OLD))


@pytest.mark.parametrize(
    ("cooldowns", "says", "slack", "mode"),
    [
        # What is known of spot is old, and the answer to the next question is near: that costs nothing.
        (ALL_OLD, DEAR_WITHOUT_SPOT, hours(5), Mode.IDLE),
        (ALL_OLD, TakesSpot(Mode.ON_DEMAND, reason=Reason.BEHIND), hours(5), Mode.IDLE),
        # One pool refused just now: it is known how things stand, however soon another may be asked.
        ((cooldown(POOL, **OLD), cooldown(OTHER_POOL, **NEW)), DEAR_WITHOUT_SPOT, hours(5), Mode.ON_DEMAND),
        ((cooldown(POOL, **NEW), cooldown(OTHER_POOL, **NEW)), DEAR_WITHOUT_SPOT, hours(5), Mode.ON_DEMAND),
        # All refused in one breath, and one was asked again just now: the other may be in a moment.
        ((cooldown(POOL, left=8.0), cooldown(OTHER_POOL, left=299.0)), DEAR_WITHOUT_SPOT, hours(5), Mode.IDLE),
        # The deadline leaves no time to try spot then, or it is not the cost that asks for machines on demand.
        (ALL_OLD, DEAR_WITHOUT_SPOT, minutes(24), Mode.ON_DEMAND),
        (ALL_OLD, TakesSpot(Mode.ON_DEMAND, reason=Reason.DEADLINE), hours(5), Mode.ON_DEMAND),
        (ALL_OLD, TakesSpot(Mode.ON_DEMAND, reason=Reason.BUDGET), hours(5), Mode.ON_DEMAND),
        (ALL_OLD, TakesSpot(Mode.ON_DEMAND, reason=Reason.ASKED), hours(5), Mode.ON_DEMAND),
        # Spot would not be taken, were it there.
        (ALL_OLD, SAYS_DEAR, hours(5), Mode.ON_DEMAND),
    ],
)
def test_spot_is_asked_before_machines_on_demand_are_bought_on_old_news(monkeypatch, cooldowns, says, slack, mode):
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", says)
    waits = world(of_state={"cooldowns": cooldowns})
    assert capacity_choice(goal(slack), waits, RULES).mode is mode
    useless = priced(replace(OTHER_POOL, instance_type="p5.48xlarge"), "9")  # spot that costs more than on demand
    assert capacity_choice(goal(slack), replace(waits, candidates=(*OFFERS, useless)), RULES).mode is mode


@pytest.mark.parametrize("says", [Says(Mode.SPOT, str(POOL)), Says(Mode.BOTH, str(POOL)), Says(Mode.IDLE)])
@pytest.mark.parametrize("nodes", [2, 1])
def test_machines_on_demand_that_were_just_bought_are_not_left_before_they_work(monkeypatch, says, nodes):
    """Their minimum is charged, and spot that may be asked again is not there yet: with machines missing, too."""
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", says)
    bought = [up(name, pool=DEAR, readiness=Readiness.NO) for name in ("a", "b")[:nodes]]
    boots = world(*bought, group_size=2, of_state={"pool": DEAR})
    assert where(capacity_choice(replace(goal(hours(5)), nodes=2), boots, RULES)) == (Mode.ON_DEMAND, DEAR)


@pytest.mark.parametrize("slack", [minutes(5), minutes(12), minutes(18), hours(3)])
def test_machines_on_demand_that_were_bought_beside_are_kept_however_the_slack_turns(slack):
    """A pace that is measured anew moves the slack over each of the nets: in turns bought, and given back unused."""
    successor = Successor(pool=DEAR, cap_usd_per_hour=Decimal(1), at=NOW)
    both = working(POOL, successor=successor)
    nodes = (*both.nodes, up("b", pool=DEAR, readiness=Readiness.NO))
    bought = replace(both, nodes=nodes, group=replace(both.group, nodes=tuple(n.node for n in nodes), size=2))
    assert where(capacity_choice(goal(slack), bought, RULES)) == (Mode.ON_DEMAND, DEAR)
    only_raised = replace(both, group=replace(both.group, size=2))
    assert where(capacity_choice(goal(slack), only_raised, RULES)) == (Mode.ON_DEMAND, DEAR)
    held = capacity_choice(goal(slack), bought, RULES)
    assert held.spare == slack - minutes(6)
    # Nor are they left when what worked beside them is interrupted, or for another pool that costs less by then.
    over = replace(both.state.attempts[0], ended_at=NOW, reason=ExitReason.INTERRUPTED)
    alone = replace(bought, state=replace(bought.state, attempts=(over,)))
    cheaper = priced(replace(DEAR, zone="us-east-2c"), "0.9")
    offered = replace(alone, candidates=(cheaper, *OFFERS))
    assert where(capacity_choice(goal(slack), offered, RULES)) == (Mode.ON_DEMAND, DEAR)


def test_machines_on_demand_that_were_only_asked_for_and_refused_hold_nothing(monkeypatch):
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", Says(Mode.SPOT, str(POOL)))
    refused = world(group_size=2, of_state={"pool": DEAR, "cooldowns": (cooldown(DEAR),)})
    assert where(capacity_choice(goal(hours(5)), refused, RULES)) == (Mode.SPOT, POOL)
    unasked = world(group_size=0, of_state={"pool": DEAR})
    assert where(capacity_choice(goal(hours(5)), unasked, RULES)) == (Mode.SPOT, POOL)


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": None},
        {"deadline_at": None},
        {"work": None},  # and nothing is measured yet
        {"self_driving": True},
        {"until": Until.READY},  # `up` wants machines now
    ],
)
def test_without_a_deadline_to_keep_or_work_to_reckon_with_it_goes_on_as_without_one(changed):
    assert capacity_choice(replace(goal(minutes(60)), **changed), world(), RULES) is None
    assert capacity_choice(goal(minutes(60)), world(candidates=OFFERS[:2]), RULES) is None


def test_work_is_reckoned_by_the_steps_once_they_are_timed():
    attempt = opened("a", total_steps=100, last_step=50, pace_s=60.0, stepped_at=NOW, last_step_at=NOW)
    half = world(up("a"), of_state={"attempts": (attempt,)})
    assert capacity_choice(goal(minutes(60)), half, RULES).capacity_decision.why == "50 min of work, 7 h left"


# What is told


def test_the_course_says_since_when_and_why_and_stays_until_it_changes():
    first = capacity_choice(goal(minutes(20)), world(of_state={"cooldowns": DOWN}), RULES).capacity_decision
    assert (first.mode, first.since) == ("on demand", NOW)
    assert first.why == "6 h of work, 6 h 20 min left: no time is left for another interruption"
    later = world(of_state={"cooldowns": DOWN, "capacity_decision": first}, now=NOW + minutes(1))
    assert capacity_choice(goal(minutes(20)), later, RULES).capacity_decision is first


@pytest.mark.parametrize(
    ("cooldowns", "says", "why"),
    [
        ((cooldown(POOL), cooldown(OTHER_POOL)), SAYS_DEAR, ", 2 of 2 spot pools excluded: the least expected cost"),
        ((cooldown(POOL),), Says(Mode.SPOT, str(OTHER_POOL)), ", 1 of 2 spot pools excluded: the least expected cost"),
        ((), Says(Mode.SPOT, str(POOL)), ": the least expected cost"),
    ],
)
def test_a_decision_tells_what_was_known_of_spot(monkeypatch, cooldowns, says, why):
    monkeypatch.setattr("gpucloud.domain.supervision.deadline.decide", says)
    found = capacity_choice(goal(hours(5)), world(of_state={"cooldowns": cooldowns}), RULES)
    assert found.capacity_decision.why == "6 h of work, 11 h left" + why


def test_sums_that_turn_out_later_are_of_then_and_the_machines_of_before():
    first = capacity_choice(goal(minutes(20)), world(of_state={"cooldowns": DOWN}), RULES).capacity_decision
    assert first.decided_at == first.since == NOW
    later = world(of_state={"cooldowns": DOWN, "capacity_decision": first}, now=NOW + minutes(9))
    missed = capacity_choice(goal(minutes(11)), later, RULES).capacity_decision
    assert (missed.mode, missed.shortfall) == ("on demand", Shortfall.TIME)
    assert (missed.since, missed.decided_at) == (NOW, NOW + minutes(9))


def test_to_ask_whether_there_is_spot_again_is_not_to_have_it():
    waits = capacity_choice(goal(hours(2)), world(of_state={"cooldowns": DOWN}), RULES).capacity_decision
    assert waits.mode == "idle"
    asks = capacity_choice(goal(hours(2)), world(of_state={"capacity_decision": waits}), RULES)
    assert (asks.mode, asks.capacity_decision) == (Mode.SPOT, waits)
    has = capacity_choice(
        goal(hours(2)), world(up("a", readiness=Readiness.NO), of_state={"capacity_decision": waits}), RULES
    )
    assert has.capacity_decision.mode == "spot"


@pytest.mark.parametrize(("slack", "shortfall"), [(minutes(12), None), (minutes(11), Shortfall.TIME)])
def test_a_deadline_that_machines_on_demand_cannot_keep_any_more_is_told_and_tried_for(slack, shortfall):
    found = capacity_choice(goal(slack), world(), RULES)
    assert (found.mode, found.capacity_decision.shortfall) == (Mode.ON_DEMAND, shortfall)
    if shortfall is not None:
        assert found.capacity_decision.warning.startswith(
            "the deadline will be missed: 6 h of work and a changeover of 12 min"
        )


@pytest.mark.parametrize("pool", [POOL, DEAR])
def test_who_takes_a_job_over_says_nothing_new_of_its_deadline_before_its_machine_tells_how_far_it_is(pool):
    """Two hours of steps were made since anybody heard it: by the steps that are known they are all to do still."""
    plenty, now = goal(hours(1), Policy.UNIFORM), NOW + hours(2)
    decided = capacity_choice(plenty, working(pool), RULES).capacity_decision
    attempt = opened("a", first_step=1, stepped_at=NOW - hours(6), **STEPS)
    owner = Owner(id="s2", host="h", pid=1, started="1", since=now - minutes(1))
    known = {"pool": pool, "attempts": (attempt,), "owner": owner, "capacity_decision": decided}
    unheard = world(up("a", pool=pool, silent=1), now=now, of_state=known)
    late = replace(plenty, deadline_at=now + hours(5))

    assert capacity_choice(late, unheard, RULES).capacity_decision == decided
    found = capacity_choice(late, unheard, RULES)
    assert (found.offer.pool, found.spare) == (pool, -minutes(6))
    silent = replace(unheard, state=replace(unheard.state, owner=replace(owner, since=now - minutes(10))))
    assert capacity_choice(late, silent, RULES).capacity_decision.shortfall is Shortfall.TIME
    heard = world(up("a", part(1, step=480, total_steps=720, step_seconds=60.0), pool=pool), now=now, of_state=known)
    known_now = replace(heard, state=with_steps(heard))
    assert capacity_choice(late, known_now, RULES).capacity_decision.shortfall is None


def test_steps_that_were_lost_are_work_that_is_left_and_count_in_no_start_beside():
    """Ten minutes of steps were lost each time; to make them again is a part of the work that is left."""
    launched = [NOW - hours(5 - number) for number in range(4)]
    intervals = tuple(UsageInterval(node_id=f"n{i}", pool=POOL, launched_at=at) for i, at in enumerate(launched))
    attempts = tuple(
        replace(
            opened(f"n{i}", number=i + 1, reason=ExitReason.LOST, first_step=1 + 30 * i, last_step=30 * i + 40),
            started_at=at,
            stepped_at=at + minutes(2),
            pace_s=60.0,
            total_steps=720,
            saved_step=30 * (i + 1),
        )
        for i, at in enumerate(launched)
    )
    lost = {"attempts": attempts, "nodes": intervals, "checkpoint": CheckpointRef(step=120, sha256="a" * 64)}
    found = capacity_choice(goal(minutes(5), work=hours(10)), world(of_state=lost), RULES)
    assert found.capacity_decision.shortfall is None
    missed = capacity_choice(goal(minutes(1), work=hours(10)), world(of_state=lost), RULES)
    assert "10 h of work and a changeover of 2 min, " in missed.capacity_decision.warning


@pytest.mark.parametrize(
    ("held", "cooldowns", "policy", "expected"),
    [
        ((), (), Policy.GREEDY, (Mode.SPOT, POOL)),
        ((), (), Policy.LEARNED, (Mode.SPOT, POOL)),
        ((), (cooldown(POOL),), Policy.GREEDY, (Mode.SPOT, OTHER_POOL)),
        ((up("a", readiness=Readiness.NO),), (), Policy.GREEDY, (Mode.SPOT, POOL)),  # no changing back while it boots
        ((), DOWN, Policy.GREEDY, (Mode.ON_DEMAND, DEAR)),
        ((), (), Policy.ON_DEMAND, (Mode.ON_DEMAND, DEAR)),
    ],
)
def test_a_deadline_that_no_machines_can_keep_is_missed_where_it_is_cheap(held, cooldowns, policy, expected):
    """The work alone is longer than the time that is left; steps that are made until then are as good on spot."""
    missed = capacity_choice(goal(-minutes(30), policy), world(*held, of_state={"cooldowns": cooldowns}), RULES)
    assert (where(missed), missed.capacity_decision.shortfall) == (expected, Shortfall.TIME)


def test_machines_on_demand_that_work_are_kept_though_the_deadline_is_missed():
    assert capacity_choice(goal(-minutes(30)), working(DEAR), RULES).mode is Mode.ON_DEMAND


@pytest.mark.parametrize(
    ("budget", "mode", "shortfall"),
    [
        # 6 h and a start on demand are 6.20 USD, a start on spot before them 0.06, and 0.06 are kept for the last save.
        ("6.40", Mode.SPOT, None),
        ("6.20", Mode.ON_DEMAND, None),
        ("6.00", Mode.SPOT, Shortfall.MONEY),
    ],
)
def test_the_budget_is_harder_than_the_deadline(budget, mode, shortfall):
    found = capacity_choice(goal(hours(2), budget_usd=Decimal(budget)), world(), RULES)
    assert (found.mode, found.capacity_decision.shortfall) == (mode, shortfall)
    if shortfall is not None:
        assert (
            "the rest costs 6.00 USD on demand, and 5.94 USD may be spent on it. The" in found.capacity_decision.warning
        )


def test_machines_on_demand_that_work_are_not_left_for_a_small_sum():
    enough, too_little = (goal(minutes(5), budget_usd=Decimal(usd)) for usd in ("5.80", "4.00"))
    assert capacity_choice(enough, working(DEAR), RULES).mode is Mode.ON_DEMAND
    assert capacity_choice(too_little, working(DEAR), RULES).mode is Mode.SPOT


def test_a_pool_is_down_since_it_refused_after_its_last_machine():
    again = UsageInterval(node_id="b", pool=POOL, launched_at=NOW - minutes(3), ended_at=NOW)
    old = cooldown(POOL, ago=3600.0, tries=4)
    found = capacity_choice(goal(minutes(60)), world(of_state={"cooldowns": (old,), "nodes": (again,)}), RULES)
    assert where(found) == (Mode.SPOT, OTHER_POOL)


def test_one_whose_machine_was_noticed_has_nothing_there():
    gone = world(up("a", notice=True), of_state={"cooldowns": DOWN})
    assert capacity_choice(goal(minutes(23)), gone, RULES).mode is Mode.ON_DEMAND


def test_tables_are_made_for_the_cheapest_of_the_spot_machines():
    big = replace(priced(OTHER_POOL, "0.2"), gpus=8)
    offers = (priced(POOL, "0.3"), big, priced(DEAR, "0.1"))
    found = lesson(goal(hours(3), Policy.LEARNED), world(candidates=offers), RULES)
    assert (found.zones, found.gpus, found.spot_usd_per_hour) == (2, 8, 0.2)
    assert lesson(goal(hours(3), Policy.GREEDY), world(candidates=offers), RULES) is None
    assert lesson(goal(hours(3), Policy.LEARNED), world(candidates=offers[2:]), RULES) is None
