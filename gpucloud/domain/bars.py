"""Output in which lines are written over, such as progress bars: what stands, and what still moves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MOVES = re.compile(r"(\r|\n|\x1b\[\d{0,9}[AB])")
_BEGUN = re.compile(r"(?:\x1b(?:\[\d{0,9})?|)\Z")  # whose rest may follow
_MOST_ROWS = 64  # a script that goes up farther is not followed


LONGEST = 1 << 20
"""Characters of a line that are shown: one that never ends is not kept for ever."""


def cut(text: str, length: int) -> str:
    """Return the beginning of a line of that length as it is shown, which says what is left out."""
    return text if length <= len(text) else f"{text}… ({length - len(text)} more characters of this line)"


@dataclass(slots=True)
class BegunLine:
    """A line that has not ended, in the pieces in which it came."""

    _pieces: list[str] = field(default_factory=list)
    _kept: int = 0
    _length: int = 0

    def add(self, piece: str) -> None:
        """Take what comes next of it."""
        self._length += len(piece)
        if kept := piece[: LONGEST - self._kept]:
            self._pieces.append(kept)
            self._kept += len(kept)

    def end(self) -> str:
        """Return the line as it is shown, and begin another one."""
        whole, length = "".join(self._pieces), self._length
        self._pieces, self._kept, self._length = [], 0, 0
        return cut(whole, length)


@dataclass(slots=True)
class _Row:
    text: str = ""
    length: int = 0
    """Of all that was written there; the text is its beginning."""
    over: bool = False
    """Whether what comes next takes the place of the text."""
    moves: bool = False
    """Whether it was ever written over."""

    @property
    def said(self) -> str:
        """The row as it is shown."""
        return cut(self.text, self.length)


def _first() -> list[_Row]:
    return [_Row()]


@dataclass(slots=True)
class Bars:
    """What one rank wrote, as a terminal would show it: rows, and in which of them it writes next.

    tqdm writes a bar over its last state (`\\r`), and goes down and up again for one within another.
    """

    _rows: list[_Row] = field(default_factory=_first)
    _at: int = 0
    _begun: str = ""

    @property
    def moving(self) -> tuple[str, ...]:
        """The rows that may still be written over, as they are now."""
        return tuple(row.said.rstrip() for row in self._rows if (row.moves or row.over) and row.text.strip())

    def feed(self, text: str) -> str:
        """Take what comes next, and return the lines that nothing comes back to any more, each with its end."""
        text = self._begun + text
        self._begun = _BEGUN.findall(text)[0]
        for piece in _MOVES.split(text[: len(text) - len(self._begun)]):
            self._take(piece)
        done, self._rows, self._at = self._rows[: self._at], self._rows[self._at :], 0
        return "".join(f"{row.said}\n" for row in done if row.text.strip() or not row.moves)

    def end(self) -> str:
        """Return what is left, when nothing more comes."""
        left, self._rows, self._at, self._begun = self._rows, _first(), 0, ""
        return "".join(f"{row.said}\n" for row in left if row.text.strip())

    def _take(self, piece: str) -> None:
        row = self._rows[self._at]
        if piece == "\r":
            row.over = True
        elif piece == "\n":
            self._go(self._at + 1)
        elif piece.startswith("\x1b[") and piece[-1:] in ("A", "B"):
            rows = int(piece[2:-1] or 1) if len(piece) < 6 else _MOST_ROWS
            # Down makes one row at the most, as a line's end does: a few bytes are not to be many rows.
            self._go(min(self._at + rows, len(self._rows)) if piece.endswith("B") else self._at - rows)
        elif piece:
            row.moves = row.moves or row.over
            row.text, row.length = ("", 0) if row.over else (row.text, row.length)
            row.text += piece[: LONGEST - len(row.text)]
            row.length, row.over = row.length + len(piece), False

    def _go(self, to: int) -> None:
        back = to < self._at
        self._at = max(0, to)
        while self._at >= len(self._rows):
            self._rows.append(_Row())
        row = self._rows[self._at]
        row.over, row.moves = bool(row.text), row.moves or back
