"""Waiting: how what failed is tried again, by the policy that each place declares, and the real clock.

Whoever makes a call knows whether it may be repeated, and which of its errors pass:

    tries = _COLLISIONS.begin(sleep)
    while True:
        try:
            return put()
        except Collided:
            if not tries.again():
                raise
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A policy: when to try again, and when no more."""

    first_s: float
    """The wait after the first try."""
    factor: float = 2.0
    """By which each wait is longer than the one before; 1 for waits that are all alike."""
    longest_s: float = math.inf
    """No wait is longer."""
    tries: int | None = None
    """In all, the first included; None for as many as there is time for."""
    within_s: float = math.inf
    """No try begins later, counted from the first."""
    jitter: bool = False
    """Draws each wait from none to the whole of it (AWS's "full jitter"), so that many callers do not come at once."""

    def begin(
        self,
        sleep: Callable[[float], object] | None = None,
        *,
        now: Callable[[], float] | None = None,
        dice: random.Random | None = None,
    ) -> Tries:
        """Return the count for one call, its first try under way; `now` in seconds, of any clock that `sleep` moves."""
        return Tries(self, sleep or time.sleep, now or time.monotonic, dice or random.Random())  # noqa: S311  (no secret)


class Tries:
    """The tries of one call."""

    def __init__(
        self, policy: Retry, sleep: Callable[[float], object], now: Callable[[], float], dice: random.Random
    ) -> None:
        self._policy, self._sleep, self._now, self._dice = policy, sleep, now, dice
        self._made, self._wait_s, self._since = 1, min(policy.first_s, policy.longest_s), now()

    def again(self, *, at_once: bool = False) -> bool:
        """Wait for the next try and return True; False where the last one was made. `at_once` does not wait."""
        policy = self._policy
        wait_s = self._dice.uniform(0, self._wait_s) if policy.jitter else self._wait_s
        if self._made == policy.tries or self._now() + wait_s > self._since + policy.within_s:
            return False
        self._made += 1
        self._wait_s = min(self._wait_s * policy.factor, policy.longest_s)
        if not at_once:
            self._sleep(wait_s)
        return True


# Real time: the only `now` and `sleep` of the product.


class SystemClock:
    """This machine's clock."""

    def now(self) -> datetime:
        """Return the time, UTC."""
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
