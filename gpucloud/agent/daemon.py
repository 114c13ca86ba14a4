"""One agent per node, detached from whoever started it, with the kernel's limits raised and a rest that news ends."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.metadata import watcher_from
from gpucloud.agent.metrics.node_metrics import NodeMetrics
from gpucloud.agent.reconcile import Agent
from gpucloud.agent.single_process import agent_process

_NONE = OwnEnd()


def start(
    root: Path, *, package: str, own_end: OwnEnd = _NONE, replace: bool = False, lock_memory: bool = False
) -> str:
    """Start the agent of `root` and return "started" once it reported, or "already" when one runs.

    With `replace`, an agent of another package is ended first; an attempt of its own is then swept by the new one. With
    `lock_memory` root lets what it starts lock as much as it likes.
    """
    lock = agent_process(root).take(package, replace=replace)
    if lock is None:
        return "already"
    try:
        raise_limits(lock_memory=lock_memory)
        return _detach(root, package=package, own_end=own_end)
    finally:
        os.close(lock)


def _detach(root: Path, *, package: str, own_end: OwnEnd) -> str:
    """Fork twice, so that the agent has no terminal, no session and no parent of ours; it holds the lock as we do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reader)
            _be_agent(root, writer, package=package, own_end=own_end)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    failure = agent_process(root).failure(reader)
    if failure is not None:
        raise SystemExit(failure)
    return "started"


def _be_agent(root: Path, ready: int, *, package: str, own_end: OwnEnd) -> None:
    os.chdir("/")
    process = agent_process(root)
    _redirect(process.log)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.adopt_orphans()
    process.sit(package)
    wake = Wake()
    wake.at_child_exit()
    watcher = watcher_from(os.environ, wake.wake)
    node_metrics = NodeMetrics(root)
    agent = Agent(
        root,
        notice=lambda: watcher.notice if watcher else None,
        rebalance=lambda: watcher.rebalance if watcher else None,
        own_end=own_end,
        rest=wake.rest,
        node_metrics=node_metrics,
    )
    agent.tick()
    os.write(ready, b"ready")
    os.close(ready)
    if watcher:
        watcher.start()
    node_metrics.start()
    agent.run()


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


# Ends the loop's rest early: a child exited, or another thread has news.


class Wake:
    """A pipe that `rest` listens to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def at_child_exit(self) -> None:
        """Wake whenever a child of this process ends; only the main thread may ask for it."""
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the rest now; from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._writer, b"w")

    def rest(self, seconds: float) -> None:
        """Return after `seconds`, or at once when there is news."""
        if select.select([self._reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)


# What the kernel lets the processes of an attempt have: open files, and memory that stays where it is.


_MOST_FILES = 1 << 20  # some programs close every number up to the limit, one by one
_ASKED_S = 10.0


def raise_limits(*, lock_memory: bool) -> None:
    """Raise this process's limits, and so those of all that it starts, as far as it may.

    RDMA cards register memory that must not move. What EFA's installer writes into limits.d counts from the next login
    on, and we are of an earlier one: with `lock_memory` root says it of this process.
    """
    _raise(resource.RLIMIT_NOFILE, _MOST_FILES)
    _raise(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    if lock_memory and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        root = () if os.geteuid() == 0 else ("sudo", "-n")
        argv = (*root, "prlimit", f"--pid={os.getpid()}", "--memlock=unlimited:unlimited")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # without it, the gate warns
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASKED_S, check=False)


def _raise(kind: int, most: int) -> None:
    soft, hard = resource.getrlimit(kind)
    within = hard if most == resource.RLIM_INFINITY else most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft not in (resource.RLIM_INFINITY, within) and (within == resource.RLIM_INFINITY or within > soft):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (within, hard))
