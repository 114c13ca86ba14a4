"""What every object store promises: whole objects under keys, writes with a condition, requests that are counted."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from gpucloud.domain import untrusted
from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums, bytes_in, count_of
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.quantities import format_size

RESERVED = ".gpucloud-"
"""File names that begin so belong to the store itself: no key may have them, no listing shows them."""


Heard = Callable[[], None]
Pieces = Sequence[memoryview]


def unheard() -> None:
    """Nobody wants to hear how a write goes on."""


class Conflict(Exception):
    """The condition of a `put` did not hold: the object is there already, or is another version."""


class StoreAway(StoreError):
    """Where the store was is none, or another one: no word of who may read it, or of a network."""


class NoBucket(StoreAway):
    """The store itself is not there: nothing was ever put into it, or somebody removed it."""


class TooMany(StoreError):
    """More objects lie below a prefix than are listed at once: whoever can write there has filled it."""

    def __init__(self, prefix: str, most: int) -> None:
        super().__init__(
            f"more than {most:,} objects lie below {prefix}", hint="nothing of gpucloud's has as many: remove them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object as read: its bytes, its version, when it was written and what time the store has now.

    Both times are the store's clock, so that their difference is an age whatever the caller's clock says.
    """

    data: bytes
    version: str
    modified: datetime
    store_time: datetime


class TooLarge(StoreError):
    """The object is too large to be read whole, and nothing of it was; `read_into` reads it in pieces.

    `about` is the object without its bytes. No record of a job is as large: whoever may write there did that.
    """

    def __init__(self, key: str, size: int, about: Stored) -> None:
        job = re.match(r"jobs/([^/]+)/", key)
        super().__init__(
            f"{key} has {format_size(size)}, and {format_size(untrusted.most_of(key))} is the most that is read of it: "
            "nothing is done by it",
            hint=f"gpucloud down {job[1]} ends the job all the same" if job else "nothing of gpucloud's is as large",
        )
        self.size = size
        self.about = about


class ObjectStore(Protocol):
    """Whole objects under `/`-separated keys. Errors: `StoreError` when the store does not answer or refuses.

    Versions tell contents apart. In S3 they are ETags, equal for equal bytes: a writer that must tell its own
    write from another's puts a nonce in.
    """

    url: str

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store."""
        ...

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none. TooLarge for one of more than `bounds.most_of` its key."""
        ...

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,
    ) -> str:
        """Write the object whole and durably, and return its version; a condition that fails raises `Conflict`.

        `private`: in a folder, for its owner's eyes only (mode 0600); in a bucket every object is.
        """
        ...

    def write(self, key: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
        """Write the pieces, one after the other, as one object, whole and durably, whatever is there.

        Made for large ones: nothing is copied, several parts move at once. What it returns was computed from the
        bytes as they were sent. `heard` is called by several threads, once for each part that has moved; what it raises
        ends the write.
        """
        ...

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter.

        Then, or after an error, what `into` holds means nothing.
        """
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted; TooMany for more than `LISTED_KEYS`."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        ...


def put_once(store: ObjectStore, key: str, data: bytes) -> bool:
    """Write the object unless one is there already, which stays as it is; return whether it was written."""
    try:
        store.put(key, data, if_absent=True)
    except Conflict:
        return False
    return True


def get_small(store: ObjectStore, key: str) -> Stored | None:
    """Return the object, None when there is none; one too large to be read whole has no bytes, as a damaged one."""
    try:
        return store.get(key)
    except TooLarge as error:
        return error.about


def within(keys: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Return the keys that start with the prefix, sorted, read no farther than `LISTED_KEYS`. TooMany."""
    most = untrusted.LISTED_KEYS
    found = list(itertools.islice((key for key in keys if key.startswith(prefix)), most + 1))
    if len(found) > most:
        raise TooMany(prefix, most)
    return tuple(sorted(found))


def checked(key: str) -> str:
    """Return the key; StoreError when it is absolute, or has an empty, `.`, `..` or reserved part."""
    parts = key.split("/")
    if "\0" in key or any(part in {"", ".", ".."} or part.startswith(RESERVED) for part in parts):
        raise StoreError(f"{key!r} cannot be a key", hint="use names separated by single slashes, none of them '..'")
    return key


# A store that counts the requests made of it, as S3 charges for them.


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

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store."""
        return self._store.address

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

    def write(self, key: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
        """Write the pieces as one object."""
        self._tally.add(puts=puts_of(bytes_in(pieces)))
        return self._store.write(key, pieces, heard)

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
