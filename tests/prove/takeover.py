"""A job whose supervisor died is taken up by the same command, without any unlocking by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

from gpucloud.domain.errors import LeaseHeld
from gpucloud.domain.state.state import Owner
from gpucloud.store import open_store
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from tests.prove.goal import Figure, Form, Goal
from tests.unit.worlds import NOW, state

HERE_S, ELSEWHERE_S = 2.0, 20.0
_HOLDER = """
import sys, time
from gpucloud.system.retries import SystemClock
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take

with take(JobStore(open_store(sys.argv[1]), "left"), SystemClock()) as lease:
    print(lease.state.epoch, flush=True)
    time.sleep(600)
"""


def run(form: Form) -> Iterator[Figure]:
    """Yield how dead holders were followed: here, killed by SIGKILL; elsewhere, silent from a moment on."""
    long = form is Form.LONG
    here = [_after_a_kill() for _ in range(10 if long else 2)]
    # The lease of a job is 15 s; the short form waits for a shorter one, which tells the same.
    elsewhere = [_after_silence(15.0 if long else 6.0) for _ in range(3 if long else 1)]
    failed = sum(one is None for one in (*here, *elsewhere))
    yield Figure(name="takeover", value=failed, limit=0)
    yield Figure(name="takeover.followed", value=len(here) + len(elsewhere) - failed, limit=3, least=True)
    if long:
        yield Figure(name="takeover.here-s", value=_slowest(here), limit=HERE_S)
        yield Figure(name="takeover.elsewhere-s", value=_slowest(elsewhere), limit=ELSEWHERE_S)


def _slowest(times: list[float | None]) -> float:
    return round(max(one if one is not None else float("inf") for one in times), 3)


def _after_a_kill() -> float | None:
    """Return how many seconds after a holder of this host was killed the job was taken up; None if it was not."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = JobStore(open_store(folder), "left")
        jobs.create(state(job="left", lease_s=15.0))
        holder = subprocess.Popen((sys.executable, "-c", _HOLDER, folder), stdout=subprocess.PIPE)
        with holder:
            assert holder.stdout is not None
            epoch = int(holder.stdout.readline())
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
        return _until_taken(jobs, epoch, 60.0)


def _after_silence(lease_s: float) -> float | None:
    """The same for a holder on another host, of which nothing is heard any more."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = JobStore(open_store(folder), "left")
        owner = Owner(id="x", host="elsewhere", pid=1, started="1", since=NOW)
        jobs.create(replace(state(job="left", lease_s=lease_s), owner=owner, epoch=7))
        if not _is_refused(jobs):
            print("takeover: a job was taken from a holder that may live", file=sys.stderr)
            return None
        return _until_taken(jobs, 7, lease_s + 60.0)


def _is_refused(jobs: JobStore) -> bool:
    try:
        with take(jobs, SystemClock()):
            return False
    except LeaseHeld as held:
        return "on elsewhere" in held.message and "takes over in" in (held.hint or "")


def _until_taken(jobs: JobStore, epoch: int, limit_s: float) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        try:
            with take(jobs, SystemClock()) as lease:
                return time.monotonic() - began if lease.state.epoch == epoch + 1 else None
        except LeaseHeld:
            time.sleep(0.05)
    return None


GOAL = Goal(
    promise="a dead owner of a job is followed by the same command: within 2 s on its host, within 20 s elsewhere",
    real="processes killed by SIGKILL, their leases, the directory store and its clock",
    simulated="the owner on another host: a lease in its name that nobody renews",
    run=run,
)
