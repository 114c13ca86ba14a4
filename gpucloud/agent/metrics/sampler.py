"""One `nvidia-smi` that runs as long as the agent does, and what it said last."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from gpucloud.domain.node.hardware import GpuSample

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


# The figures that `nvidia-smi --query-gpu` is asked for, and its rows as samples.


FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks_event_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
)
_NEW, _OLD = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
OLD_FIELDS = tuple(_OLD if name == _NEW else name for name in FIELDS)
"""The same for drivers before R535, which call the reasons throttle reasons."""

# nvml.h, "nvmlClocksEventReasons"; words as in the XML of nvidia-smi. Idle (0x1) and set clocks (0x2, 0x10, 0x100)
# are left out: they are no slowdown.
_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def command(program: str, fields: Sequence[str], every_ms: int) -> list[str]:
    """Return the command that writes a row per GPU every so often until it is ended."""
    return [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-lms", str(every_ms)]


def row(line: str, fields: Sequence[str], at: datetime) -> GpuSample | None:
    """Return the sample of one row, None for a line that is none. What the device does not say is None in it."""
    cells = [cell.strip() for cell in line.split(",")]
    named = dict(zip(fields, cells, strict=False))
    index, uuid = named.get("index", ""), named.get("uuid", "")
    if len(cells) != len(fields) or not index.isdecimal() or not uuid.startswith(("GPU-", "MIG-")):
        return None
    return GpuSample(
        at=at,
        index=int(index),
        uuid=uuid,
        pci=named.get("pci.bus_id", ""),
        use=_whole(named.get("utilization.gpu")),
        memory_used_mib=_whole(named.get("memory.used")),
        memory_mib=_whole(named.get("memory.total")),
        temperature=_whole(named.get("temperature.gpu")),
        power=_number(named.get("power.draw")),
        power_limit=_number(named.get("power.limit")),
        sm_clock=_whole(named.get("clocks.sm")),
        slowdowns=_slowdowns(named.get(_NEW) or named.get(_OLD) or ""),
        ecc_uncorrected=_whole(named.get("ecc.errors.uncorrected.volatile.total")),
    )


def _slowdowns(mask: str) -> tuple[str, ...]:
    """Return the reasons in a mask such as `0x0000000000000004`."""
    if not re.fullmatch(r"0x[0-9a-fA-F]+", mask):
        return ()
    bits = int(mask, 16)
    return tuple(word for bit, word in _REASONS.items() if bits & bit)


def _number(cell: str | None) -> float | None:
    """`[N/A]`, `[Not Supported]`, `[Unknown Error]` and `[GPU is lost]` are not numbers."""
    found = re.match(r"-?[0-9]+(\.[0-9]+)?", cell or "")
    return float(found[0]) if found else None


def _whole(cell: str | None) -> int | None:
    number = _number(cell)
    return None if number is None else int(number)
