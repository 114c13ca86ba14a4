"""One `nvidia-smi` that runs as long as the agent does, and what it said last."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from datetime import datetime, timezone

from gpucloud.agent.metrics.query import FIELDS, OLD_FIELDS, command, row
from gpucloud.domain.hardware.gpus import GpuSample

_EVERY_MS = 1000
_ROUND_ENDS_S = 0.2  # the rows of a round are written at once; then there is nothing for the rest of the second
_HANGS_S = 30.0
_LONGEST_PAUSE_S = 60.0


class Sampler:
    """Samples every GPU of the machine once a second, from a thread; a program that dies or hangs is started again.

    `newest` is the last whole round, `heard_at` when it came (time.monotonic; None before the first), `said` the last
    line that was no row.
    """

    def __init__(self, program: str, *, every_ms: int = _EVERY_MS, hangs_s: float = _HANGS_S) -> None:
        self.newest: tuple[GpuSample, ...] = ()
        self.heard_at: float | None = None
        self.said = ""
        self._program = program
        self._every_ms = every_ms
        self._hangs_s = hangs_s
        self._fields: tuple[str, ...] = FIELDS
        self._round: list[GpuSample] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvidia-smi", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process that samples now."""
        child = self._child
        return child.pid if child else None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the program and the thread."""
        self._ending.set()
        child = self._child
        if child is not None:
            _kill(child)  # the thread reads to the end, and closes what it reads from
        self._thread.join(5)

    def _run(self) -> None:
        pause = 0.5
        while not self._ending.is_set():
            rounds = self._follow()
            pause = 0.5 if rounds else min(_LONGEST_PAUSE_S, pause * 2)
            self._ending.wait(pause)

    def _follow(self) -> int:
        """Read one program to its end, or until it hangs; return how many rounds it gave."""
        try:
            self._child = subprocess.Popen(
                command(self._program, self._fields, self._every_ms),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            self.said = str(error)
            return 0
        child = self._child
        try:
            return self._read(child)
        finally:
            self._child = None
            _kill(child)
            _close(child)

    def _read(self, child: subprocess.Popen[bytes]) -> int:
        assert child.stdout is not None  # noqa: S101  (it was asked for)
        rounds, rest, stream = 0, b"", child.stdout.fileno()
        while True:
            # A pause ends a round; a pause after a whole round that does not end is a program that hangs.
            if not select.select([stream], [], [], _ROUND_ENDS_S if self._round else self._hangs_s)[0]:
                if not self._end_round():
                    return rounds
                rounds += 1
                continue
            data = os.read(stream, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                rounds += self._take(line.decode(errors="replace").strip())
        return rounds + self._end_round()

    def _take(self, line: str) -> int:
        """Take a line; return 1 when it ended the round before it."""
        sample = row(line, self._fields, datetime.now(timezone.utc))
        if sample is None:
            self.said = line[:200] or self.said
            if "is not a valid field to query" in line:
                self._fields = OLD_FIELDS
            return 0
        ended = any(known.index == sample.index for known in self._round) and self._end_round()
        self._round.append(sample)
        return int(ended)

    def _end_round(self) -> int:
        if not self._round:
            return 0
        self.newest, self._round = tuple(self._round), []
        self.heard_at, self.said = time.monotonic(), ""
        return 1


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        child.kill()


def _close(child: subprocess.Popen[bytes]) -> None:
    """One that the kernel holds does not die, and is not waited for."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    if child.stdout is not None:
        child.stdout.close()
