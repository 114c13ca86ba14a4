"""The two files between supervisor and agent, as the agent reads and writes them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from gpucloud.domain.agentstatus import Desired, Status, desired_from_json, status_from_json, status_to_json
from gpucloud.domain.codec import Malformed
from gpucloud.wholefile import read_text, write_whole

# Spare room in the file, so that a status still fits in place when the disk has no block left for a new file.
_STATUS_SIZE = 1536
_GPU_SIZE = 512  # for each device


class Inbox:
    """What the supervisor wants. A torn file changes nothing; an epoch lower than the highest seen is refused."""

    def __init__(self, folder: Path) -> None:
        self.desired: Desired | None = None
        self.sha256 = ""
        self._path = folder / "desired.json"
        self._epoch_path = folder / "epoch"
        self._signature: tuple[int, int, int] | None = None
        self.epoch = _number(read_text(self._epoch_path))

    def poll(self) -> None:
        """Take over what is in the file now, if it changed since the last call and may be obeyed."""
        try:
            stat = self._path.stat()
        except OSError:
            return
        signature = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if signature != self._signature:
            self._signature = signature
            self._take()

    def _take(self) -> None:
        try:
            data = self._path.read_bytes()
            desired = desired_from_json(data)
        except (OSError, Malformed):
            return
        if desired.epoch < self.epoch:
            return
        if desired.epoch > self.epoch:
            self.epoch = desired.epoch
            self._remember()
        self.desired = desired
        self.sha256 = hashlib.sha256(data).hexdigest()

    def _remember(self) -> None:
        try:
            write_whole(self._epoch_path, str(self.epoch))
        except OSError:
            # A full disk must not stop the newer supervisor; this process remembers, only a restart would not.
            return


class Outbox:
    """What the agent says: written at every change, and again within `beat_s` seconds."""

    def __init__(self, folder: Path, *, beat_s: float = 0.5) -> None:
        self._path = folder / "status.json"
        self._beat_s = beat_s
        self._written_at: float | None = None
        self._last: Status | None = None
        self._beat = _beat(self._path)

    def publish(self, status: Status, *, now_s: float) -> None:
        """Write the status (its `beat` is set here) if it says something new, or the last write is old."""
        age = None if self._written_at is None else now_s - self._written_at
        if age is not None and age < self._beat_s and not self._is_news(status, age):
            return
        self._beat += 1
        self._written_at, self._last = now_s, status
        text = status_to_json(replace(status, beat=self._beat)).ljust(_STATUS_SIZE + _GPU_SIZE * len(status.gpus))
        try:
            write_whole(self._path, text)
        except OSError:
            _overwrite(self._path, text)

    def _is_news(self, status: Status, age: float) -> bool:
        if self._last is None or _milestones(status) != _milestones(self._last):
            return True
        # Steps may come a hundred times a second.
        return age > 0.1 and _steps(status) != _steps(self._last)


def _milestones(status: Status) -> Status:
    """Return the status without what changes at every step, or every second."""
    status = replace(status, gpus=(), host=None)
    attempt = status.attempt
    if attempt is None:
        return status
    progress = attempt.progress
    steady = progress and replace(progress, step=0, loss=None, step_seconds=None, age_s=0.0, waiting_share=None)
    return replace(status, attempt=replace(attempt, progress=steady, output=()))


def _steps(status: Status) -> tuple[object, ...]:
    attempt = status.attempt
    return (attempt.progress and attempt.progress.step, attempt.output) if attempt else ()


def _overwrite(path: Path, text: str) -> None:
    """Write in place what cannot be written beside: on a full disk the old file's blocks are still ours."""
    try:
        with path.open("r+b") as file:
            if len(text) <= os.fstat(file.fileno()).st_size:
                os.pwrite(file.fileno(), text.encode("ascii"), 0)
    except OSError:
        return  # the beat stands still, and that is what the supervisor then sees


def _beat(path: Path) -> int:
    try:
        return status_from_json(read_text(path) or "").beat
    except Malformed:
        return 0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0
