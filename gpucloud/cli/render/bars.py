"""Progress bars of a script, as they are shown to who looks on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gpucloud.domain.node.output import Bars

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
