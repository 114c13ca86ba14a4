"""One agent per node, detached from whoever started it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.limits import raise_limits
from gpucloud.agent.metadata import watcher_from
from gpucloud.agent.metrics.station import Station
from gpucloud.agent.reconcile import Agent
from gpucloud.agent.seat import agent_seat
from gpucloud.agent.wake import Wake

_NONE = OwnEnd()


def start(
    root: Path, *, package: str, own_end: OwnEnd = _NONE, replace: bool = False, lock_memory: bool = False
) -> str:
    """Start the agent of `root` and return "started" once it reported, or "already" when one runs.

    With `replace`, an agent of another package is ended first; an attempt of its own is then swept by the new one. With
    `lock_memory` root lets what it starts lock as much as it likes.
    """
    lock = agent_seat(root).take(package, replace=replace)
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
    failure = agent_seat(root).failure(reader)
    if failure is not None:
        raise SystemExit(failure)
    return "started"


def _be_agent(root: Path, ready: int, *, package: str, own_end: OwnEnd) -> None:
    os.chdir("/")
    seat = agent_seat(root)
    _redirect(seat.log)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.adopt_orphans()
    seat.sit(package)
    wake = Wake()
    wake.at_child_exit()
    watcher = watcher_from(os.environ, wake.wake)
    station = Station(root)
    agent = Agent(
        root,
        notice=lambda: watcher.notice if watcher else None,
        rebalance=lambda: watcher.rebalance if watcher else None,
        own_end=own_end,
        rest=wake.rest,
        station=station,
    )
    agent.tick()
    os.write(ready, b"ready")
    os.close(ready)
    if watcher:
        watcher.start()
    station.start()
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
