"""The machines that the budget must pay for are those that there are and those that the level is about to start."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.node import EndCause, GroupView, NodeState
from gpucloud.domain.offer import PricePoint
from gpucloud.domain.state.state import UsageInterval
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, POOL, node, state

# A reserve of nothing and a cent an hour: each machine more divides the ten hours that a machine could be paid.
WALL = PrepaidRule(horizon=timedelta(hours=100), reserve=timedelta(0), least=timedelta(0))
A_CENTS_ROUNDING = timedelta(milliseconds=2)


class FreeUpToNow:
    """A market in which nothing has cost anything yet."""

    def offers(self, wanted):
        return ()

    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal(0)),)


def ended(node_id):
    return node(node_id, state=NodeState.TERMINATED, ended_at=NOW, end_cause=EndCause.INTERRUPTED)


def interval(node_id):
    return UsageInterval(node_id=node_id, pool=POOL, launched_at=NOW - timedelta(hours=1))


@pytest.mark.parametrize(("listed", "size", "machines"), [(("a",), 2, 2), ((), 2, 2), (("a", "b"), 2, 2), ((), 0, 0)])
def test_the_most_that_is_spent_counts_machines_that_the_cloud_starts_again(listed, size, machines):
    """Each at 1 USD an hour at the most, for eight hours: one that was lost comes again."""
    tracker = SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), FreeUpToNow())
    until = NOW + timedelta(hours=8)
    job = state(cap_usd_per_hour=Decimal(1), nodes=tuple(map(interval, listed)), paid_until=until)
    group = GroupView(exists=True, size=size, armed_until=until, nodes=tuple(map(node, listed)))

    spend = tracker.spend(job, group, NOW, Decimal(20), PrepaidRule(reserve=timedelta(minutes=6)))

    assert (spend.promised_usd, spend.off_usd) == (8 * machines, 8 * machines)
    assert (spend.kept_usd, spend.cap_usd_per_hour) == (Decimal("0.1") * machines, machines)
    assert spend.off_at == (until if machines else None)


@pytest.mark.parametrize(
    ("ledger", "listed", "level", "wanted", "paid_for", "coming"),
    [
        ((), (), 0, 2, 2, 2),  # before the first start: what is wanted
        ((), (), 3, 2, 3, 3),  # the level is still what an earlier start wanted
        ((), (node("a"), node("b"), node("c")), 2, 2, 3, 0),  # just started or refilled, and in no book yet
        (
            ("a", "b"),
            (ended("a"), node("b")),
            2,
            2,
            2,
            1,
        ),  # its end is listed and not in the books yet: the refill is due
        (
            (),
            (node("a", relieved=True), node("b")),
            2,
            2,
            3,
            1,
        ),  # one is being taken, and its successor is about to come
        ((), (node("a", relieved=True), node("b"), node("c")), 2, 2, 3, 0),  # and has come
        (("a", "b", "c"), (), 2, 2, 3, 0),  # a list that says nothing of machines in the books ends none of them
    ],
)
def test_every_machine_that_is_or_will_be_there_is_paid_for(ledger, listed, level, wanted, paid_for, coming):
    tracker = SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), FreeUpToNow())
    job = state(cap_usd_per_hour=Decimal("0.01"), nodes=tuple(map(interval, ledger)))
    group = GroupView(exists=True, size=level, armed_until=None, nodes=listed)

    payable = tracker.payable(job, group, wanted, NOW, Decimal("0.1"), WALL)

    # A machine is charged for a minute as soon as it is there: that minute is kept out of the time of those to come.
    at_once = timedelta(minutes=1)
    assert payable.until is not None
    assert payable.with_another is not None
    assert abs(payable.until - (NOW + (timedelta(hours=10) - coming * at_once) / paid_for)) < A_CENTS_ROUNDING
    another = NOW + (timedelta(hours=10) - (coming + 1) * at_once) / (paid_for + 1)
    assert abs(payable.with_another - another) < A_CENTS_ROUNDING
