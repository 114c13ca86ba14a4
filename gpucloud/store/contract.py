"""What every object store promises: whole objects under keys, and writes with a condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpucloud.domain.errors import StoreError
from gpucloud.domain.parts import Sums

RESERVED = ".gpucloud-"
"""File names that begin so belong to the store itself: no key may have them, no listing shows them."""


class Conflict(Exception):
    """The condition of a `put` did not hold: the object is there already, or is another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object as read: its bytes, its version, when it was written and what time the store has now.

    Both times are the store's clock, so that their difference is an age whatever the caller's clock says.
    """

    data: bytes
    version: str
    modified: datetime
    store_time: datetime


class ObjectStore(Protocol):
    """Whole objects under `/`-separated keys. Errors: `StoreError` when the store does not answer or refuses.

    Versions tell contents apart. In S3 they are ETags, equal for equal bytes: a writer that must tell its own
    write from another's puts a nonce in.
    """

    url: str

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none."""
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

    def write(self, key: str, pieces: Sequence[memoryview]) -> Sums:
        """Write the pieces, one after the other, as one object, whole and durably, whatever is there.

        Made for large ones: nothing is copied, several parts move at once. What it returns was computed from the
        bytes as they were sent.
        """
        ...

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter.

        Then, or after an error, what `into` holds means nothing.
        """
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        ...


def checked(key: str) -> str:
    """Return the key; StoreError when it is absolute, or has an empty, `.`, `..` or reserved part."""
    parts = key.split("/")
    if "\0" in key or any(part in {"", ".", ".."} or part.startswith(RESERVED) for part in parts):
        raise StoreError(f"{key!r} cannot be a key", hint="use names separated by single slashes, none of them '..'")
    return key
