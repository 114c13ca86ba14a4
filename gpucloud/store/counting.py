"""A store that counts the requests made of it, as S3 charges for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums, bytes_in, count_of
from gpucloud.store.contract import ObjectStore, Stored

_LISTED_AT_ONCE = 1000


@dataclass(slots=True)
class Tally:
    """How many requests wrote or listed, and how many read, since they were taken last. Thread-safe."""

    puts: int = 0
    gets: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, puts: int = 0, gets: int = 0) -> None:
        """Count so many more."""
        with self._lock:
            self.puts += puts
            self.gets += gets

    def take(self) -> tuple[int, int]:
        """Return both numbers, and begin anew."""
        with self._lock:
            found = self.puts, self.gets
            self.puts = self.gets = 0
        return found


class CountingStore:
    """Implements `ObjectStore` by another one. Requests that fail count; those repeated below it are not seen."""

    def __init__(self, store: ObjectStore, tally: Tally) -> None:
        self._store = store
        self._tally = tally
        self.url = store.url

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none."""
        self._tally.add(gets=1)
        return self._store.get(key)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,
    ) -> str:
        """Write the object whole, and return its version; a condition that fails raises `Conflict`."""
        self._tally.add(puts=1)
        return self._store.put(key, data, if_absent=if_absent, if_version=if_version, private=private)

    def write(self, key: str, pieces: Sequence[memoryview]) -> Sums:
        """Write the pieces as one object."""
        self._tally.add(puts=puts_of(bytes_in(pieces)))
        return self._store.write(key, pieces)

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        self._tally.add(gets=max(1, -(-len(into) // PART_BYTES)))
        return self._store.read_into(key, at, into)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted."""
        keys = self._store.list(prefix)
        self._tally.add(puts=max(1, -(-len(keys) // _LISTED_AT_ONCE)))
        return keys

    def delete(self, key: str) -> None:
        """Remove the object; S3 takes nothing for that."""
        self._store.delete(key)


def puts_of(size: int) -> int:
    """Return how many requests write an object: its parts, and for several of them a beginning and an end."""
    parts = count_of(size)
    return parts + 2 if parts > 1 else 1
