"""What a node's own bootstrap keeps below the agent's folder: its lock, its record, its code, how it ended.

boot/lock            held while it runs
boot/node.json       the record that it goes by
boot/code            the record's code, as it came
boot/ended.json      how the last one ended
agent/visited        touched whenever a supervisor asks for facts
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder(root: Path) -> Path:
    """Return the folder, made if need be."""
    made = root / "boot"
    made.mkdir(parents=True, exist_ok=True, mode=0o700)
    return made


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Be the node's only bootstrap of its own; another one is waited for. What it starts does not inherit the lock."""
    with (folder(root) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def boots_itself(root: Path) -> bool:
    """Whether a bootstrap of the node's own is under way."""
    with _lock(root) as descriptor:
        return descriptor is not None and not _shared(descriptor, fcntl.LOCK_NB)


def wait_for_own(root: Path) -> None:
    """Return when no bootstrap of the node's own is under way."""
    with _lock(root) as descriptor:
        if descriptor is not None:
            _shared(descriptor, 0)


def note_visit(root: Path) -> None:
    """Write down that a supervisor came: from then on it is not for the first boot to end this machine."""
    place = root / "agent"
    with contextlib.suppress(OSError):  # a full disk is told by the facts
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / "visited").touch(mode=0o600)


@contextmanager
def _lock(root: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(root / "boot" / "lock", os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _shared(descriptor: int, flags: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | flags)
    except BlockingIOError:
        return False
    return True
