"""The lease is renewed beside whatever its owner writes, and takes none of it back."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest

from gpucloud.usecases import lease
from gpucloud.usecases.jobstore import JobStore
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

    monkeypatch.setattr("gpucloud.usecases.lease.uuid.uuid4", slow)
    with lease.take(jobs, clock) as held:
        for number in range(40):
            held.write(replace(held.state, message=str(number)))
            stored = jobs.load()
            assert (held.state.message, stored and stored[0].message) == (str(number), str(number))
