"""The process tree of one attempt: started, ended, its output dated and kept from filling the disk, its ranks found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpucloud.agent.attempt.composing import (
    MARK,
    ask_for_stacks,
    ask_to_end,
    compose,
    end_recorded,
    note_writing,
    told_of,
)
from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.domain.node.numbers import REPORTED, Ends, Printed, compiled, ends_of, lines_of
from gpucloud.domain.node.output import mark_line
from gpucloud.domain.node.status import UNTOLD, AttemptStatus, Launch, Progress, Readings, RunState
from gpucloud.domain.untrusted import KEPT_OUTPUT_BYTES
from gpucloud.domain.variables import GPUCLOUD_RANKS
from gpucloud.system import processes
from gpucloud.system.wholefile import write_whole

CANNOT_RUN = 127  # what a shell answers when it cannot start a command

_TELLING_S = 3.0  # for ranks to write where they are; one that the kernel holds never does
_LEAVING_S = 3.0  # for a script that heeds SIGTERM to end what it is writing
_END_LIMIT_S = 15.0  # a container engine that does not answer must not keep the agent from its other duties


class RunningAttempt:
    """An attempt that was begun by this process; `status` says RUNNING until nothing of it is alive."""

    def __init__(self, launch: Launch, folder: AttemptFolder) -> None:
        """Make the folder and start the launcher; FileExistsError when the attempt was begun before."""
        folder.create()
        self.folder = folder
        self.leaves_early = bool(launch.wrapper) or launch.outputs
        self._ranks = tuple(int(rank) for rank in dict(launch.env).get(GPUCLOUD_RANKS, "").split())
        self._exit_code: int | None = None
        self._killing = self._gently = False
        self._brings, self._code = launch.outputs, Path(launch.directory)
        self._asked: tuple[frozenset[int], float] | None = None
        self._wrapped, self._broken_off = bool(launch.wrapper), dict[int, tuple[str, ...]]()
        self._aborting_since: float | None = None
        self._ended_beside = False
        self.room = OutputRoom(folder.path)
        self._times = OutputTimes(folder.path)
        self._numbers = OutputNumbers(folder.path, launch.metrics)
        self._launcher = self._start(launch)

    def kill(self, *, gently: bool = False) -> None:
        """Ask for the end; `advance` brings it about: `gently` once a script that heeds SIGTERM has left, or has not.

        That is waited for where its outputs are to come home, and which files it was writing is written down.
        """
        self._killing, self._gently = True, gently

    def abort(self) -> None:
        """Have the ranks tell where they are, then ask for the end; call it again until `advance` says it is over."""
        if self._aborting_since is None:
            self._aborting_since = time.monotonic()
            note_writing(self.folder.path)
            ask_for_stacks(self.folder.path)
        elif time.monotonic() - self._aborting_since >= _TELLING_S or not told_of(self.folder.path):
            self.kill()

    def advance(self, spare: frozenset[int] = frozenset()) -> AttemptStatus:
        """Look after the processes, and return how the attempt stands; those of `spare` are no part of it."""
        self._reap()
        if self._is_over() and self._swept(spare):
            self._reap()
            return self._verdict()
        output, progress = self._output(), self.folder.progress()
        return AttemptStatus(
            attempt=self.folder.number,
            state=RunState.RUNNING,
            outcome=None,
            exit_code=None,
            progress=progress,
            failed_rank=None,
            output=output,
            dropped=self.room.look(output, now_s=time.monotonic()),
            readings=self._numbers.look(output, progress, now_s=time.monotonic()),
        )

    def _output(self, *, last: bool = False) -> tuple[tuple[int, int], ...]:
        """Note when what is there came, and return how much of it that is."""
        sizes, at_ms = self.folder.output(), time.time_ns() // 1_000_000
        return self._times.look(sizes, now_s=time.monotonic(), at_ms=at_ms, last=last)

    def _start(self, launch: Launch) -> subprocess.Popen[bytes] | None:
        if launch.container is not None and launch.container.home:
            Path(launch.container.home).mkdir(mode=0o700, parents=True, exist_ok=True)  # else Docker does, as root
        composed = compose(launch, self.folder.path)
        write_whole(self.folder.path / "launch.json", composed.shown(launch))
        log_path = self.folder.path / "launcher.log"
        try:
            with log_path.open("ab") as log:
                return subprocess.Popen(
                    composed.argv,
                    cwd=launch.directory,
                    env={**os.environ, **composed.given},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._exit_code = CANNOT_RUN
            _note(self.folder, f"cannot start {composed.argv[0]} in {launch.directory}: {error}\n")
            return None

    def _reap(self) -> None:
        """Collect every child that ended: as subreaper the agent is the parent of each orphan."""
        while self._launcher is not None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None:
                return
            if ended.si_pid == self._launcher.pid:
                self._exit_code = self._launcher.wait()
            else:
                os.waitpid(ended.si_pid, 0)

    def _is_over(self) -> bool:
        """Whether the rest may be killed; who was asked to end is waited for also where its launcher went before."""
        if self._asked is None and (self._exit_code is not None or self._only_launcher_left()):
            return True
        if not self._killing or not self._brings or self._aborting_since is not None or self._ended_beside:
            return self._killing
        if self._asked is None:
            self._asked = self._ask() if self._gently else frozenset(), time.monotonic()
        asked, since = self._asked
        patient = self._gently and time.monotonic() - since < _LEAVING_S
        return not patient or asked.isdisjoint(told_of(self.folder.path))

    def _ask(self) -> frozenset[int]:
        wrapper = self._launcher.pid if self._launcher is not None and self._wrapped else None
        asked, writing = ask_to_end(self.folder.path, self._code, wrapper)
        self._broken_off.update(writing)
        return asked

    def _swept(self, spare: frozenset[int]) -> bool:
        """Whether nothing of the attempt is alive any more; call it again until it says so."""
        if not self._ended_beside:
            if self._asked is not None:
                note_writing(self.folder.path, self._broken_off)
            end_beside(self.folder)
            self._ended_beside = True
        return sweep(self.folder, spare=spare)

    def _only_launcher_left(self) -> bool:
        """Whether every rank wrote its last word and is gone: torchrun's own exit (0.4 s) needs no waiting for."""
        if self._launcher is None or not self._ranks:
            return False
        if not any(self.folder.all_said(word, self._ranks) for word in ("done", "left")):
            return False
        return not processes.descendants(self._launcher.pid)

    def _verdict(self) -> AttemptStatus:
        killed = self._killing or self._aborting_since is not None
        failed = self._exit_code not in (0, None) and not killed
        output, progress = self._output(last=True), self.folder.progress()
        return AttemptStatus(
            attempt=self.folder.number,
            state=RunState.EXITED,
            outcome=self.folder.outcome(self._ranks, self._exit_code, killed=killed),
            exit_code=self._exit_code,
            progress=progress,
            failed_rank=self.folder.failed_rank() if failed else None,
            output=output,
            dropped=self.room.look(output, now_s=time.monotonic()),
            readings=self._numbers.look(output, progress, now_s=time.monotonic(), last=True),
            over_s=0.0,
        )


def sweep(folder: AttemptFolder, *, limit_s: float = 0.25, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILL everything of the attempt; False when something is still alive after `limit_s` (call again).

    The mark is the attempt's folder, because nodes of the embedded fleet may share one process table; `spare` are
    children of the agent that are no part of any attempt.
    """
    return processes.kill_below(os.getpid(), mark=(MARK, str(folder.path)), limit_s=limit_s, spare=spare)


def end_beside(folder: AttemptFolder) -> None:
    """End what of the attempt is no process below us: its container. What is gone already is no error."""
    argv = end_recorded(folder.path)
    if not argv:
        return
    try:
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_END_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        _note(folder, f"{' '.join(argv)}: {error}\n")


def _note(folder: AttemptFolder, text: str) -> None:
    try:
        with (folder.path / "launcher.log").open("a") as log:
            log.write(text)
    except OSError:
        return  # the status says 127 all the same


# Notes when output came (`gpucloud.domain.node.output`): a line for every tenth of a second in which some did.


_EVERY_S = 0.1


@dataclass(slots=True)
class _Rank:
    until: int = 0
    marked_at_s: float | None = None
    unmarked: int | None = None
    """Up to where a mark should stand that could not be written: of what is before it nobody knows the time."""


class OutputTimes:
    """The marks of one attempt, `rank-<n>.times` in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}

    def look(
        self, sizes: tuple[tuple[int, int], ...], *, now_s: float, at_ms: int, last: bool = False
    ) -> tuple[tuple[int, int], ...]:
        """Mark what came since the last look, not too often but for the `last` time; return how much is marked.

        That much may be read: what has no mark yet would be read without its time.
        """
        for rank, size in sizes:
            known = self._ranks.setdefault(rank, _Rank())
            due = known.marked_at_s is None or now_s - known.marked_at_s >= _EVERY_S
            if size > known.until and (due or last):
                self._mark(rank, known, size, at_ms)
                known.until, known.marked_at_s = size, now_s
        return tuple((rank, self._ranks[rank].until) for rank, _ in sizes)

    def _mark(self, rank: int, known: _Rank, size: int, at_ms: int) -> None:
        """On a full disk go on without: a mark later on must not date what was written meanwhile."""
        missing = b"" if known.unmarked is None else b"\n" + mark_line(known.unmarked, None)
        try:
            _append(self._folder / f"rank-{rank}.times", missing + mark_line(size, at_ms))
            known.unmarked = None
        except OSError:
            known.unmarked = size


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError("the disk is full")
    finally:
        os.close(descriptor)


# Numbers in what the ranks print, by the job file's patterns: read on from where the last look stopped.


_LOOK_S = 0.5
_READ_AT_ONCE = 1 << 16  # bytes of one rank's output; of more, the last ones
_SEARCH_S = 0.1  # of this process's time that a pattern may search one look's lines


class OutputNumbers:
    """The numbers of one attempt on this node. A pattern that takes too long over a line is given up."""

    def __init__(self, folder: Path, patterns: tuple[tuple[str, str], ...]) -> None:
        self._folder = folder
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._unknown: set[str] = set()
        for name, pattern in patterns:
            try:
                self._patterns[name] = compiled(pattern)
            except ValueError:  # written for a newer Python than this machine's
                self._unknown.add(name)
        self._read: dict[int, tuple[int, str]] = {}
        self._printed = Printed()
        self._looked_s: float | None = None

    def look(
        self, sizes: tuple[tuple[int, int], ...], progress: Progress | None, *, now_s: float, last: bool = False
    ) -> Readings | None:
        """Read what came since the last look, not too often but for the `last` time; return what is known by it.

        A script that reports its steps by gpucloud.resume is not asked for them in another way.
        """
        due = self._looked_s is None or now_s - self._looked_s >= _LOOK_S
        if (self._patterns or self._unknown) and sizes and (due or last):
            self._looked_s = now_s
            self._give_up(self._unknown, "this machine's Python does not know its pattern", sizes)
            self._unknown = set()
            if progress is not None and progress.phase != UNTOLD:
                self._give_up(REPORTED & self._patterns.keys(), "the script reports its own", sizes)
            for rank, size in sizes:
                self._printed.take(rank, self._numbers(self._lines(rank, size), sizes), now_s)
        return self._printed.readings(now_s)

    def _lines(self, rank: int, size: int) -> tuple[str, ...]:
        at, rest = self._read.get(rank, (0, ""))
        if size - at > _READ_AT_ONCE:
            at, rest = size - _READ_AT_ONCE, ""
        try:
            with (self._folder / f"rank-{rank}.log").open("rb") as log:
                log.seek(at)
                data = log.read(size - at)
        except OSError:
            return ()
        lines, rest = lines_of(rest + data.decode(errors="replace"))
        self._read[rank] = at + len(data), rest
        return lines

    def _numbers(self, lines: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> dict[str, Ends]:
        found: dict[str, Ends] = {}
        for name, pattern in tuple(self._patterns.items()):
            try:
                with processes.at_most(_SEARCH_S):
                    ends = ends_of(pattern, lines)
            except processes.TooLong:
                self._give_up({name}, "its pattern takes too long over a line", sizes)
                continue
            if ends is not None:
                found[name] = ends
        return found

    def _give_up(self, names: Iterable[str], why: str, sizes: tuple[tuple[int, int], ...]) -> None:
        for name in sorted(names):
            self._patterns.pop(name, None)
            self._printed.forget(name)
            with contextlib.suppress(OSError):
                text = f"gpucloud: metrics: {name} is not read from the output: {why}\n"
                _append(self._folder / f"rank-{min(rank for rank, _ in sizes)}.log", text.encode())


# Keeps an attempt's output from filling the disk: what is oldest loses its blocks, the file keeps its length.


_STEP_BYTES = 64 << 20
_TRIM_EVERY_S = 10.0
_GRACE_S = 5.0  # between saying that bytes go and their going: nobody must read zeros for them
_PUNCH_KEEPING_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h


@dataclass(slots=True)
class _Trimmed:
    said: int = 0
    said_at_s: float = 0.0
    gone: int = 0


def gone(folder: Path, sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return how many bytes of each rank's output are gone already, as an agent finds it that knows nothing of it."""
    found: list[tuple[int, int]] = []
    for rank, size in sizes:
        with contextlib.suppress(OSError), (folder / f"rank-{rank}.log").open("rb") as file:
            if size and (begin := os.lseek(file.fileno(), 0, os.SEEK_DATA)):
                found.append((rank, begin))
    return tuple(found)


class OutputRoom:
    """The output files of one attempt, `rank-<n>.log` in its folder, which workers only append to, and other logs."""

    def __init__(self, folder: Path, *, kept_bytes: int = KEPT_OUTPUT_BYTES, step_bytes: int = _STEP_BYTES) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._step_bytes = step_bytes
        self._ranks: dict[int, _Trimmed] = {}
        self._frees: bool | None = None
        self._trimmed_at_s: float | None = None

    def look(self, sizes: tuple[tuple[int, int], ...], *, now_s: float) -> tuple[tuple[int, int], ...]:
        """Return how many bytes of each rank's output, from its beginning, are gone or will be in a moment."""
        self._trim_others(now_s)
        share = self._kept_bytes // max(1, len(sizes))
        for rank, size in sizes:
            known = self._ranks.setdefault(rank, _Trimmed())
            too_old = max(0, size - share) // self._step_bytes * self._step_bytes
            if too_old > known.said and self._can_free():
                known.said, known.said_at_s = too_old, now_s
        self.settle(now_s=now_s)
        return tuple((rank, known.said) for rank, known in sorted(self._ranks.items()) if known.said)

    def settle(self, *, now_s: float) -> None:
        """Free what was said to be gone; go on with it when the attempt is over, or the last of it stays."""
        for rank, known in self._ranks.items():
            if known.gone < known.said and now_s - known.said_at_s >= _GRACE_S:
                known.gone = known.said
                _free(self._folder / f"rank-{rank}.log", known.gone)

    def _can_free(self) -> bool:
        """Whether the file system gives blocks back: many a home on a network does not, and then nothing is gone."""
        if self._frees is None:
            try:
                with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".room-") as probe:
                    probe.write(b"x")
                    probe.flush()
                    self._frees = _free(Path(probe.name), 1)
            except OSError:
                return False
        return self._frees

    def _trim_others(self, now_s: float) -> None:
        """Bound what has no end: the launcher's words, what NCCL was told to write (`NCCL_DEBUG=INFO`), old times."""
        if self._trimmed_at_s is not None and now_s - self._trimmed_at_s < _TRIM_EVERY_S:
            return
        self._trimmed_at_s = now_s
        others = (path for name in ("nccl-*.log", "rank-*.times") for path in self._folder.glob(name))
        for path in (*others, self._folder / "launcher.log"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_blocks * 512 > 2 * self._step_bytes and self._can_free():
                    _free(path, status.st_size - self._step_bytes)


def _free(path: Path, length: int) -> bool:
    """Give the first bytes of the file back, and return whether the file system did."""
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        if allocate(descriptor, _PUNCH_KEEPING_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(length)) == 0:
            return True
        sys.stderr.write(f"{path}: {os.strerror(ctypes.get_errno())}\n")
        return False
    finally:
        os.close(descriptor)
