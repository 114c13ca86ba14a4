"""Orders to agents: a machine that does not answer holds nobody up, and none overtakes a newer one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.usecases.supervise.agents import AgentWriter
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

        return SimpleNamespace(run=run, node=asked)


@pytest.fixture
def machines():
    return Machines()


@pytest.fixture
def agent_writer(machines):
    with ThreadPoolExecutor() as pool:
        yield AgentWriter(services=SimpleNamespace(shell=machines, clock=JumpingClock(NOW)), pool=pool)
        for gate in machines.held.values():
            gate.set()


def orders(**of):
    return {node_id: (node(node_id), order) for node_id, order in of.items()}


def test_who_answers_is_told_though_another_does_not(agent_writer, machines):
    machines.held["n0"] = threading.Event()
    agent_writer.tell(orders(n0=b"work", n1=b"work"))
    assert machines.orders == [("n1", b"work")]
    assert agent_writer.busy


def test_a_newer_order_waits_for_the_older_one(agent_writer, machines):
    gate = machines.held["n0"] = threading.Event()
    agent_writer.tell(orders(n0=b"old"))
    assert agent_writer.is_on_its_way("n0", b"new")  # nothing can be told to it now
    agent_writer.tell(orders(n0=b"new"))
    gate.set()
    while agent_writer.busy:
        pass
    assert not agent_writer.is_on_its_way("n0", b"new")
    agent_writer.tell(orders(n0=b"new"))
    assert machines.orders == [("n0", b"old"), ("n0", b"new")]


def test_one_that_cannot_be_reached_is_told_again(agent_writer, machines):
    machines.faults["n0"] = HostUnreachable("gone")
    agent_writer.tell(orders(n0=b"work"))
    assert not agent_writer.is_on_its_way("n0", b"work")
    machines.faults.clear()
    agent_writer.tell(orders(n0=b"work"))
    assert machines.orders == [("n0", b"work")]


def test_what_was_written_just_now_is_on_its_way_until_the_agent_had_time_to_read_it(agent_writer, machines):
    agent_writer.tell(orders(n0=b"work"))
    assert agent_writer.is_on_its_way("n0", b"work")
    agent_writer.services.clock.sleep(0.6)
    assert not agent_writer.is_on_its_way("n0", b"work")


def test_a_machine_that_refuses_its_order_once_is_told_again_a_little_later(agent_writer, machines):
    machines.faults["n0"] = NodeError("disk full")
    agent_writer.tell(orders(n0=b"work", n1=b"work"))
    assert agent_writer.is_on_its_way("n0", b"work")  # not in turns
    machines.faults.clear()
    agent_writer.services.clock.sleep(2)
    assert not agent_writer.is_on_its_way("n0", b"work")
    agent_writer.tell(orders(n0=b"work"))
    assert machines.orders == [("n1", b"work"), ("n0", b"work")]
    assert agent_writer.gave_up("n0") is None


def test_a_machine_that_refuses_for_long_is_given_up_and_says_why(agent_writer, machines):
    machines.faults["n0"] = NodeError("disk full")
    for _ in range(6):
        assert agent_writer.gave_up("n0") is None
        agent_writer.tell(orders(n0=b"work"))
        agent_writer.services.clock.sleep(2)
    assert str(agent_writer.gave_up("n0")) == "disk full"
    agent_writer.forget("n0")
    assert agent_writer.gave_up("n0") is None


def test_refusals_with_an_obeyed_order_between_them_are_not_one(agent_writer, machines):
    for fault in (NodeError("disk full"), None, NodeError("disk full")):
        machines.faults = {"n0": fault} if fault else {}
        agent_writer.tell(orders(n0=b"work"))
        agent_writer.services.clock.sleep(30)
    assert agent_writer.gave_up("n0") is None


def test_a_fault_of_our_own_is_raised(agent_writer, machines):
    machines.faults["n0"] = ValueError("ours")
    with pytest.raises(ValueError, match="ours"):
        agent_writer.tell(orders(n0=b"work"))
