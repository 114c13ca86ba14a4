"""Output of scripts: as it was written, and to who looks on as it would show, progress bars among it."""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from gpucloud.cli.render.words import say_json
from gpucloud.domain.node.output import Bars, BegunLine, without_code_folder
from gpucloud.domain.untrusted import coloured, lines_of, plain
from gpucloud.usecases.jobstore.records import LogPart

_RUNNERS = ("GITHUB_ACTIONS", "TF_BUILD")
"""What runners that take commands from their steps' logs set: GitHub's and Azure's."""

_SHOWN_EVERY_S = 0.5
_CLEAR = "\r\x1b[K"
_WIDTH = (80, 24)
_LONGEST = 1 << 20  # bytes of a line that is waited for; a longer one is written in pieces, each as a line
_STAMP = len("2026-11-24T18:40:00.123Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where output was written; `label` are the words for it before each line, none where it is clear."""

    node: str | None = None
    label: str = ""


NOWHERE = Place()


class LogWriter(Protocol):
    """Writes pieces of output in the order in which they are read."""

    def write(self, part: LogPart, data: bytes, at: datetime | None = None) -> None:
        """Write the next piece of a rank's output, which was there at that time, None where nobody knows."""
        ...

    def end(self) -> None:
        """Write what is left, when nothing more comes."""
        ...


def log_writer(
    *,
    follow: bool,
    as_json: bool,
    timestamps: bool = False,
    place: Callable[[LogPart], Place] = lambda part: NOWHERE,  # noqa: ARG005
) -> LogWriter:
    """Return what writes to standard output: a file, and a pipe that is not followed, get all that was written."""
    if as_json:
        return JsonLines(place)
    in_place, before = sys.stdout.isatty(), _Before(place, timestamps=timestamps)
    if in_place or (follow and not _is_file()):
        return AsShown(in_place=in_place, before=before)
    return AsWritten(before)


@dataclass(frozen=True, slots=True)
class _Before:
    """What stands before each line: where it was written, then when, as `docker compose logs -t` has it."""

    place: Callable[[LogPart], Place]
    timestamps: bool = field(kw_only=True)

    def of(self, part: LogPart, at: datetime | None) -> str:
        """Return the words before a line, none for a line that is to be as it is."""
        return f"{self.place(part).label}{_stamp(at):<{_STAMP}} " if self.timestamps else self.place(part).label


@dataclass(slots=True)
class _Begun:
    """The lines of several ranks, and what each has begun of its next one."""

    _begun: dict[tuple[int, int], tuple[LogPart, bytearray]] = field(default_factory=dict)

    def whole(self, part: LogPart, data: bytes) -> list[bytes]:
        """Return the lines that end in the data, without their ends."""
        _, begun = self._begun.setdefault((part.attempt, part.rank), (part, bytearray()))
        if b"\n" not in data and len(begun) + len(data) < _LONGEST:
            begun += data
            return []
        *lines, rest = (bytes(begun) + data).split(b"\n")
        if len(rest) >= _LONGEST:  # one that has no end
            lines, rest = [*lines, rest], b""
        begun[:] = rest
        return lines

    def left(self) -> Iterator[tuple[LogPart, bytes]]:
        """Yield lines that never ended, and forget them."""
        begun, self._begun = self._begun, {}
        yield from ((part, bytes(line)) for part, line in begun.values() if line)


class AsWritten:
    """Every byte, but for a CI runner, which would obey some of them.

    With words before lines, these are written when they are whole: those of ranks do not run into each other. Of a
    bar's states the last one is written then: a terminal behind the pipe would write the others over these words.
    """

    def __init__(self, before: _Before | None = None) -> None:
        self._before = before or _Before(lambda _: NOWHERE, timestamps=False)
        self._begun = _Begun()
        self._newest: dict[tuple[int, int], datetime | None] = {}

    def write(self, part: LogPart, data: bytes, at: datetime | None = None) -> None:
        """Write it as it is, or the lines that are whole now."""
        before = self._before.of(part, at).encode()
        if not before:
            _put(data if not _obeys() else _harmless(data.decode(errors="replace")).encode())
            return
        self._newest[part.attempt, part.rank] = at
        self._write_lines(before, self._begun.whole(part, data))

    def end(self) -> None:
        """Write lines that never ended."""
        for part, line in self._begun.left():
            self._write_lines(self._before.of(part, self._newest[part.attempt, part.rank]).encode(), [line])

    @staticmethod
    def _write_lines(before: bytes, lines: list[bytes]) -> None:
        data = b"".join(b"%s%s\n" % (before, _last_state(line)) for line in lines)
        if data:
            _put(data if not _obeys() else _harmless(data.decode(errors="replace")).encode())


class JsonLines:
    """One object a line: a bar's states are one line, with the carriage returns that part them."""

    def __init__(self, place: Callable[[LogPart], Place]) -> None:
        self._place = place
        self._begun: dict[tuple[int, int], BegunLine] = {}
        self._newest: dict[tuple[int, int], tuple[LogPart, datetime | None]] = {}

    def write(self, part: LogPart, data: bytes, at: datetime | None = None) -> None:
        """Write the lines that are whole now."""
        key = part.attempt, part.rank
        begun, self._newest[key] = self._begun.setdefault(key, BegunLine()), (part, at)
        *ends, rest = data.decode(errors="surrogateescape").split("\n")
        for end in ends:
            begun.add(end)
            self._say(part, begun.end(), at)
        begun.add(rest)

    def end(self) -> None:
        """Write lines that never ended."""
        for key, begun in self._begun.items():
            part, at = self._newest[key]
            if line := begun.end():
                self._say(part, line, at)
        self._begun.clear()

    def _say(self, part: LogPart, line: str, at: datetime | None) -> None:
        said = {"attempt": part.attempt, "rank": part.rank, "node": self._place(part).node, "at": _stamp(at) or None}
        say_json({**said, "line": _letters(line)}, is_one_of_many=True)


class AsShown:
    """Lines that stand, and of what moves the newest state at a bounded rate: in one place, or as a line of its own.

    On a terminal files of the job's code are named as `train` names them, by their paths in its folder.
    """

    def __init__(self, *, in_place: bool, before: _Before) -> None:
        self._in_place = in_place
        self._before = before
        self._bars: dict[tuple[int, int], Bars] = {}
        self._newest: dict[tuple[int, int], tuple[LogPart, datetime | None]] = {}
        self._pace = Paced(every_s=_SHOWN_EVERY_S if in_place else MOVING_EVERY_S)
        self._drawn = ""

    def write(self, part: LogPart, data: bytes, at: datetime | None = None) -> None:
        """Write what stands now; of several ranks the lowest one's row moves."""
        key = part.attempt, part.rank
        bars, self._newest[key] = self._bars.setdefault(key, Bars()), (part, at)
        stands = bars.feed(data.decode(errors="surrogateescape"))
        self._stand(self._begun(key, stands if self._in_place else self._pace.untold(stands)))
        newest = max(attempt for attempt, _ in self._bars)
        moving = (one for one in sorted(self._bars) if one[0] == newest and self._bars[one].moving)
        lowest = next(moving, key)
        due = self._pace.due(self._bars[lowest].moving)
        if due and self._in_place:
            self._draw(self._begun(lowest, due[-1]))
        elif due:
            self._stand(self._begun(lowest, "".join(f"{row}\n" for row in due)))

    def end(self) -> None:
        """Write the last state of what was left moving."""
        if self._drawn:
            self._drawn = ""
            _put(_CLEAR.encode())
        self._stand("".join(self._begun(key, self._bars[key].end()) for key in sorted(self._bars)))

    def _begun(self, key: tuple[int, int], text: str) -> str:
        """Return whole lines, or one without its end, with the words before each."""
        before = self._before.of(*self._newest[key])
        if not before or not text:
            return text
        return before + text[:-1].replace("\n", f"\n{before}") + text[-1:]

    def _stand(self, text: str) -> None:
        if not text:
            return
        shown = (
            coloured(without_code_folder(_letters(text)))
            if self._in_place
            else _harmless(_letters(text))
            if _obeys()
            else text
        )
        drawn, self._drawn = self._drawn, ""
        _put(f"{_CLEAR if drawn else ''}{shown}".encode(errors="surrogateescape"))
        if drawn:
            self._draw(drawn)

    def _draw(self, row: str) -> None:
        width = shutil.get_terminal_size(_WIDTH).columns - 1
        self._drawn = row
        _put(f"{_CLEAR}{plain(_letters(row))[:width]}".encode())


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _stamp(at: datetime | None) -> str:
    """Return the time as ISO 8601 has it, UTC to the millisecond; nothing for one that is not known."""
    return "" if at is None else f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"


def _letters(text: str) -> str:
    """Return the text with a mark for every byte that is of no letter."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _put(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _is_file() -> bool:
    return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)


def _obeys() -> bool:
    """Whether a CI runner reads this as its step's log."""
    return any(os.environ.get(name) for name in _RUNNERS) and not _is_file()


def _harmless(text: str) -> str:
    whole = text if text.endswith("\n") else f"{text}\n"  # a command cut in two pieces is none
    return "\n".join(lines_of(whole))


# Which lines of a job's output `logs` writes: those since a time, the last ones of each rank.


_LINES = re.compile(rb"[^\n]*\n|[^\n]+")  # a bar's states, between carriage returns, are one


@dataclass(slots=True)
class Since:
    """Lines that were whole at that time or later; a rank's line without a time is as old as the one before it."""

    at: datetime
    undated: int = 0
    """Lines that are left out, and whose own time is not known."""
    _open: set[tuple[int, int]] = field(default_factory=set)
    _begun: dict[tuple[int, int], bytearray] = field(default_factory=dict)

    def left(self, part: LogPart, data: bytes, at: datetime | None, *, began: datetime | None) -> bytes:
        """Return what of the data is wanted; `began` is when its attempt did, None where that is not known."""
        key = part.attempt, part.rank
        if key in self._open:
            return data
        if any(known is not None and known >= self.at for known in (at, began)):
            self._open.add(key)
            return bytes(self._begun.pop(key, b"")) + data
        if at is None:
            self.undated += data.count(b"\n")
        begun = self._begun.setdefault(key, bytearray())
        begun += data
        del begun[: max(begun.rfind(b"\n"), begun.rfind(b"\r", 0, -1)) + 1]
        del begun[:-_LONGEST]
        return b""


@dataclass(slots=True)
class _Line:
    part: LogPart
    data: bytearray
    at: datetime | None


@dataclass(slots=True)
class Tail:
    """The last lines of each rank, as `docker compose` and `kubectl` count them."""

    lines: int
    _ranks: dict[int, deque[_Line]] = field(default_factory=dict)

    def take(self, part: LogPart, data: bytes, at: datetime | None) -> None:
        """Keep its lines while no later ones take their place."""
        kept = self._ranks.setdefault(part.rank, deque(maxlen=min(self.lines, sys.maxsize)))
        for line in _LINES.findall(data):
            if kept and _goes_on(kept[-1], part):
                kept[-1].data += line
                kept[-1].at = at
            else:
                kept.append(_Line(part=part, data=bytearray(line), at=at))

    def left(self) -> Iterator[tuple[LogPart, bytes, datetime | None]]:
        """Yield what was kept, attempt by attempt and rank by rank."""
        lines = [line for kept in self._ranks.values() for line in kept]
        for line in sorted(lines, key=lambda one: (one.part.attempt, one.part.rank)):
            yield line.part, bytes(line.data), line.at


def _goes_on(line: _Line, part: LogPart) -> bool:
    return line.part.attempt == part.attempt and not line.data.endswith(b"\n") and len(line.data) < _LONGEST


# Progress bars of a script, as they are shown to who looks on.


MOVING_EVERY_S = 10.0
"""How often a bar that moves is a line of its own, where nothing can be drawn over."""


class FirstRank:
    """Rank 0's output, one attempt after the other: lines that stand, and what still moves."""

    def __init__(self) -> None:
        self._attempt = 0
        self._bars = Bars()

    @property
    def moving(self) -> tuple[str, ...]:
        """The rows that are written over, as they are now."""
        return self._bars.moving

    def feed(self, attempt: int, text: str) -> str:
        """Return the lines that stand now; first what another attempt left unfinished."""
        left = self.end() if attempt != self._attempt else ""
        self._attempt = attempt
        return left + self._bars.feed(text)

    def end(self) -> str:
        """Return what was left unfinished."""
        return self._bars.end()


class Paced:
    """Lets rows that move be told at a bounded rate, and only when they are others than were told last."""

    def __init__(self, *, every_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._monotonic = monotonic
        self._told: tuple[str, ...] = ()
        self._at = -math.inf

    def due(self, rows: tuple[str, ...]) -> tuple[str, ...]:
        """Return the rows if it is time to tell them, else nothing."""
        now = self._monotonic()
        if not rows or rows == self._told or now - self._at < self._every_s:
            return ()
        self._told, self._at = rows, now
        return rows

    def untold(self, lines: str) -> str:
        """Return lines that stand now without those that were told as they moved."""
        told, self._told = self._told, self._told if not lines else ()
        return "".join(line for line in lines.splitlines(keepends=True) if line.rstrip() not in told)
