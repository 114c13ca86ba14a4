"""The files of one attempt, and the two files between supervisor and agent, as the agent reads and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import MISSING, dataclass, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from stat import S_ISREG

from gpucloud.agent.attempt.decide import Saving
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.node.output import port_was_taken
from gpucloud.domain.node.status import (
    AttemptStatus,
    Desired,
    Outcome,
    Progress,
    Status,
    desired_from_json,
    is_possible_part,
    is_possible_progress,
    status_from_json,
    status_to_json,
)
from gpucloud.domain.untrusted import STATUS_BYTES
from gpucloud.system.wholefile import read_tail, read_text, write_whole

LEFT_EXIT_CODE = 75  # "saved and left on a notice"; EX_TEMPFAIL of sysexits.h

_FAILED_RANK = re.compile(
    r"Root Cause \(first observed failure\):.*?^\s*rank\s*:\s*([0-9]{1,6})\b"
    # mpirun of Open MPI 4 (`[[1,1],3]`) and 5 (`[prterun-host-7@1,3]`).
    r"|^\s*Process name: \[(?:\[\d+,\d+\]|[^\[\],]+),([0-9]{1,6})\]",
    re.DOTALL | re.MULTILINE,
)


_READ_OF_LAUNCHER = 1 << 16  # bytes of the end of what it said
_KEPT_WHOLE = 3  # with the one that begins: what a person looks at is in the last ones
_KEPT_WORDS = frozenset({"exit.json", "launch.json", "saving.json"})
_LATEST_S = 253402300799.0  # the end of the calendar
_OUTPUT = re.compile(r"rank-([0-9]{1,6})\.log")  # as many as MOST_RANKS has
_NUMBER = re.compile(r"[0-9]{1,15}")  # below COUNTED


@dataclass(frozen=True, slots=True)
class _Saving:
    """`saving.json`: how long a save took, and the step before it."""

    seconds: float
    step: float | None


class AttemptFolder:
    """`attempts/<number>`; every read accepts that a file is absent or torn, or that the script wrote it to harm."""

    def __init__(self, attempts: Path, number: int) -> None:
        self.number = number
        self.path = attempts / f"{number:04d}"
        self._progress_signature: tuple[int, int] | None = None
        self._progress: tuple[Progress, float] | None = None

    def create(self) -> None:
        """Make the folder, once and for all; FileExistsError when the attempt was ever begun here."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)

    def ask_to_stop(self, reason: str, at: datetime) -> None:
        """Write `stop.json` unless it is there: workers save at a common step and leave."""
        path = self.path / "stop.json"
        if not path.exists():
            write_whole(path, json.dumps({"reason": reason, "at": at.isoformat()}))

    def ask_to_save(self, since: datetime) -> None:
        """Write `save.json` unless it is there for `since`: workers save at a common step and go on."""
        path = self.path / "save.json"
        text = json.dumps({"since": since.timestamp()})
        if read_text(path) != text:
            write_whole(path, text)

    def all_said(self, word: str, ranks: tuple[int, ...]) -> bool:
        """Whether `<word>-<rank>.json` is there for every rank; for unknown ranks, whether there is any."""
        if not ranks:
            return any(self.path.glob(f"{word}-*.json"))
        return all((self.path / f"{word}-{rank}.json").exists() for rank in ranks)

    def outcome(self, ranks: tuple[int, ...], exit_code: int | None, *, killed: bool) -> Outcome:
        """Return how the node's part ended: the workers' files decide before the exit code does."""
        if self.all_said("done", ranks):
            return Outcome.DONE
        if self.all_said("left", ranks):
            return Outcome.LEFT
        if killed or exit_code is None:
            return Outcome.KILLED
        if self.all_said("barred", ()):
            return Outcome.BARRED
        if exit_code == 0:
            return Outcome.DONE
        if exit_code == LEFT_EXIT_CODE:
            return Outcome.LEFT
        return Outcome.BARRED if self._could_not_meet() else Outcome.FAILED

    def _could_not_meet(self) -> bool:
        """Whether the launcher began no rank, for its port was another's: the next attempt draws another port."""
        return not self.output() and port_was_taken(self._launcher_said())

    def _launcher_said(self) -> str:
        return read_tail(self.path / "launcher.log", _READ_OF_LAUNCHER)

    def failed_rank(self) -> int | None:
        """Return the rank that torchrun or mpirun saw fail first; None when its log does not say."""
        found = _FAILED_RANK.findall(self._launcher_said())
        return int(found[-1][0] or found[-1][1]) if found else None

    def progress(self) -> Progress | None:
        """Return the last whole `progress.json`, with its age by the node's clock."""
        self._read_progress()
        if self._progress is None:
            return None
        progress, written_at = self._progress
        return replace(progress, age_s=max(0.0, time.time() - written_at))

    def saving(self) -> Saving | None:
        """Return how long saves take here, as a rank of this node wrote; None before the first save."""
        try:
            wrote = from_json(_Saving, _read_small(self.path / "saving.json") or "", of_any_version=True)
            save, step = timedelta(seconds=wrote.seconds), timedelta(seconds=wrote.step or 0.0)
        except (ValueError, OverflowError):
            return None
        return Saving(save=save, step=step) if min(save, step) >= timedelta(0) else None

    def output(self) -> tuple[tuple[int, int], ...]:
        """Return the length in bytes of each rank's output, by global rank."""
        try:
            sizes = {path.name: path.stat().st_size for path in self.path.glob("rank-*.log")}
        except OSError:
            return ()
        found = ((_OUTPUT.fullmatch(name), size) for name, size in sizes.items())
        return tuple(sorted((int(match[1]), size) for match, size in found if match))

    def verdict(self) -> AttemptStatus | None:
        """Return what the agent wrote when the attempt ended; None when it never did."""
        try:
            wrote = from_json(AttemptStatus, _read_small(self.path / "exit.json") or "", of_any_version=True)
        except Malformed:
            return None
        return wrote if is_possible_part(wrote) else None

    def since_verdict(self) -> timedelta:
        """Return how long ago the attempt's end was written; nothing where it was not."""
        try:
            return timedelta(seconds=max(0.0, time.time() - (self.path / "exit.json").stat().st_mtime))
        except (OSError, OverflowError):
            return timedelta(0)

    def write_verdict(self, status: AttemptStatus) -> None:
        """Write `exit.json`; a later agent reads it."""
        write_whole(self.path / "exit.json", to_json(status))

    def _read_progress(self) -> None:
        path = self.path / "progress.json"
        try:
            stat = path.stat()
            signature = (stat.st_mtime_ns, stat.st_ino)
            if signature == self._progress_signature:
                return
            self._progress = _progress(_read_small(path) or "")
        except (OSError, ValueError, OverflowError):
            return  # absent or torn: the last whole one stands
        self._progress_signature = signature


def newest(attempts: Path) -> int:
    """Return the highest attempt number that was ever begun here; 0 for none."""
    return max(_numbers(attempts), default=0)


def saving_before(attempts: Path, number: int) -> Saving | None:
    """Return how long saves took in the newest attempt before this one that saved here; None when none did."""
    older = sorted((one for one in _numbers(attempts) if one < number), reverse=True)
    return next((saving for one in older if (saving := AttemptFolder(attempts, one).saving()) is not None), None)


def prune(attempts: Path, number: int) -> None:
    """Empty the folders of attempts long before this one, such as a job that fails again and again leaves behind.

    The folder stays, and the few words that later attempts go by: an attempt that was begun here is not begun again.
    """
    for old in _numbers(attempts):
        if old <= number - _KEPT_WHOLE:
            _empty(attempts / f"{old:04d}")


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name in _KEPT_WORDS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _numbers(attempts: Path) -> tuple[int, ...]:
    try:
        return tuple(int(path.name) for path in attempts.iterdir() if _NUMBER.fullmatch(path.name))
    except OSError:
        return ()


def _progress(text: str) -> tuple[Progress, float]:
    """Return the progress and the time of writing in seconds since 1970; ValueError for anything torn."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise Malformed("progress.json: not an object")
        # The library on the node may be newer than this agent: keys that are not known here are passed over.
        wanted = (one.name for one in fields(Progress) if one.name in data or one.default is MISSING)
        known = {name: data.get(name) for name in wanted}
        progress = from_json(Progress, json.dumps({**known, "age_s": 0.0}))
    except RecursionError as error:
        raise Malformed("progress.json: nested too deeply") from error
    if not is_possible_progress(progress):
        raise Malformed("progress.json: a number or a text that cannot be")
    return progress, _seconds(data.get("written_at"))


def _seconds(written_at: object) -> float:
    if isinstance(written_at, str):
        return datetime.fromisoformat(written_at).timestamp()
    number = written_at if isinstance(written_at, int | float) and not isinstance(written_at, bool) else -1
    if 0 <= number <= _LATEST_S:
        return float(number)
    raise Malformed(f"progress.json: written_at: {written_at!r:.60}")


def _read_small(path: Path) -> str | None:
    """Return the text of a file that is one, and no larger than any that is written here; None for anything else."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return read_text(path) if S_ISREG(stat.st_mode) and stat.st_size <= STATUS_BYTES else None


# The two files between supervisor and agent, as the agent reads and writes them.


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
    """What the agent says: written at every change, and again within `heartbeat_s` seconds."""

    def __init__(self, folder: Path, *, heartbeat_s: float = 0.5) -> None:
        self._path = folder / "status.json"
        self._heartbeat_s = heartbeat_s
        self._written_at: float | None = None
        self._last: Status | None = None
        self._heartbeat = _heartbeat(self._path)

    def publish(self, status: Status, *, now_s: float) -> None:
        """Write the status (its `heartbeat` is set here) if it says something new, or the last write is old."""
        age = None if self._written_at is None else now_s - self._written_at
        if age is not None and age < self._heartbeat_s and not self._is_news(status, age):
            return
        self._heartbeat += 1
        self._written_at, self._last = now_s, status
        text = status_to_json(replace(status, heartbeat=self._heartbeat)).ljust(
            _STATUS_SIZE + _GPU_SIZE * len(status.gpus)
        )
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
    return replace(status, attempt=replace(attempt, progress=steady, output=(), readings=None))


def _steps(status: Status) -> tuple[object, ...]:
    attempt = status.attempt
    if attempt is None:
        return ()
    return attempt.progress and attempt.progress.step, attempt.readings and attempt.readings.step, attempt.output


def _overwrite(path: Path, text: str) -> None:
    """Write in place what cannot be written beside: on a full disk the old file's blocks are still ours."""
    try:
        with path.open("r+b") as file:
            if len(text) <= os.fstat(file.fileno()).st_size:
                os.pwrite(file.fileno(), text.encode("ascii"), 0)
    except OSError:
        return  # the beat stands still, and that is what the supervisor then sees


def _heartbeat(path: Path) -> int:
    try:
        return status_from_json(read_text(path) or "").heartbeat
    except Malformed:
        return 0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0
