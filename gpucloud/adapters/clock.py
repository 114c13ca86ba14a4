"""Real time: the only `now` and `sleep` of the product."""

from __future__ import annotations

import time
from datetime import datetime, timezone


class SystemClock:
    """This machine's clock."""

    def now(self) -> datetime:
        """Return the time, UTC."""
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
