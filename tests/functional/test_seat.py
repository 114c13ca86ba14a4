"""A seat takes one process at a time, whoever looks and whoever asks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from gpucloud import processes
from gpucloud.agent.seat import Seat

# Takes the lock over as its open file, says who it is, and stays.
SITTER = """
import os, sys, time
from pathlib import Path
from gpucloud.agent.seat import Seat
Seat(folder=Path(sys.argv[1]), name="sitter").sit(sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def seat(tmp_path):
    return Seat(folder=tmp_path / "place", name="sitter")


@pytest.fixture
def sat(seat):
    """What starts a process on the seat, of a package."""
    started = []

    def start(package):
        lock = seat.take(package, replace=True)
        argv = (sys.executable, "-c", SITTER, str(seat.folder), package)
        process = subprocess.Popen(argv, pass_fds=(lock,), stdout=subprocess.PIPE, text=True)
        os.close(lock)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nobody_sits_on_a_seat_that_was_never_taken(seat):
    assert seat.taken_by() is None
    assert not seat.folder.exists()


def test_a_process_sits_until_it_ends_and_says_from_which_package_it_runs(seat, sat):
    process = sat("aa")
    assert seat.taken_by() == "aa"
    process.kill()
    process.wait()
    assert seat.taken_by() is None


def test_one_that_runs_goes_on_unless_it_is_of_another_package_and_to_be_replaced(seat, sat):
    process = sat("aa")
    start = processes.started(process.pid)
    assert seat.take("aa", replace=True) is None
    assert seat.take("bb", replace=False) is None
    assert processes.alive(process.pid, start)


def test_one_of_another_package_is_ended_when_it_is_to_be_replaced(seat, sat):
    older = sat("aa")
    sat("bb")
    assert older.wait(timeout=10) == -9
    assert seat.taken_by() == "bb"


def test_two_that_look_at_once_do_not_take_each_other_for_one_that_runs(seat):
    os.close(seat.take("aa", replace=False))
    looking = os.open(seat.folder / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    try:
        assert seat.taken_by() is None
    finally:
        os.close(looking)


@pytest.mark.parametrize("last", ["aa", "bb"])
def test_one_that_only_looks_is_waited_for(seat, sat, last):
    ended = sat(last)
    ended.kill()
    ended.wait()
    looking = os.open(seat.folder / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    away = threading.Timer(0.3, os.close, [looking])
    away.start()
    lock = seat.take("aa", replace=True)
    away.join()
    assert lock is not None
    os.close(lock)


def test_a_damaged_note_of_who_sits_hides_nobody(seat, sat):
    sat("aa")
    (seat.folder / "sitter.json").write_text("{")
    assert seat.taken_by() == "unknown"
