"""Starts a node's driver, detached from whoever asks.

drive/               the driver's seat, and besides:
drive/wanted.json    where its order is (`DriverWanted`)
drive/key            the cluster's private SSH key, mode 0600
drive/code/<tree>/   the job's code as it was started, not as its processes left it
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpucloud.agent.drive.interpreter import able
from gpucloud.agent.seat import driver_seat
from gpucloud.domain.bootstrap.wanted import DriverWanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import NodeError
from gpucloud.wholefile import write_whole


def start(root: Path, wanted: DriverWanted, *, package: Path | None, sha256: str) -> str:
    """Start the driver and return "started" once it has read its order, or "already" when this very one runs.

    One of another package is ended first: whatever it was about, the next one goes on with. Where no Python here can
    drive yet, the driver has one made first: training does not wait for that. Raises NodeError.
    """
    python = able() or sys.executable
    seat = driver_seat(root)
    seat.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(seat.folder / "wanted.json", to_json(wanted))
    lock = seat.take(sha256, replace=True)
    if lock is None:
        return "already"
    try:
        return _detach(root, (python, "-I", str(package)), lock)
    finally:
        os.close(lock)


def _detach(root: Path, run: tuple[str, ...], lock: int) -> str:
    """The driver inherits the lock; our copy is closed, so that it ends with it."""
    seat = driver_seat(root)
    reader, writer = os.pipe()
    with seat.log.open("ab") as log:
        subprocess.Popen(
            (*run, "drive", "--root", str(root), "--as", str(lock), str(writer)),
            cwd=seat.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock, writer),
            start_new_session=True,
        )
    os.close(writer)
    failure = seat.failure(reader)
    if failure is not None:
        raise NodeError(failure, hint="run the command again")
    return "started"
