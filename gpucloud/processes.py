"""Process trees on this machine: listed, killed whole, told apart from later ones with the same pid.

Linux reads `/proc`; elsewhere `ps` answers. Standard library only: nodes use it before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LINUX = sys.platform.startswith("linux")
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; `started` differs between two processes that had the same pid."""

    pid: int
    parent: int
    started: str


def listing() -> tuple[Process, ...]:
    """Return every process that is alive (zombies are not)."""
    return tuple(_from_proc()) if _LINUX else tuple(_from_ps())


def started(pid: int) -> str | None:
    """Return what tells this process from a later one with the same pid; None when it is not alive."""
    if _LINUX:
        process = _read_stat(pid)
        return process.started if process else None
    return next((p.started for p in listing() if p.pid == pid), None)


def alive(pid: int, start: str) -> bool:
    """Whether that very process still runs."""
    return started(pid) == start


def descendants(pid: int) -> tuple[int, ...]:
    """Return the pids of everything below `pid`, without itself."""
    children: dict[int, list[int]] = {}
    for process in listing():
        children.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return tuple(found)


def marked(name: str, value: str) -> tuple[int, ...]:
    """Return the pids of all processes, save this one, that were started with NAME=value in their environment."""
    entry = f"{name}={value}"
    return tuple(p.pid for p in listing() if p.pid != os.getpid() and _has_entry(p.pid, entry))


def kill_below(pid: int, *, mark: tuple[str, str] | None = None, limit_s: float = 5.0) -> bool:
    """SIGKILL everything below `pid` and everything that bears `mark`, again until nothing is left.

    Returns False when something was still alive after `limit_s`. `pid` itself is spared.
    """
    deadline = time.monotonic() + limit_s
    while True:
        targets = set(descendants(pid))
        if mark is not None:
            targets |= set(marked(*mark))
        targets -= {pid, os.getpid()}
        if not targets:
            return True
        if time.monotonic() > deadline:
            return False
        for target in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target, signal.SIGKILL)
        time.sleep(0.005)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (Linux), so that no daemon escapes `descendants`."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def boot_id() -> str:
    """Return what tells this boot from another."""
    path = _PROC / "sys/kernel/random/boot_id"
    if path.exists():
        return path.read_text().strip()
    return subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False).stdout.strip()


def _from_proc() -> Iterator[Process]:
    for name in os.listdir(_PROC):
        if name.isdigit():
            process = _read_stat(int(name))
            if process is not None:
                yield process


def _read_stat(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces: count fields from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), fields[19])


def _from_ps() -> Iterator[Process]:
    text = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=False
    ).stdout
    for line in text.splitlines():
        pid, parent, stat, start = line.split(None, 3)
        if not stat.startswith("Z"):
            yield Process(int(pid), int(parent), start)


def _has_entry(pid: int, entry: str) -> bool:
    if _LINUX:
        try:
            environ = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return False
        return os.fsencode(entry) in environ.split(b"\0")
    shown = subprocess.run(
        ["ps", "-Eww", "-o", "command=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return f" {entry} " in f"{shown} "
