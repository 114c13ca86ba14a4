"""The time by the store's clock: all who supervise a job then agree, however wrong the clocks of their machines are.

The shut-off is a time of the cloud's. Reckoned by a laptop that is an hour ahead it would come an hour late, and the
budget would not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.ports import Clock
from gpucloud.usecases.jobstore import JobStore

_LASTS = timedelta(seconds=60)  # a clock that is put right meanwhile is wrong for so long at the most
_ALIKE = timedelta(seconds=3)  # S3 tells whole seconds, and the answer takes its time


@dataclass(slots=True)
class StoreClock:
    """Implements `Clock`; `story` hears of a clock that is wrong, once. Where the store does not answer, the last
    difference stands."""

    clock: Clock
    jobs: JobStore
    story: Callable[[str], None]
    _ahead: timedelta = timedelta(0)
    _asked_at: datetime | None = None
    _told: bool = False

    def now(self) -> datetime:
        """Return the time, aware, UTC."""
        here = self.clock.now()
        # A clock that was moved shows as an age below zero, or above the limit.
        if self._asked_at is None or not timedelta(0) <= here - self._asked_at < _LASTS:
            self._ask()
            here = self.clock.now()
        return here - self._ahead

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.clock.sleep(seconds)

    def _ask(self) -> None:
        self._asked_at = self.clock.now()
        try:
            there = self.jobs.time()
        except (StoreError, CredentialsError):
            return
        if there is None:
            return
        self._asked_at = self.clock.now()
        ahead = self._asked_at - there
        self._ahead = ahead if abs(ahead) > _ALIKE else timedelta(0)
        if self._ahead and not self._told:
            self._told = True
            way = "ahead of" if ahead > timedelta(0) else "behind"
            self.story(f"this machine's clock is {abs(ahead.total_seconds()):.0f} s {way} the store's, which counts")
