"""The files of one attempt, which workers write and the agent reads, and the other way round."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from stat import S_ISREG

from gpucloud.agent.decide import Saving
from gpucloud.domain.agentstatus import AttemptStatus, Outcome, Progress, is_possible_part, is_possible_progress
from gpucloud.domain.bounds import STATUS_BYTES
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.wholefile import read_tail, read_text, write_whole

LEFT_EXIT_CODE = 75  # "saved and left on a notice" (DESIGN §10); EX_TEMPFAIL of sysexits.h

_FAILED_RANK = re.compile(
    r"Root Cause \(first observed failure\):.*?^\s*rank\s*:\s*([0-9]{1,6})\b"
    # mpirun of Open MPI 4 (`[[1,1],3]`) and 5 (`[prterun-host-7@1,3]`).
    r"|^\s*Process name: \[(?:\[\d+,\d+\]|[^\[\],]+),([0-9]{1,6})\]",
    re.DOTALL | re.MULTILINE,
)


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
        return Outcome.LEFT if exit_code == LEFT_EXIT_CODE else Outcome.FAILED

    def failed_rank(self) -> int | None:
        """Return the rank that torchrun or mpirun saw fail first; None when its log does not say."""
        found = _FAILED_RANK.findall(read_tail(self.path / "launcher.log", 65536))
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
        known = {field.name: data.get(field.name) for field in fields(Progress)}
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
