"""Groups of own hosts: no id is ever used for two nodes, and a laptop's clock ends none."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.hosts.cloud import SshProvisioner
from gpucloud.adapters.hosts.group import SshNodeGroup
from gpucloud.adapters.hosts.records import POOL, Place, Recollection
from gpucloud.domain.errors import GpucloudError, HostUnreachable
from gpucloud.domain.node.node import NodeState
from tests.fakes.clock import START, JumpingClock
from tests.fakes.memory_store import MemoryStore

GROUP: Any = SimpleNamespace(name="gpucloud-digits")
HOST = Place(name="one", address="10.0.0.1", port=22, user="me", host_key="ssh-ed25519 AAAA")


class Hosts:
    """One host that always comes, as a laptop sees it whose clock is so much ahead of the store's."""

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers = True
        self.clock = JumpingClock()  # the store's
        self.records = records = Recollection(MemoryStore(self.clock), JumpingClock(START + ahead))
        self.group = SshNodeGroup(records, self, lambda: (HOST,))  # type: ignore[arg-type]
        self.provisioner = SshProvisioner(records, self.group)

    def ask(self, orders: Any) -> tuple[dict[str, Any] | GpucloudError, ...]:
        self.asked += [order.order for order in orders]
        silent = HostUnreachable("one-1: no route to host")
        there = ({"left": []} if order.order["do"] == "release" else {"address": None} for order in orders)
        return tuple(answer if self.answers else silent for answer in there)

    def have_one(self) -> str:
        self.provisioner.ensure(GROUP, story=print)
        assert self.group.describe(GROUP.name).nodes == ()
        self.group.arm(GROUP.name, START + timedelta(minutes=30))
        self.group.resize(GROUP.name, 1, POOL)
        (node,) = self.group.describe(GROUP.name).alive
        return node.id


def test_a_host_that_a_job_takes_again_after_its_end_is_another_node():
    hosts = Hosts()
    assert hosts.have_one() == "one-1"
    hosts.provisioner.destroy(GROUP.name, story=print)
    assert not hosts.group.describe(GROUP.name).exists
    assert hosts.have_one() == "one-2"


@pytest.mark.parametrize("hours", [-3, 0, 3])
def test_a_host_is_had_until_its_paid_time_is_over_by_the_stores_clock(hours):
    hosts = Hosts(ahead=timedelta(hours=hours))
    assert hosts.have_one() == "one-1"
    (taken,) = (order for order in hosts.asked if order["do"] == "take")
    assert taken["until"] - taken["now"] == pytest.approx(32 * 60, abs=5)


FREE = "own hosts: all are free, and the job's files are removed on those that answer"
KEPT = FREE.replace("all are", "all that answer are")


@pytest.mark.parametrize(
    ("answers", "passed", "told"),
    [
        (True, timedelta(0), [FREE]),
        (
            False,
            timedelta(minutes=5),
            [
                "one-1 does not answer: what runs there ends by itself by 12:32 UTC, and has its GPUs until then;"
                " files of the job may be left there, below ~/.gpucloud/jobs",
                KEPT,
            ],
        ),
        (
            False,
            timedelta(minutes=33),
            ["one-1 does not answer: files of the job may be left there, below ~/.gpucloud/jobs", FREE],
        ),
    ],
)
def test_a_host_that_was_given_up_and_does_not_answer_is_not_called_free_while_the_job_may_run_there(
    answers, passed, told
):
    hosts, story = Hosts(), []
    node_id = hosts.have_one()
    hosts.answers = answers
    hosts.clock.sleep(passed.total_seconds())
    hosts.group.terminate(GROUP.name, node_id, bad=True)  # given up, and no other is there
    hosts.provisioner.destroy(GROUP.name, story=story.append)
    assert [line.partition("; software")[0] for line in story] == told


def over(hosts: Hosts) -> str:
    """Have a host whose time is over, which nobody was there to see."""
    node_id = hosts.have_one()
    hosts.records.change(GROUP.name, lambda record: replace(record, armed_until=START - timedelta(minutes=1)))
    hosts.asked.clear()
    return node_id


def test_a_host_whose_time_is_over_keeps_what_was_written_there_until_its_group_ends():
    hosts = Hosts()
    node_id = over(hosts)
    (node,) = hosts.group.describe(GROUP.name).nodes
    assert (node.state, node.remains, node.is_there) == (NodeState.TERMINATED, True, True)
    hosts.group.arm(GROUP.name, START + timedelta(minutes=30))
    hosts.group.resize(GROUP.name, 1, POOL)
    assert [order["do"] for order in hosts.asked] == ["take"]
    first, again = hosts.group.describe(GROUP.name).nodes
    assert (first.id, first.place) == (node_id, again.place)
    hosts.group.purge(GROUP.name, keep=((node_id, "code/aa"),))
    hosts.provisioner.destroy(GROUP.name, story=print)
    released = [order["keep"] for order in hosts.asked if order["do"] == "release"]
    assert released == [["code/aa"], ["code/aa"]]  # as both nodes: they have one folder there


def test_a_host_that_is_ended_is_freed_at_once_and_what_was_written_there_stays_until_its_group_ends():
    hosts = Hosts()
    hosts.group.terminate(GROUP.name, hosts.have_one())
    assert [order["keep"] for order in hosts.asked if order["do"] == "release"] == [["code"]]
    assert hosts.group.describe(GROUP.name).nodes[0].remains
    hosts.group.resize(GROUP.name, 0, POOL)
    hosts.group.purge(GROUP.name)
    assert [order["keep"] for order in hosts.asked if order["do"] == "release"][1:] == [[]]
    assert hosts.group.uncleared(GROUP.name) == ()
