"""Notes when output came (`gpucloud.domain.outputtimes`): a line for every tenth of a second in which some did."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.outputtimes import mark_line

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
