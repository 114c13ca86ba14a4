"""A folder for one process takes one at a time, whoever looks and whoever asks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from gpucloud.agent.single_process import SingleProcessFolder
from gpucloud.system import processes

# Takes the lock over as its open file, says who it is, and stays.
SITTER = """
import os, sys, time
from pathlib import Path
from gpucloud.agent.single_process import SingleProcessFolder
SingleProcessFolder(folder=Path(sys.argv[1]), name="sitter").sit(sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def single(tmp_path):
    return SingleProcessFolder(folder=tmp_path / "place", name="sitter")


@pytest.fixture
def sat(single):
    """What starts a process on the single, of a package."""
    started = []

    def start(package):
        lock = single.take(package, replace=True)
        argv = (sys.executable, "-c", SITTER, str(single.folder), package)
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


def test_nobody_has_a_folder_that_was_never_taken(single):
    assert single.taken_by() is None
    assert not single.folder.exists()


def test_a_process_sits_until_it_ends_and_says_from_which_package_it_runs(single, sat):
    process = sat("aa")
    assert single.taken_by() == "aa"
    process.kill()
    process.wait()
    assert single.taken_by() is None


def test_one_that_runs_goes_on_unless_it_is_of_another_package_and_to_be_replaced(single, sat):
    process = sat("aa")
    start = processes.started(process.pid)
    assert single.take("aa", replace=True) is None
    assert single.take("bb", replace=False) is None
    assert processes.alive(process.pid, start)


def test_one_of_another_package_is_ended_when_it_is_to_be_replaced(single, sat):
    older = sat("aa")
    sat("bb")
    assert older.wait(timeout=10) == -9
    assert single.taken_by() == "bb"


def test_two_that_look_at_once_do_not_take_each_other_for_one_that_runs(single):
    os.close(single.take("aa", replace=False))
    looking = os.open(single.folder / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    try:
        assert single.taken_by() is None
    finally:
        os.close(looking)


@pytest.mark.parametrize("last", ["aa", "bb"])
def test_one_that_only_looks_is_waited_for(single, sat, last):
    ended = sat(last)
    ended.kill()
    ended.wait()
    looking = os.open(single.folder / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    away = threading.Timer(0.3, os.close, [looking])
    away.start()
    lock = single.take("aa", replace=True)
    away.join()
    assert lock is not None
    os.close(lock)


def test_a_damaged_note_of_who_sits_hides_nobody(single, sat):
    sat("aa")
    (single.folder / "sitter.json").write_text("{")
    assert single.taken_by() == "unknown"
