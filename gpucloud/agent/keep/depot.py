"""Where a directory's checkpoints are: their store, and the prefix below which they lie in it."""

from __future__ import annotations

from gpucloud.store import ObjectStore, get_small, open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.store.commits import under


class Depot:
    """One job's checkpoints in the store at that URL, of which `keep` stay. Every call may raise StoreError."""

    def __init__(self, url: str, prefix: str, *, keep: int) -> None:
        self.store: ObjectStore = open_store(url)
        self.checkpoints = Checkpoints(self.store, prefix, keep=keep)
        self._prefix = prefix

    def key(self, name: str) -> str:
        """Return the key of an object in the store, by its name below the prefix."""
        return under(self._prefix, name)

    def get(self, name: str) -> bytes | None:
        """Return a small object, None when there is none; one that is too large has no bytes."""
        stored = get_small(self.store, self.key(name))
        return stored.data if stored else None

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a small object whole. Raises Conflict with `if_absent` when it is there."""
        self.store.put(self.key(name), data, if_absent=if_absent)

    def read_into(self, name: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        return self.store.read_into(self.key(name), at, into)
