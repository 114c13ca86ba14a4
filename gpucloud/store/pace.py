"""A bound on how fast bytes leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_S = 0.05  # what may leave at once after a pause, as time at the bound


class Pace:
    """At most `bytes_per_s` for all threads together; None is no bound."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = now()

    def wait_for(self, size: int) -> None:
        """Return when that many bytes may leave."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._now()
            start = max(self._free_at, now - _BURST_S)
            self._free_at = start + size / self._bytes_per_s
        if start > now:
            self._sleep(start - now)
