"""One Terraform at a time per working folder, on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.domain.errors import ProvisionError

_POLL_S = 0.02


@contextlib.contextmanager
def alone(folder: Path, *, limit_s: float, story: Callable[[str], None]) -> Iterator[int]:
    """Hold the folder's lock, which outlives this process while a Terraform that it started still runs.

    Gives the lock's descriptor. ProvisionError when it is not free within `limit_s`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(fd, folder, limit_s, story)
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path, limit_s: float, story: Callable[[str], None]) -> None:
    deadline = time.monotonic() + limit_s
    told = False
    while not _try_lock(fd):
        if not told:
            story(f"another Terraform run for {folder.name} has not ended; waiting for it")
            told = True
        if time.monotonic() > deadline:
            raise ProvisionError(
                f"another Terraform run for {folder.name} has not ended after {limit_s:.0f} s",
                hint=f"see the newest file in {folder / 'logs'}",
            )
        time.sleep(_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
