"""What can go wrong at each call by which a process changes a folder on disk: its own death, or a full disk.

A death before a read is one after the change before it. Calls are seen by Python's audit hook, and fsync and write,
which it does not tell of, by taking their place. A hook cannot be taken out again: use it in a forked child.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.standins import in_writers

_CHANGES = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.utime", "os.rmdir"}
_TAKING_ROOM = {"os.mkdir", "os.rename", "os.link", "fsync", "write"}

Fault = Callable[[int, str], bool]
"""Given the call's number, from 1, and its name: whether the fault befalls it."""


def die(at: int, *, alone: bool = False) -> Fault:
    """SIGKILL this process just before the call; in a write, when half of it is done.

    A process that writes for a rank takes the rank with it, or dies `alone`: then a rank's own calls are spared.
    """

    def fault(number: int, name: str) -> bool:
        if number != at or (alone and not in_writers.is_one()):
            return False
        if not alone:
            in_writers.end_rank()
        if name != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return fault


def stop(at: int) -> Fault:
    """SIGSTOP this process and the one that it writes for, or that writes for it, just before the call."""

    def fault(number: int, _name: str) -> bool:
        if number == at:
            in_writers.stop_both()
        return False

    return fault


def full(first: int, last: int) -> Fault:
    """The disk is full from one call to another."""

    def fault(number: int, name: str) -> bool:
        if not first <= number <= last or name not in _TAKING_ROOM:
            return False
        if name == "write":
            return True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    return fault


def befall(folder: str, fault: Fault, count: Callable[[], int], *, deadly: bool) -> None:
    """Have the fault befall this process's calls below `folder` from now on; `deadly`: a write kills, half done.

    `count` returns the number of the call that is being made.
    """

    def called(name: str) -> bool:
        return fault(count(), name)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        makes = event == "open" and arguments[2] & os.O_CREAT
        if (makes or event in _CHANGES) and str(_path(arguments[0])).startswith(folder):
            called("os.mkdir" if makes else event)

    fsync, pwrite = os.fsync, os.pwrite

    def fsync_below(descriptor: int) -> None:
        called("fsync")
        fsync(descriptor)

    def pwrite_below(descriptor: int, data: Any, at: int) -> int:
        if not called("write"):
            return pwrite(descriptor, data, at)
        pwrite(descriptor, memoryview(data)[: len(data) // 2], at)
        if deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync, os.pwrite = fsync_below, pwrite_below
    sys.addaudithook(hook)


def _path(given: Any) -> Any:
    return os.fsdecode(given) if isinstance(given, (str, bytes, os.PathLike)) else given
