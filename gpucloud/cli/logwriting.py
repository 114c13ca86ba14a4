"""How `gpucloud logs` writes output: as it was written, and to who looks on as it would show."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass, field
from typing import Protocol

from gpucloud.cli.bars import MOVING_EVERY_S, Paced
from gpucloud.cli.render import say_json
from gpucloud.domain.bars import Bars, BegunLine
from gpucloud.domain.shown import coloured, lines_of, plain
from gpucloud.usecases.attemptrecords import LogPart

_RUNNERS = ("GITHUB_ACTIONS", "TF_BUILD")
"""What runners that take commands from their steps' logs set: GitHub's and Azure's."""

_SHOWN_EVERY_S = 0.5
_CLEAR = "\r\x1b[K"
_WIDTH = (80, 24)


class LogWriter(Protocol):
    """Writes pieces of output in the order in which they are read."""

    def write(self, part: LogPart, data: bytes) -> None:
        """Write the next piece of a rank's output."""
        ...

    def end(self) -> None:
        """Write what is left, when nothing more comes."""
        ...


def log_writer(*, follow: bool, as_json: bool) -> LogWriter:
    """Return what writes to standard output: a file, and a pipe that is not followed, get all that was written."""
    if as_json:
        return JsonLines()
    in_place = sys.stdout.isatty()
    if in_place or (follow and not _is_file()):
        return AsShown(in_place=in_place)
    return AsWritten()


class AsWritten:
    """Every byte, but for a CI runner, which would obey some of them."""

    def write(self, part: LogPart, data: bytes) -> None:
        """Write it as it is."""
        del part
        _put(data if not _obeys() else _harmless(data.decode(errors="replace")).encode())

    def end(self) -> None:
        """Nothing is left."""


@dataclass(slots=True)
class JsonLines:
    """One object a line: a bar's states are one line, with the carriage returns that part them."""

    _begun: dict[tuple[int, int], BegunLine] = field(default_factory=dict)

    def write(self, part: LogPart, data: bytes) -> None:
        """Write the lines that are whole now."""
        key = part.attempt, part.rank
        begun = self._begun.setdefault(key, BegunLine())
        *ends, rest = data.decode(errors="surrogateescape").split("\n")
        for end in ends:
            begun.add(end)
            _say_line(key, begun.end())
        begun.add(rest)

    def end(self) -> None:
        """Write lines that never ended."""
        for key, begun in self._begun.items():
            if line := begun.end():
                _say_line(key, line)
        self._begun.clear()


class AsShown:
    """Lines that stand, and of what moves the newest state at a bounded rate: in one place, or as a line of its own."""

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._bars: dict[tuple[int, int], Bars] = {}
        self._pace = Paced(every_s=_SHOWN_EVERY_S if in_place else MOVING_EVERY_S)
        self._drawn = ""

    def write(self, part: LogPart, data: bytes) -> None:
        """Write what stands now; of several ranks the lowest one's row moves."""
        bars = self._bars.setdefault((part.attempt, part.rank), Bars())
        stands = bars.feed(data.decode(errors="surrogateescape"))
        self._stand(stands if self._in_place else self._pace.untold(stands))
        newest = max(attempt for attempt, _ in self._bars)
        ranks = sorted(rank for attempt, rank in self._bars if attempt == newest)
        rows = next((rows for rank in ranks if (rows := self._bars[newest, rank].moving)), ())
        due = self._pace.due(rows)
        if due and self._in_place:
            self._draw(due[-1])
        elif due:
            self._stand("".join(f"{row}\n" for row in due))

    def end(self) -> None:
        """Write the last state of what was left moving."""
        if self._drawn:
            self._drawn = ""
            _put(_CLEAR.encode())
        self._stand("".join(self._bars[key].end() for key in sorted(self._bars)))

    def _stand(self, text: str) -> None:
        if not text:
            return
        shown = coloured(_letters(text)) if self._in_place else _harmless(_letters(text)) if _obeys() else text
        drawn, self._drawn = self._drawn, ""
        _put(f"{_CLEAR if drawn else ''}{shown}".encode(errors="surrogateescape"))
        if drawn:
            self._draw(drawn)

    def _draw(self, row: str) -> None:
        width = shutil.get_terminal_size(_WIDTH).columns - 1
        self._drawn = row
        _put(f"{_CLEAR}{plain(_letters(row))[:width]}".encode())


def _say_line(key: tuple[int, int], line: str) -> None:
    say_json({"attempt": key[0], "rank": key[1], "line": _letters(line)}, is_one_of_many=True)


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
