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

_CHANGES = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.utime", "os.rmdir"}
_TAKING_ROOM = {"os.mkdir", "os.rename", "os.link", "fsync", "write"}

Fault = Callable[[int, str], bool]
"""Given the call's number, from 1, and its name: whether the fault befalls it."""


def die(at: int) -> Fault:
    """SIGKILL this process just before the call; in a write, when half of it is done."""

    def fault(number: int, name: str) -> bool:
        if number == at and name != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return number == at

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


def befall(folder: str, fault: Fault, *, deadly: bool) -> None:
    """Have the fault befall this process's calls below `folder` from now on; `deadly`: a write kills, half done."""
    calls = 0

    def called(name: str) -> bool:
        nonlocal calls
        calls += 1
        return fault(calls, name)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        makes = event == "open" and arguments[2] & os.O_CREAT
        if (makes or event in _CHANGES) and str(_path(arguments[0])).startswith(folder):
            called("os.mkdir" if makes else event)

    fsync, fdopen = os.fsync, os.fdopen

    def fsync_below(descriptor: int) -> None:
        called("fsync")
        fsync(descriptor)

    def fdopen_below(descriptor: int, mode: str = "r", *more: Any, **named: Any) -> Any:
        opened = fdopen(descriptor, mode, *more, **named)
        return _Torn(opened, called, deadly=deadly) if mode == "wb" else opened

    os.fsync, os.fdopen = fsync_below, fdopen_below
    sys.addaudithook(hook)


class _Torn:
    """A file whose writes may stop half way."""

    def __init__(self, file: Any, called: Callable[[str], bool], *, deadly: bool) -> None:
        self._file, self._called, self._deadly = file, called, deadly

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if not self._called("write"):
            return int(self._file.write(data))
        self._file.write(memoryview(data)[: len(data) // 2])
        if self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _path(given: Any) -> Any:
    return os.fsdecode(given) if isinstance(given, (str, bytes, os.PathLike)) else given
