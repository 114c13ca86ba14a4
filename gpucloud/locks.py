"""Locks on files. They belong to the open file: threads exclude each other too, and a process's end gives them back."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False, make: bool = True) -> Iterator[None]:
    """Hold the lock, which is waited for as long as it takes; programs started meanwhile do not inherit it. OSError.

    `shared`: beside others that share it. `make`: a file that is not there is made, in a folder that is.
    """
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file, held until it is closed; False when somebody has it. OSError."""
    return _at_once(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock; two that look do not see each other. False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _at_once(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _at_once(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
