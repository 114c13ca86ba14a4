"""One agent per node, detached from whoever started it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.metadata import watcher_from
from gpucloud.agent.metrics.station import Station
from gpucloud.agent.reconcile import Agent
from gpucloud.agent.wake import Wake
from gpucloud.agent.wholefile import read_tail, read_text, write_whole

_NONE = OwnEnd()


def start(root: Path, *, package: str, own_end: OwnEnd = _NONE, replace: bool = False) -> str:
    """Start the agent of `root` and return "started" once it reported, or "already" when one runs.

    With `replace`, an agent of another package is ended first; an attempt of its own is then swept by the new one.
    """
    folder = root / "agent"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = _lock(folder)
    if lock is None and replace and _identity(folder).get("package") != package:
        _end(folder)
        lock = _wait_for_lock(folder, limit_s=3.0)
    if lock is None and not _lives(folder):  # somebody looks whether one runs, or starts it
        lock = _wait_for_lock(folder, limit_s=3.0)
    if lock is None:
        return "already"
    with contextlib.closing(lock):
        return _detach(root, package=package, own_end=own_end)


def running(root: Path) -> tuple[bool, str | None]:
    """Return whether the agent of `root` runs, and the package that it runs from."""
    folder = root / "agent"
    if not folder.is_dir():
        return False, None
    lock = _lock(folder)
    if lock is not None:
        lock.close()
        return False, None
    return True, str(_identity(folder).get("package"))


class _Lock:
    """A held lock; a forked child holds it too, and the last to close it frees it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        os.close(self.descriptor)


def _lock(folder: Path) -> _Lock | None:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return _Lock(descriptor)


def _wait_for_lock(folder: Path, *, limit_s: float) -> _Lock | None:
    deadline = time.monotonic() + limit_s
    while (lock := _lock(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return lock


def _identity(folder: Path) -> dict[str, object]:
    """Return what the running agent wrote of itself."""
    try:
        data = json.loads(read_text(folder / "agent.json") or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _end(folder: Path) -> None:
    if _lives(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(str(_identity(folder)["pid"])), signal.SIGKILL)


def _lives(folder: Path) -> bool:
    """Whether the agent that wrote of itself last is alive."""
    identity = _identity(folder)
    pid, started = identity.get("pid"), identity.get("started")
    return isinstance(pid, int) and isinstance(started, str) and processes.alive(pid, started)


def _detach(root: Path, *, package: str, own_end: OwnEnd) -> str:
    """Fork twice, so that the agent has no terminal, no session and no parent of ours."""
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
    with os.fdopen(reader, "rb") as ready:
        if ready.read():
            return "started"
    log = read_tail(root / "agent" / "agent.log", 2000)
    raise SystemExit(f"the agent did not start:\n{log}")


def _be_agent(root: Path, ready: int, *, package: str, own_end: OwnEnd) -> None:
    os.chdir("/")
    _redirect(root / "agent" / "agent.log")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.adopt_orphans()
    folder = root / "agent"
    own = {"pid": os.getpid(), "started": processes.started(os.getpid()), "package": package}
    write_whole(folder / "agent.json", json.dumps(own))
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
