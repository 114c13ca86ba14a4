"""The lease is renewed beside whatever its owner writes, and takes none of it back."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import replace

import pytest

from gpucloud.usecases.jobstore import lease
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import state


def test_a_renewal_never_writes_an_older_state_than_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = JumpingClock()
    jobs = JobStore(MemoryStore(clock), "digits")
    jobs.create(state(lease_s=0.005))
    real = uuid.uuid4

    def slow() -> uuid.UUID:
        time.sleep(0.002)  # it asks the system, and so lets another thread go first
        return real()

    monkeypatch.setattr("gpucloud.usecases.jobstore.lease.uuid.uuid4", slow)
    with lease.take(jobs, clock) as held:
        for number in range(40):
            held.write(replace(held.state, message=str(number)))
            stored = jobs.load()
            assert (held.state.message, stored and stored[0].message) == (str(number), str(number))


def test_a_lease_whose_owner_hangs_is_renewed_for_an_hour_and_no_longer() -> None:
    """As in a terminal that Ctrl-S stopped: nobody supervises the job, and nobody else could take it over."""
    clock, up = JumpingClock(), [0.0]
    jobs = JobStore(MemoryStore(clock), "digits")
    jobs.create(state())
    held = lease.take(jobs, clock, uptime=lambda: up[0])

    def renewed() -> bool:
        before = jobs.load()
        held.renew()
        after = jobs.load()
        assert before is not None
        assert after is not None
        return after[0].seq > before[0].seq

    up[0] = 3599.0
    assert renewed()
    up[0] = 3601.0
    assert not renewed()
    held.remember(held.state)  # it is back, and nobody has taken the job
    assert renewed()


def test_who_leaves_a_job_to_its_machines_says_so_to_every_other_terminal() -> None:
    clock = JumpingClock()
    jobs = JobStore(MemoryStore(clock), "digits")
    jobs.create(state())
    with lease.take(jobs, clock, leaves=True) as held:
        assert held.state.owner is not None
        process = f"process {os.getpid()} on {socket.gethostname()}"
        assert lease.supervised_by(held.state.owner) == f"{process} until its machines drive it"
    with lease.take(jobs, clock) as held:
        assert held.state.owner is not None
        assert lease.supervised_by(held.state.owner) == process
