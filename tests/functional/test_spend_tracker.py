"""What a job has cost is what its ledger says, to the last place."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.money.ledger import Terms, total
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import PricePoint
from gpucloud.domain.state.state import UsageInterval
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money import spend as spend_module
from gpucloud.usecases.money.spend import SpendTracker
from tests.unit.worlds import NOW, POOL, opened, state


class OnePrice:
    """A market whose every pool costs a price that no second divides evenly."""

    def offers(self, wanted):
        return ()

    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal("0.000018")),)


def test_a_charge_stays_as_it_was_billed_when_later_attempts_cut_its_time(tmp_path):
    jobs = JobStore(open_store(str(tmp_path)), "digits")
    interval = UsageInterval(
        node_id="a",
        pool=POOL,
        launched_at=NOW - timedelta(seconds=77),
        ended_at=NOW,
        end_cause=EndCause.CHOICE,
    )
    settled = SpendTracker(jobs, OnePrice()).settle(state(nodes=(interval,)), NOW)
    cuts = [NOW - timedelta(seconds=s) for s in (70, 61, 50, 31, 17, 3)]
    attempts = tuple(replace(opened("a", number=n + 1), ended_at=cut) for n, cut in enumerate(cuts))
    later = replace(settled, attempts=(*attempts, opened("a", number=7)))
    tracker = SpendTracker(jobs, OnePrice())
    assert tracker.spent_usd(later, NOW) == total(tracker.charges(later, NOW)) == Decimal("0.00000039")


@pytest.mark.parametrize("lived_s", [0, -3600])
def test_a_machine_that_was_charged_nothing_costs_nothing(tmp_path, lived_s):
    """It ended the moment it began, or by a clock that was behind that of its beginning."""
    jobs = JobStore(open_store(str(tmp_path)), "digits")
    ended = NOW + timedelta(seconds=lived_s)
    interval = UsageInterval(node_id="a", pool=POOL, launched_at=NOW, ended_at=ended, end_cause=EndCause.CHOICE)
    settled = SpendTracker(jobs, OnePrice(), Terms(minimum=timedelta(0))).settle(state(nodes=(interval,)), NOW)
    tracker = SpendTracker(jobs, OnePrice(), Terms(minimum=timedelta(0)))
    assert tracker.charges(settled, NOW) == ()
    assert tracker.spent_usd(settled, NOW) == 0


def test_the_bills_of_many_machines_are_read_as_one_object_and_sum_to_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(spend_module, "PAGE", 4)
    jobs = JobStore(open_store(str(tmp_path)), "digits")
    intervals = tuple(
        UsageInterval(
            node_id=f"i-{number}",
            pool=POOL,
            launched_at=NOW - timedelta(hours=1 + number),
            ended_at=NOW,
            end_cause=EndCause.CHOICE,
        )
        for number in range(10)
    )
    early = SpendTracker(jobs, OnePrice()).settle(state(nodes=intervals[:3]), NOW)
    later = SpendTracker(jobs, OnePrice()).settle(replace(early, nodes=(*early.nodes, *intervals[3:])), NOW)

    pages = [key for key in jobs.store.list("jobs/digits/control/ledger/") if "/pages/" in key]
    assert [key.rpartition("/")[2] for key in pages] == ["000000.json", "000001.json"]
    assert sorted(charge.node_id for charge in jobs.charges()) == [f"i-{number}" for number in range(10)]
    assert total(jobs.charges()) == SpendTracker(jobs, OnePrice()).spent_usd(later, NOW) == Decimal("0.00099")
    for number in range(8):
        jobs.store.delete(f"jobs/digits/control/ledger/i-{number}.json")
    assert total(jobs.charges()) == Decimal("0.00099")
