"""What is told of a shortage: each pool that refuses once, however often it is asked, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node.node import Fault
from gpucloud.domain.supervision.action import Arm, CoolDown, Move, OpenAttempt, Prepare, Resize, Wait
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.usecases.supervise.act import Actor
from gpucloud.usecases.supervise.provision import Shortage
from tests.unit.worlds import NOW, OTHER_POOL, POOL, goal, job, offer, opened, snapshot, state, up

ARMED = Arm(until=NOW + timedelta(hours=1))
WAIT = Wait(why="no capacity: asking again at 12:00:30 UTC, and until 13:00:00 UTC at the most")


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
        f"1 more refuses likewise (None), and is excluded too: {OTHER_POOL}",
        f"{WAIT.why}; until then only what changes is told",
    ]
    for _ in range(20):
        assert told(shortage, *a_round(), Resize(size=0), WAIT) == []
    assert told(shortage, Move(offer=offer(POOL)), ARMED, Resize(size=1)) == []
    comes = told(shortage, Prepare(node_ids=("a",)), machines=[up("a")], size=1)
    assert comes == ["turning", "paid", "asking", "preparing"]
    assert told(shortage, refused(POOL)) == ["excluded"]  # the next one


def test_zones_that_refuse_alike_are_one_line_with_their_number_and_other_refusals_have_their_own():
    shortage, zones = Shortage(), [replace(POOL, zone=f"us-east-2{letter}") for letter in "abcdefgh"]
    booting = Wait(why="waiting for machines")
    for zone in zones:
        told(shortage, Move(offer=offer(zone)), Resize(size=1), booting)
        assert told(shortage, refused(zone)) == (["excluded"] if zone is zones[0] else [])
    assert told(shortage, replace(refused(OTHER_POOL), code="Quota")) == ["excluded"]
    lines = told(shortage, Resize(size=0), WAIT)
    named = ", ".join(map(str, zones[1:5]))
    assert lines[0] == f"7 more refuse likewise (None), and are excluded too: {named} and 3 more"
    assert len(lines) == 2
    assert told(shortage, *map(refused, zones), WAIT) == []


def test_machines_that_are_waited_for_are_told_though_none_has_come():
    shortage = Shortage()
    told(shortage, *a_round())
    assert told(shortage, Move(offer=offer(POOL)), Resize(size=1)) == []
    booting = Wait(why="waiting for machines")
    assert told(shortage, booting, size=1, later=9.9) == []
    assert told(shortage, booting, size=1, later=10.0)[1:] == ["turning", "asking"]
    assert told(shortage, booting, size=1, later=11.0) == []


def test_an_attempt_ends_a_shortage_and_machines_that_are_given_back_are_told():
    shortage = Shortage()
    told(shortage, *a_round())
    assert told(shortage, Resize(size=0), machines=[up("a")], size=2)[1:] == ["asking"]  # and who else refused
    told(shortage, OpenAttempt(number=1, node_ids=("a",)), machines=[up("a")], size=1)
    assert told(shortage, refused(POOL)) == ["excluded"]


class Cloud:
    """Arms, and refuses where it is told to."""

    def __init__(self):
        self.told, self.refuses = [], False
        self.actor = Actor(
            services=SimpleNamespace(job=job(), rules=Rules()),
            lease=None,
            watcher=SimpleNamespace(story=self.told.append),
            machine_provisioner=SimpleNamespace(act=self._act),
            **dict.fromkeys(("bootstrapper", "inspector", "closing")),
        )

    def _act(self, action):
        if self.refuses:
            raise ProvisionError("throttled", may_pass=True)

    def act(self, action, *machines, later=0.0, refuses=False, **world):
        """Return what is told of it, or as it is refused."""
        self.told.clear()
        self.refuses = refuses
        world = snapshot(*machines, armed=None, now=NOW + timedelta(seconds=later), **world)
        if refuses:
            with pytest.raises(ProvisionError):
                self.actor.act(action, world, goal())
        else:
            self.actor.act(action, world, goal())
        return list(self.told)


def until(minutes):
    return Arm(until=NOW + timedelta(minutes=minutes))


def paid(moment):
    return f"paid until {moment}:00 UTC: then the machines shut themselves off"


def short():
    """Return a cloud whose pool has refused, as it is asked again."""
    cloud = Cloud()
    cloud.actor._shortage.told(refused(POOL), snapshot(), 2, "excluded")
    return cloud


def test_of_a_try_in_a_shortage_the_shut_off_is_told_that_the_cloud_has():
    cloud = short()
    assert cloud.act(Move(offer=offer(POOL)), group_size=0) == []
    assert cloud.act(until(60), group_size=0, refuses=True) == []
    assert cloud.act(until(70), group_size=0) == []
    assert cloud.act(until(80), group_size=0) == []
    assert cloud.act(Resize(size=2), group_size=0) == []
    told = cloud.act(Wait(why="waiting for machines"), up("a"), up("b"))
    assert [line for line in told if line.startswith("paid")] == [paid("13:20")]
    assert len(told) == 3


def test_what_was_held_back_and_given_up_was_not_told():
    cloud = short()
    cloud.act(Move(offer=offer(POOL)), group_size=0)
    cloud.act(until(60), group_size=0)
    cloud.actor._shortage.told(refused(POOL), snapshot(), 2, "excluded")
    cloud.act(Move(offer=offer(POOL)), group_size=0)
    assert cloud.act(Arm(until=NOW + timedelta(minutes=60, seconds=30)), group_size=0) == []
    assert cloud.act(Wait(why="waiting for machines"), up("a"))[1:] == [
        "paid until 13:00:30 UTC: then the machines shut themselves off"
    ]


def test_a_job_that_trains_on_fewer_machines_than_it_wants_tells_of_its_shut_off_as_any_other():
    training = {"state": state(attempts=(opened("a"),)), "group_size": 1}
    cloud = short()
    assert cloud.act(until(60), up("a"), **training) == [paid("13:00")]
    assert cloud.act(Arm(until=NOW + timedelta(minutes=60, seconds=30)), up("a"), later=30, **training) == []
    assert cloud.act(until(62), up("a"), later=60, **training) == [paid("13:02")]
    assert cloud.act(Wait(why="it trains"), up("a"), later=90, **training) == []
