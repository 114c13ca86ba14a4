"""Groups of own hosts: no id is ever used for two nodes, and a laptop's clock ends none."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.hosts.cloud import SshProvisioner
from gpucloud.adapters.hosts.group import SshNodeGroup
from gpucloud.adapters.hosts.records import POOL, Place, Recollection
from tests.fakes.clock import START, JumpingClock
from tests.fakes.memory_store import MemoryStore

GROUP: Any = SimpleNamespace(name="gpucloud-digits")
HOST = Place(name="one", address="10.0.0.1", port=22, user="me", host_key="ssh-ed25519 AAAA")


class Hosts:
    """One host that always comes, as a laptop sees it whose clock is so much ahead of the store's."""

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self.asked: list[dict[str, Any]] = []
        records = Recollection(MemoryStore(JumpingClock()), JumpingClock(START + ahead))
        self.group = SshNodeGroup(records, self, lambda: (HOST,))  # type: ignore[arg-type]
        self.provisioner = SshProvisioner(records, self.group)

    def ask(self, orders: Any) -> tuple[dict[str, Any], ...]:
        self.asked += [order.order for order in orders]
        return tuple({"address": None} for _ in orders)

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
