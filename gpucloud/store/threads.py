"""Several things done at once by a few threads, and a bound on how fast bytes leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from gpucloud.domain.errors import StoreError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


THREADS = 4
"""How many parts move at once; more made neither a disk nor S3 faster, and cost memory."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def all_done(work: Callable[[_Item], _Answer], items: Iterable[_Item], *, threads: int = THREADS) -> list[_Answer]:
    """Return the answers in the items' order; after the first failure nothing new is begun, and that one is raised.

    StoreError where no thread can be started.
    """
    given = list(items)
    if len(given) < 2:
        return [work(item) for item in given]
    # Late: it takes as long to import as the rest of the store, and most objects are small.
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # noqa: PLC0415

    with ThreadPoolExecutor(min(threads, len(given))) as pool:
        running = _submitted(pool, work, given)
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        for one in running:
            if one.done() and not one.cancelled() and (error := one.exception()) is not None:
                raise error
        return [one.result() for one in running]


def _submitted(pool: ThreadPoolExecutor, work: Callable[[_Item], _Answer], given: list[_Item]) -> list[Future[_Answer]]:
    try:
        return [pool.submit(work, item) for item in given]
    except RuntimeError as error:  # Python's, where the system gives no thread
        pool.shutdown(wait=True, cancel_futures=True)
        raise StoreError(
            f"several parts are moved at once, and {error}", hint="ulimit -u, or the cgroup's pids.max"
        ) from error


# A bound on how fast bytes leave.


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
