"""What every object store promises, and the one place that picks an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


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
    """Whole objects under `/`-separated keys. Errors: `StoreError` when the store does not answer or refuses."""

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
    ) -> str:
        """Write the object whole and durably, and return its version; a condition that fails raises `Conflict`."""
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        ...


def open_store(url: str) -> ObjectStore:
    """Return the store at `url` (`s3://bucket/prefix`, `file:///path` or a path); StoreError for any other scheme."""
    raise NotImplementedError
