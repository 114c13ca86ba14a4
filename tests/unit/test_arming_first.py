"""Before the user's side asks for machines that are to drive their job, it writes down what they may cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest

from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.supervision.action import Arm, Move, Relieve, Resize
from gpucloud.usecases.jobstore import lease
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import Cashier
from gpucloud.usecases.supervise.provision import Renter
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, job, put_job, state

UNTIL = NOW + timedelta(hours=8)
DEARER = Pool(instance_type="local.p2.16xlarge", zone="us-east-2a", market=Market.ON_DEMAND)


class Watched:
    """A group that remembers what was written down at each call: until when, for how many, of which pool."""

    def __init__(self, jobs):
        self.jobs = jobs
        self.seen = []

    def _look(self, *_, **__):
        told = self.jobs.armings()
        self.seen.append((told[-1].machines, told[-1].until, told[-1].rented.pool) if told else None)

    arm = resize = relieve = _look


@pytest.fixture
def renter():
    clock = JumpingClock(NOW)
    jobs = JobStore(MemoryStore(clock), "digits")
    put_job(jobs, state(paid_until=None))
    world = SimpleNamespace(
        clock=clock,
        group=Watched(jobs),
        jobs=jobs,
        job=job(),
        order="drives",
        on_machine=False,
        terms=Terms(),
        cluster="gpucloud-digits",
        provisioner=SimpleNamespace(group=lambda cluster, region: cluster),
    )
    return Renter(
        world=world,
        lease=lease.take(jobs, clock),
        preparer=SimpleNamespace(publish=lambda region, gpu: None),
        cashier=Cashier(jobs, None),
        watcher=None,
    )


def test_a_shut_off_and_the_machines_behind_it_are_written_down_first(renter):
    renter.act(Arm(until=UNTIL))
    renter.act(Resize(size=2))
    renter.act(Relieve(node_id="a"))

    pool = renter.lease.state.pool
    assert renter.world.group.seen == [(2, UNTIL, pool)] * 3
    renter.act(Resize(size=4))
    assert renter.world.group.seen[-1] == (4, UNTIL, pool)


def test_machines_of_another_pool_are_written_down_before_they_are_asked_for(renter):
    renter.act(Arm(until=UNTIL))
    offer = Offer(
        pool=DEARER,
        gpu="H200",
        gpus=8,
        usd_per_hour=Decimal(60),
        cap_usd_per_hour=Decimal(66),
        as_of=NOW,
    )
    renter.act(Move(offer=offer))
    renter.act(Resize(size=2))

    assert renter.world.group.seen[-1] == (2, UNTIL, DEARER)
    assert renter.world.jobs.armings()[-1].cap_usd_per_hour == 66
    assert renter.world.jobs.believed()[0].pool == DEARER


def test_what_an_arming_tells_of_already_is_not_written_again(renter):
    renter.act(Arm(until=UNTIL))
    for _ in range(3):
        renter.act(Resize(size=2))
    renter.act(Resize(size=0))
    assert len(renter.world.jobs.armings()) == 1


def test_a_job_that_is_looked_after_writes_down_none(renter):
    renter.world.order = None
    renter.act(Arm(until=UNTIL))
    renter.act(Resize(size=2))
    assert renter.world.jobs.armings() == ()
    assert replace(renter.lease.state, seq=0).paid_until == UNTIL


def test_a_sooner_shut_off_of_machines_that_are_kept_is_written_down_by_whoever_only_ends_the_job(renter):
    """Else what they were paid for before would count in full, once the cloud lists them no more."""
    renter.lease.write(replace(renter.lease.state, drives_itself=True))
    renter.act(Arm(until=UNTIL))
    renter.world.order = None
    sooner = NOW + timedelta(minutes=20)
    renter.act(Arm(until=sooner))

    assert [one.until for one in renter.world.jobs.armings()] == [UNTIL, sooner]
    assert renter.world.group.seen[-1][1] == UNTIL  # what was armed before counts until it is so
    renter.world.on_machine = True
    renter.act(Arm(until=NOW + timedelta(minutes=10)))
    assert len(renter.world.jobs.armings()) == 2
