"""A node's life in whole seconds, cut where attempts ended."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from gpucloud.domain.state import Attempt, NodeLife

Span = tuple[datetime, datetime]


class Lifespan:
    """From a node's launch on, for `least` at the least; a second that was begun is a whole one."""

    def __init__(self, life: NodeLife, attempts: tuple[Attempt, ...], now: datetime, least: timedelta) -> None:
        """`attempts` are in their order. One that no other followed cuts nothing: the time after it is its own."""
        self.start = life.launched_at
        self.end = max(self._whole(life.ended_at or now), self._whole(self.start + least))
        # Of thousands of attempts a node has lived through a few.
        last = max(len(attempts) - 1, 0)
        first = bisect.bisect_right(attempts, self.start, hi=last, key=_ended)
        after = bisect.bisect_left(attempts, self.end, lo=first, hi=last, key=_ended)
        through = [attempt for attempt in attempts[first:after] if attempt.ended_at is not None]
        self._ends = [self._whole(_ended(attempt)) for attempt in through]
        self._numbers = [attempt.number for attempt in (*through, *attempts[after : after + 1])]

    def spans(self, cuts: Iterable[datetime] = ()) -> list[Span]:
        """Return the life in pieces, cut there and where attempts ended; none of a life that ended before it began."""
        inside = {cut for cut in (*self._ends, *map(self._whole, cuts)) if self.start < cut < self.end}
        return list(itertools.pairwise([self.start, *sorted(inside), self.end])) if self.start < self.end else []

    def attempt_at(self, moment: datetime) -> int | None:
        """Return the attempt that the time from then on is spent for: between two attempts, the later one."""
        number = bisect.bisect_right(self._ends, moment)
        return self._numbers[number] if number < len(self._numbers) else None

    def _whole(self, moment: datetime) -> datetime:
        return self.start + timedelta(seconds=math.ceil((moment - self.start).total_seconds()))


def _ended(attempt: Attempt) -> datetime:
    return attempt.ended_at or attempt.started_at
