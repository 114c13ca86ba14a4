"""When a group is ended every machine that it had is billed, however old the lists are that the cloud answers with."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest

from gpucloud.domain.node.node import EndCause, GroupView, NodeState
from gpucloud.domain.offer import PricePoint
from gpucloud.domain.state.state import UsageInterval
from gpucloud.domain.supervision.action import TearDown
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.usecases.jobstore import lease
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.provision import MachineProvisioner
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, POOL, node, state

ENDED = NOW + timedelta(seconds=5)


class OneUsdAnHour:
    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal(1)),)


class StaleGroup:
    """A cloud that ends everything at a purge, and lists what was so before for a while longer."""

    def __init__(self, clock, stale_s):
        self.clock = clock
        self.up_to_date_at = NOW + timedelta(seconds=stale_s)

    def purge(self, group, *, keep):
        self.clock.sleep(5)

    def describe(self, group):
        now = self.clock.now() >= self.up_to_date_at
        gone = {"state": NodeState.TERMINATED, "ended_at": ENDED, "end_cause": EndCause.CHOICE} if now else {}
        # The one that was started last is not even in the old list, nor in the books.
        nodes = (node("a", **gone), node("b", **gone)) if now else (node("a"),)
        return GroupView(exists=True, size=0, armed_until=None, nodes=nodes)


def torn_down(stale_s):
    clock = JumpingClock(NOW)
    jobs = JobStore(MemoryStore(clock), "digits")
    known = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - timedelta(minutes=5))
    jobs.create(state(nodes=(known,)))
    destroyed = []
    world = SimpleNamespace(
        clock=clock,
        group=StaleGroup(clock, stale_s),
        provisioner=SimpleNamespace(destroy=lambda name, story: destroyed.append((name, len(jobs.charges())))),
        rules=Rules(),
    )
    held = lease.take(jobs, clock)
    machine_provisioner = MachineProvisioner(
        services=world,
        lease=held,
        bootstrapper=SimpleNamespace(records=SimpleNamespace(withdraw=lambda: None)),
        tracker=SpendTracker(jobs, OneUsdAnHour()),
        watcher=SimpleNamespace(story=lambda _: None),
    )
    machine_provisioner.act(TearDown())
    return jobs, held.state, destroyed


@pytest.mark.parametrize("stale_s", [0, 30, 59])
def test_an_old_list_is_asked_again_until_it_tells_every_end(stale_s):
    jobs, ended, destroyed = torn_down(stale_s)

    assert [(charge.node_id, charge.end) for charge in jobs.charges()] == [("a", ENDED), ("b", ENDED)]
    assert all(interval.charged for interval in ended.nodes)
    assert ended.torn_down
    assert destroyed == [("gpucloud-digits", 2)]  # billed before the group that lists them is forgotten


def test_a_machine_whose_end_is_never_told_is_billed_up_to_now():
    jobs, ended, _ = torn_down(3600)

    assert [(charge.node_id, charge.end) for charge in jobs.charges()] == [("a", NOW + timedelta(seconds=65))]
    assert ended.torn_down
