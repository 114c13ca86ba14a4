"""Process trees that do not want to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucloud.system import processes

MARK = "GPUCLOUD_TEST_MARK"

# One process that adopts orphans and, below it: a child in a session of its own, a double-forked daemon, a child that
# ignores what can be ignored, one with an environment of its own. Each writes its pid when it is ready.
TREE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gpucloud.system import processes
def say(): Path(sys.argv[1], str(os.getpid())).touch()
def child(prepare):
    if os.fork() == 0:
        prepare(); say(); time.sleep(600); os._exit(0)
def double():
    os.setsid()
    if os.fork(): os._exit(0)
def deaf():
    for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
if sys.argv[2] == "adopting": processes.adopt_orphans()
child(os.setsid); child(double); child(deaf)
bare = "import time, pathlib, sys, os; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", bare, sys.argv[1]], env={}, start_new_session=True)
time.sleep(600)
"""


def poll(wanted: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not wanted():
        assert time.monotonic() < deadline, "never so"
        time.sleep(0.01)


def grow(folder: Path, mark: str, kind: str) -> tuple[subprocess.Popen[bytes], set[int]]:
    folder.mkdir()
    env = {"PYTHONPATH": str(Path(processes.__file__).parent.parent), MARK: mark}
    root = subprocess.Popen([sys.executable, "-c", TREE, str(folder), kind], env=env)
    poll(lambda: len(list(folder.iterdir())) == 4)
    return root, {int(path.name) for path in folder.iterdir()}


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    root, members = grow(tmp_path / "pids", "adopting-tree", "adopting")
    yield root, members
    for pid in (*members, root.pid):
        if processes.alive(pid, processes.started(pid) or ""):
            os.kill(pid, signal.SIGKILL)
    root.wait()


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if processes.started(pid) is not None}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has subreapers")
def test_everything_below_an_adopting_process_is_killed_and_it_is_spared(
    tree: tuple[subprocess.Popen[bytes], set[int]],
) -> None:
    root, members = tree
    assert members <= set(processes.descendants(root.pid))
    assert processes.kill_below(root.pid)
    assert living(members) == set()
    assert processes.started(root.pid) is not None


def test_a_mark_finds_the_processes_that_were_started_with_it_and_what_is_below_them(
    tree: tuple[subprocess.Popen[bytes], set[int]],
) -> None:
    root, members = tree
    found = set(processes.marked(MARK, "adopting-tree"))
    assert root.pid in found
    assert len(found & members) == 3  # all but the one with an environment of its own
    assert processes.marked(MARK, "adopting") == ()
    assert processes.kill_marked((MARK, "adopting-tree"))
    assert living({root.pid, *members}) == set()


def test_orphans_are_found_by_their_mark_when_their_root_was_killed(tmp_path: Path) -> None:
    root, members = grow(tmp_path / "pids", "orphans", "plain")
    children = set(processes.descendants(root.pid))
    root.kill()
    root.wait()
    marked = set(processes.marked(MARK, "orphans"))
    assert len(marked) == 3
    assert processes.kill_marked((MARK, "orphans"))
    assert living(marked) == set()
    for pid in living(members | children):  # the one without a mark escapes: that is what adoption is for
        os.kill(pid, signal.SIGKILL)


def test_a_stopped_tree_is_all_there_and_can_still_be_killed(tree: tuple[subprocess.Popen[bytes], set[int]]) -> None:
    root, members = tree
    processes.stop_tree(root.pid, mark=(MARK, "adopting-tree"))
    for pid in {root.pid, *members}:
        assert state(pid) == "T"
    assert processes.kill_below(root.pid)
    assert living(members) == set()


def state(pid: int) -> str:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return shown.strip()[:1]


def test_a_process_is_told_apart_from_none_and_from_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    birth = processes.started(child.pid)
    assert birth is not None
    assert processes.alive(child.pid, birth)
    assert not processes.alive(child.pid, "another time")
    assert child.pid in {process.pid for process in processes.listing()}
    assert child.stdin is not None
    child.stdin.close()
    poll(lambda: not processes.alive(child.pid, birth))  # not waited for yet: a zombie
    child.wait()
    assert processes.started(child.pid) is None


def test_this_boot_has_one_name() -> None:
    assert processes.boot_id()
    assert processes.boot_id() == processes.boot_id()


@pytest.mark.parametrize("there", [True, False])
def test_the_way_through_ps_agrees_with_proc(
    tree: tuple[subprocess.Popen[bytes], set[int]], monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    root, _ = tree
    below = set(processes.descendants(root.pid))
    if not there:
        root.kill()
        root.wait()
    monkeypatch.setattr(processes, "_LINUX", False)
    assert (processes.started(root.pid) is not None) is there
    if there:
        assert set(processes.descendants(root.pid)) == below
