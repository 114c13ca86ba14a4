"""A clock that stands still until somebody sleeps; then it has been slept at once."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

START = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


class JumpingClock:
    """Implements `Clock`."""

    def __init__(self, start: datetime = START) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
