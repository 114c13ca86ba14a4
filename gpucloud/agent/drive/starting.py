"""Starts a node's driver, detached from whoever asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.drive import files
from gpucloud.agent.drive.interpreter import interpreter
from gpucloud.agent.wholefile import read_tail, write_whole
from gpucloud.domain.bootstrap.wanted import DriverWanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import NodeError

_END_S = 5.0


def start(root: Path, wanted: DriverWanted, *, package: Path | None, sha256: str) -> str:
    """Start the driver and return "started" once it has read its order, or "already" when this very one runs.

    One of another package is ended first: whatever it was about, the next one goes on with. Raises NodeError.
    """
    python = interpreter(root)
    write_whole(files.folder(root) / "wanted.json", to_json(wanted))
    held = files.lock(root)
    if held is None and files.identity(root).get("package") == sha256:
        return "already"
    if held is None:
        _end(root)
        held = _wait_for_lock(root)
    if held is None:
        return "already"
    try:
        return _detach(root, (python, "-I", str(package)), sha256, held)
    finally:
        os.close(held)


def _end(root: Path) -> None:
    known = files.identity(root)
    pid, started = known.get("pid"), known.get("started")
    if isinstance(pid, int) and isinstance(started, str) and processes.alive(pid, started):
        os.kill(pid, signal.SIGKILL)


def _wait_for_lock(root: Path) -> int | None:
    deadline = time.monotonic() + _END_S
    while (held := files.lock(root)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def _detach(root: Path, run: tuple[str, ...], sha256: str, held: int) -> str:
    """The driver inherits the lock; our copy is closed, so that it ends with it."""
    place = files.folder(root)
    reader, writer = os.pipe()
    with (place / "drive.log").open("ab") as log:
        process = subprocess.Popen(
            (*run, "drive", "--root", str(root), "--as", str(held), str(writer)),
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(held, writer),
            start_new_session=True,
        )
    own = {"pid": process.pid, "started": processes.started(process.pid), "package": sha256}
    write_whole(place / "driver.json", json.dumps(own))
    os.close(writer)
    with os.fdopen(reader, "rb") as ready:
        if ready.read():
            return "started"
    raise NodeError(f"the driver did not start:\n{read_tail(place / 'drive.log', 2000)}", hint="run the command again")
