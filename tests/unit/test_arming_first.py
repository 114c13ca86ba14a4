"""Before the user's side asks for machines that are to drive their job, it writes down what they may cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.supervision.action import Arm, Move, Relieve, Resize
from gpucloud.usecases.jobstore import lease
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.provision import MachineProvisioner
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
def machine_provisioner():
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
    return MachineProvisioner(
        services=world,
        lease=lease.take(jobs, clock),
        bootstrapper=SimpleNamespace(publish=lambda region, gpu: None),
        tracker=SpendTracker(jobs, None),
        watcher=None,
    )


def test_a_shut_off_and_the_machines_behind_it_are_written_down_first(machine_provisioner):
    machine_provisioner.act(Arm(until=UNTIL))
    machine_provisioner.act(Resize(size=2))
    machine_provisioner.act(Relieve(node_id="a"))

    pool = machine_provisioner.lease.state.pool
    assert machine_provisioner.services.group.seen == [(2, UNTIL, pool)] * 3
    machine_provisioner.act(Resize(size=4))
    assert machine_provisioner.services.group.seen[-1] == (4, UNTIL, pool)


def test_machines_of_another_pool_are_written_down_before_they_are_asked_for(machine_provisioner):
    machine_provisioner.act(Arm(until=UNTIL))
    offer = Offer(
        pool=DEARER,
        gpu="H200",
        gpus=8,
        usd_per_hour=Decimal(60),
        cap_usd_per_hour=Decimal(66),
        as_of=NOW,
    )
    machine_provisioner.act(Move(offer=offer))
    machine_provisioner.act(Resize(size=2))

    assert machine_provisioner.services.group.seen[-1] == (2, UNTIL, DEARER)
    assert machine_provisioner.services.jobs.armings()[-1].cap_usd_per_hour == 66
    assert machine_provisioner.services.jobs.believed()[0].pool == DEARER


@pytest.mark.parametrize("until", [NOW + timedelta(minutes=20), UNTIL + timedelta(hours=1)])
def test_a_shut_off_that_the_cloud_refuses_to_move_is_told_as_it_was(machine_provisioner, until):
    machine_provisioner.act(Arm(until=UNTIL))

    def refuse(group, until):
        raise ProvisionError("no answer")

    machine_provisioner.services.group.arm = refuse
    with pytest.raises(ProvisionError):
        machine_provisioner.act(Arm(until=until))
    assert machine_provisioner.lease.state.paid_until == UNTIL
    machine_provisioner.lease.renew()
    assert machine_provisioner.services.jobs.load()[0].paid_until == UNTIL


def test_what_an_arming_tells_of_already_is_not_written_again(machine_provisioner):
    machine_provisioner.act(Arm(until=UNTIL))
    for _ in range(3):
        machine_provisioner.act(Resize(size=2))
    machine_provisioner.act(Resize(size=0))
    assert len(machine_provisioner.services.jobs.armings()) == 1


def test_a_job_that_is_looked_after_writes_down_none(machine_provisioner):
    machine_provisioner.services.order = None
    machine_provisioner.act(Arm(until=UNTIL))
    machine_provisioner.act(Resize(size=2))
    assert machine_provisioner.services.jobs.armings() == ()
    assert replace(machine_provisioner.lease.state, seq=0).paid_until == UNTIL


def test_a_sooner_shut_off_of_machines_that_are_kept_is_written_down_by_whoever_only_ends_the_job(machine_provisioner):
    """Else what they were paid for before would count in full, once the cloud lists them no more."""
    machine_provisioner.lease.write(replace(machine_provisioner.lease.state, drives_itself=True))
    machine_provisioner.act(Arm(until=UNTIL))
    machine_provisioner.services.order = None
    sooner = NOW + timedelta(minutes=20)
    machine_provisioner.act(Arm(until=sooner))

    assert [one.until for one in machine_provisioner.services.jobs.armings()] == [UNTIL, sooner]
    assert machine_provisioner.services.group.seen[-1][1] == UNTIL  # what was armed before counts until it is so
    machine_provisioner.services.on_machine = True
    machine_provisioner.act(Arm(until=NOW + timedelta(minutes=10)))
    assert len(machine_provisioner.services.jobs.armings()) == 2
