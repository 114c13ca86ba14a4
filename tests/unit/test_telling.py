"""Orders to agents: a machine that does not answer holds nobody up, and none overtakes a newer one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.usecases.supervise.agents import Teller
from tests.fakes.clock import JumpingClock
from tests.unit.worlds import NOW, node


class Machines:
    """A shell over machines that write orders down; a machine in `held` does so when it is let go."""

    def __init__(self):
        self.orders = []
        self.held = {}
        self.faults = {}

    def host(self, asked):
        def run(argv, *, stdin):
            gate = self.held.get(asked.id)
            if gate is not None:
                gate.wait()
            if asked.id in self.faults:
                raise self.faults[asked.id]
            self.orders.append((asked.id, stdin))
            return SimpleNamespace(exit_code=0, stderr=b"")

        return SimpleNamespace(run=run)


@pytest.fixture
def machines():
    return Machines()


@pytest.fixture
def teller(machines):
    with ThreadPoolExecutor() as pool:
        yield Teller(world=SimpleNamespace(shell=machines, clock=JumpingClock(NOW)), pool=pool)
        for gate in machines.held.values():
            gate.set()


def orders(**of):
    return {node_id: (node(node_id), order) for node_id, order in of.items()}


def test_who_answers_is_told_though_another_does_not(teller, machines):
    machines.held["n0"] = threading.Event()
    teller.tell(orders(n0=b"work", n1=b"work"))
    assert machines.orders == [("n1", b"work")]
    assert teller.busy


def test_a_newer_order_waits_for_the_older_one(teller, machines):
    gate = machines.held["n0"] = threading.Event()
    teller.tell(orders(n0=b"old"))
    assert teller.is_on_its_way("n0", b"new")  # nothing can be told to it now
    teller.tell(orders(n0=b"new"))
    gate.set()
    while teller.busy:
        pass
    assert not teller.is_on_its_way("n0", b"new")
    teller.tell(orders(n0=b"new"))
    assert machines.orders == [("n0", b"old"), ("n0", b"new")]


def test_one_that_cannot_be_reached_is_told_again(teller, machines):
    machines.faults["n0"] = HostUnreachable("gone")
    teller.tell(orders(n0=b"work"))
    assert not teller.is_on_its_way("n0", b"work")
    machines.faults.clear()
    teller.tell(orders(n0=b"work"))
    assert machines.orders == [("n0", b"work")]


def test_what_was_written_just_now_is_on_its_way_until_the_agent_had_time_to_read_it(teller, machines):
    teller.tell(orders(n0=b"work"))
    assert teller.is_on_its_way("n0", b"work")
    teller.world.clock.sleep(0.6)
    assert not teller.is_on_its_way("n0", b"work")


def test_a_machine_that_refuses_its_order_once_is_told_again_a_little_later(teller, machines):
    machines.faults["n0"] = NodeError("disk full")
    teller.tell(orders(n0=b"work", n1=b"work"))
    assert teller.is_on_its_way("n0", b"work")  # not in turns
    machines.faults.clear()
    teller.world.clock.sleep(2)
    assert not teller.is_on_its_way("n0", b"work")
    teller.tell(orders(n0=b"work"))
    assert machines.orders == [("n1", b"work"), ("n0", b"work")]
    assert teller.gave_up("n0") is None


def test_a_machine_that_refuses_for_long_is_given_up_and_says_why(teller, machines):
    machines.faults["n0"] = NodeError("disk full")
    for _ in range(6):
        assert teller.gave_up("n0") is None
        teller.tell(orders(n0=b"work"))
        teller.world.clock.sleep(2)
    assert str(teller.gave_up("n0")) == "disk full"
    teller.forget("n0")
    assert teller.gave_up("n0") is None


def test_refusals_with_an_obeyed_order_between_them_are_not_one(teller, machines):
    for fault in (NodeError("disk full"), None, NodeError("disk full")):
        machines.faults = {"n0": fault} if fault else {}
        teller.tell(orders(n0=b"work"))
        teller.world.clock.sleep(30)
    assert teller.gave_up("n0") is None


def test_a_fault_of_our_own_is_raised(teller, machines):
    machines.faults["n0"] = ValueError("ours")
    with pytest.raises(ValueError, match="ours"):
        teller.tell(orders(n0=b"work"))
