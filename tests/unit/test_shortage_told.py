"""What is told of a shortage: each pool that refuses once, however often it is asked, and what comes of it."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.node.node import Fault
from gpucloud.domain.supervision.action import Arm, CoolDown, Move, OpenAttempt, Prepare, Resize, Wait
from gpucloud.usecases.supervise.provision import Shortage
from tests.unit.worlds import NOW, OTHER_POOL, POOL, offer, snapshot, up

ARMED = Arm(until=NOW + timedelta(hours=1))
WAIT = Wait(why="no capacity: asking again at 12:00:30 UTC")


def refused(pool):
    length = timedelta(seconds=30)
    return CoolDown(pool=pool, fault=Fault.CAPACITY, code="None", message="none", length=length, longest=length)


def told(shortage, *actions, machines=(), size=0, later=0.0):
    world = snapshot(*machines, group_size=size, now=NOW + timedelta(seconds=later))
    lines = {CoolDown: "excluded", Move: "turning", Arm: "paid", Resize: "asking", Prepare: "preparing"}
    return [line for action in actions for line in shortage.told(action, world, 1, lines.get(type(action)))]


def a_round():
    return [
        each for pool in (POOL, OTHER_POOL) for each in (Move(offer=offer(pool)), ARMED, Resize(size=1), refused(pool))
    ]


def test_a_long_shortage_is_told_when_it_begins_and_when_it_ends():
    shortage = Shortage()
    assert told(shortage, ARMED, Resize(size=1), refused(POOL)) == ["paid", "asking", "excluded"]
    assert told(shortage, *a_round()[4:], Resize(size=0), WAIT) == [
        "excluded",
        f"{WAIT.why}, and again until there is some; until then only what changes is told",
    ]
    for _ in range(20):
        assert told(shortage, *a_round(), Resize(size=0), WAIT) == []
    assert told(shortage, Move(offer=offer(POOL)), ARMED, Resize(size=1)) == []
    comes = told(shortage, Prepare(node_ids=("a",)), machines=[up("a")], size=1)
    assert comes == ["turning", "paid", "asking", "preparing"]
    assert told(shortage, refused(POOL)) == ["excluded"]  # the next one


def test_machines_that_are_waited_for_are_told_though_none_has_come():
    shortage = Shortage()
    told(shortage, *a_round())
    assert told(shortage, Move(offer=offer(POOL)), Resize(size=1)) == []
    booting = Wait(why="waiting for machines")
    assert told(shortage, booting, size=1, later=9.9) == []
    assert told(shortage, booting, size=1, later=10.0) == ["turning", "asking"]
    assert told(shortage, booting, size=1, later=11.0) == []


def test_an_attempt_ends_a_shortage_and_machines_that_are_given_back_are_told():
    shortage = Shortage()
    told(shortage, *a_round())
    assert told(shortage, Resize(size=0), machines=[up("a")], size=2) == ["asking"]
    told(shortage, OpenAttempt(number=1, node_ids=("a",)), machines=[up("a")], size=1)
    assert told(shortage, refused(POOL)) == ["excluded"]
