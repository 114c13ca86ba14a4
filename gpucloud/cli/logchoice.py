"""Which lines of a job's output `logs` writes: those since a time, the last ones of each rank."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from gpucloud.domain.errors import UsageError
from gpucloud.domain.quantities import parse_span
from gpucloud.domain.shown import in_one_line
from gpucloud.usecases.attemptrecords import LogPart

_LINES = re.compile(rb"[^\n]*\n|[^\n]+")  # a bar's states, between carriage returns, are one
_LONGEST = 1 << 20  # bytes of a line of which more may come
_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)


def since_time(text: str, now: datetime) -> datetime:
    """Return the time that "10m", "18:40" (the last one, UTC) or a time of ISO 8601 means. UsageError."""
    text = text.strip()
    if (found := _OF_DAY.fullmatch(text)) is not None:
        hour, minute, second = (int(part or 0) for part in found.groups())
        at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return at if at <= now else at - timedelta(days=1)
    try:
        at = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return at.astimezone(timezone.utc) if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        pass
    try:
        return now - parse_span(text)
    except ValueError:
        hint = "--since 10m, --since 18:40 or --since 2026-11-24T18:40:00Z; UTC where no zone is named"
        raise UsageError(f"--since: {in_one_line(text[:40])!r} is no time", hint=hint) from None


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
