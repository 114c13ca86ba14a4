"""The lease over a real store: one writer, no lost update, a dead owner followed at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from gpucloud.domain.errors import LeaseHeld, StoreError
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.state.state import JobStatus, Owner
from gpucloud.store import Conflict, open_store
from gpucloud.system import processes
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import require_free, take
from tests.unit.worlds import NOW, state

CLOCK = SystemClock()


@pytest.fixture
def jobs(tmp_path):
    jobs = JobStore(open_store(str(tmp_path)), "digits")
    jobs.create(state(lease_s=0.5))
    return jobs


def stranger(**changes):
    plain = {"id": "x", "host": "elsewhere", "pid": 1, "started": "1", "since": NOW}
    return Owner(**{**plain, **changes})


def stored(jobs):
    return jobs.load()[0]


def test_a_second_supervisor_is_refused_and_told_who_holds_the_job(jobs):
    with take(jobs, CLOCK), pytest.raises(LeaseHeld, match=f"process {os.getpid()} on "):
        take(jobs, CLOCK)


def test_a_lease_that_is_given_back_is_free_and_its_epoch_rises(jobs):
    with take(jobs, CLOCK) as first:
        assert first.state.epoch == 1
    with take(jobs, CLOCK) as second:
        assert second.state.epoch == 2
    assert stored(jobs).owner is None


def test_a_dead_process_of_this_host_is_followed_at_once(jobs):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    host = os.uname().nodename
    current, found = jobs.load()
    jobs.replace(
        replace(current, owner=stranger(host=host, pid=gone.pid, space=processes.space()), lease_s=999.0), found.version
    )

    with take(jobs, CLOCK) as lease:
        assert lease.state.owner.pid == os.getpid()


@pytest.mark.parametrize(("here", "there"), [("pid:[", "pid:[1"), (processes.boot_id(), "0b1e-another-boot")])
def test_a_pid_of_another_container_or_of_another_machine_of_this_name_says_nothing(jobs, here, there):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    current, found = jobs.load()
    space = processes.space().replace(here, there)
    owner = stranger(host=os.uname().nodename, pid=gone.pid, space=space)
    jobs.replace(replace(current, owner=owner, lease_s=999.0), found.version)

    with pytest.raises(LeaseHeld):
        take(jobs, CLOCK)


def test_an_owner_elsewhere_is_followed_when_its_lease_is_over_by_the_stores_clock(jobs):
    current, found = jobs.load()
    jobs.replace(replace(current, owner=stranger()), found.version)

    with pytest.raises(LeaseHeld, match="on elsewhere"):
        take(jobs, CLOCK)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with take(jobs, CLOCK) as lease:
                assert lease.state.epoch == 1
                return
        except LeaseHeld:
            time.sleep(0.05)
    pytest.fail("the lease never ended")


def test_a_strangers_job_that_is_supervised_is_not_said_to_be_ended_by_down(jobs):
    with take(jobs, CLOCK):
        with pytest.raises(LeaseHeld) as mine:
            require_free(jobs, is_strangers=False)
        with pytest.raises(LeaseHeld) as strangers:
            require_free(jobs, is_strangers=True)
    assert "gpucloud down" in mine.value.hint
    assert strangers.value.hint.startswith("it is somebody else's: another `name:` trains beside it; if it is dead, ")


def test_a_held_lease_is_renewed_for_as_long_as_it_is_held(jobs):
    with take(jobs, CLOCK):
        first = jobs.load()[1].modified
        deadline = time.monotonic() + 5
        while (again := jobs.load()[1].modified) - first < timedelta(seconds=1):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert again > first


def test_a_supervisor_that_was_followed_cannot_write_any_more(jobs):
    with take(jobs, CLOCK) as lease:
        current, found = jobs.load()
        jobs.replace(replace(current, epoch=9, nonce="other", owner=stranger()), found.version)

        with pytest.raises(LeaseHeld):
            lease.write(replace(lease.state, status=JobStatus.RUNNING))
        with pytest.raises(LeaseHeld):
            lease.write(lease.state)
    assert (stored(jobs).epoch, stored(jobs).nonce, stored(jobs).owner.host) == (9, "other", "elsewhere")


def test_a_write_whose_reply_was_lost_is_known_again_by_its_nonce(jobs, monkeypatch):
    with take(jobs, CLOCK) as lease:
        real = JobStore.replace

        def lost_reply(self, new, version):
            real(self, new, version)
            raise Conflict("the retry of a write that had been done")

        monkeypatch.setattr(JobStore, "replace", lost_reply)
        lease.write(replace(lease.state, status=JobStatus.RUNNING))
        monkeypatch.undo()
        lease.write(replace(lease.state, drilled=1))

    assert stored(jobs).status is JobStatus.RUNNING
    assert stored(jobs).drilled == 1


def test_a_write_after_one_that_only_seemed_to_fail_is_not_taken_for_a_loss_of_the_lease(jobs, monkeypatch):
    with take(jobs, CLOCK) as lease:
        real = JobStore.replace

        def no_reply(self, new, version):
            real(self, new, version)
            raise StoreError("the store does not answer", may_pass=True)

        monkeypatch.setattr(JobStore, "replace", no_reply)
        with pytest.raises(StoreError):
            lease.write(replace(lease.state, status=JobStatus.RUNNING))
        monkeypatch.undo()
        lease.write(replace(lease.state, drilled=1))

    assert (stored(jobs).drilled, stored(jobs).owner) == (1, None)


def test_the_ledger_takes_a_nodes_charges_once(jobs):
    jobs.bill("a", ())
    jobs.bill("a", ())

    assert jobs.charges() == ()


def test_kept_output_is_read_back_in_order_of_its_offsets(jobs):
    jobs.records.append_log(1, 0, 6, DatedPiece(data=b"world\n"))
    jobs.records.append_log(1, 0, 0, DatedPiece(data=b"hello\n"))
    jobs.records.append_log(1, 0, 0, DatedPiece(data=b"again\n"))
    jobs.records.append_log(2, 1, 0, DatedPiece(data=b"other\n"))

    assert [jobs.records.read_log(part) for part in jobs.records.log_parts(1)] == [b"hello\n", b"world\n"]
    assert jobs.records.log_end(1, 0)[0] == 12
    assert jobs.records.log_end(2, 0)[0] == 0


class _Uptime:
    """Seconds that pass only when they are told to, as they do for a process that is stopped."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_a_supervisor_that_slept_makes_sure_that_the_job_is_its_own_before_it_does_anything(jobs):
    uptime = _Uptime()
    lease = take(jobs, CLOCK, uptime)
    current, found = jobs.load()

    uptime.seconds += 0.1  # less than a third of the lease: what was written lately holds
    lease.confirm()
    assert jobs.load()[1].version == found.version
    uptime.seconds += 30
    lease.confirm()
    assert stored(jobs).seq == current.seq + 1


def test_a_supervisor_that_was_followed_while_it_slept_may_do_nothing(jobs):
    uptime = _Uptime()
    lease = take(jobs, CLOCK, uptime)
    current, found = jobs.load()
    jobs.replace(replace(current, epoch=9, nonce="other", owner=stranger()), found.version)

    uptime.seconds += 30
    for _ in range(2):
        with pytest.raises(LeaseHeld, match="on elsewhere"):
            lease.confirm()
    assert stored(jobs).epoch == 9


def test_a_store_that_does_not_answer_lets_nothing_be_done(jobs, monkeypatch):
    uptime = _Uptime()
    lease = take(jobs, CLOCK, uptime)

    def silent(self, new, version):
        raise StoreError("no answer", may_pass=True)

    monkeypatch.setattr(JobStore, "replace", silent)
    uptime.seconds += 30
    with pytest.raises(StoreError):
        lease.confirm()
    monkeypatch.undo()
    lease.confirm()


def test_whoever_is_refused_hears_when_a_dead_holder_is_followed(jobs):
    current, found = jobs.load()
    jobs.replace(replace(current, owner=stranger(), lease_s=15.0), found.version)

    with pytest.raises(LeaseHeld) as refused:
        take(jobs, CLOCK)
    assert "takes over in 15 s" in refused.value.hint
