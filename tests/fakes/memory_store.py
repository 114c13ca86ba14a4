"""An object store in memory, its time that of the clock it is given; passes the same suite as the real ones."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

from gpucloud.domain.untrusted import most_of
from gpucloud.ports import Clock
from gpucloud.store import Conflict, Stored
from gpucloud.store.contract import TooLarge, checked, within
from tests.fakes.whole_objects import WholeObjects


class MemoryStore(WholeObjects):
    """Implements `ObjectStore`."""

    def __init__(self, clock: Clock) -> None:
        self.url = "memory:///store"
        self._clock = clock
        self._objects: dict[str, Stored] = {}
        self._versions = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store."""
        return self.url

    def get(self, key: str) -> Stored | None:
        found = self._objects.get(checked(key))
        if found is None:
            return None
        found = replace(found, store_time=self._clock.now())
        if len(found.data) > most_of(key):
            raise TooLarge(key, len(found.data), replace(found, data=b""))
        return found

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,
    ) -> str:
        del private  # nobody else sees this process's memory
        with self._lock:
            there = self._objects.get(checked(key))
            if if_absent and there is not None:
                raise Conflict(key)
            if if_version is not None and (there is None or there.version != if_version):
                raise Conflict(key)
            version, now = f"v{next(self._versions)}", self._clock.now()
            self._objects[key] = Stored(data=bytes(data), version=version, modified=now, store_time=now)
            return version

    def list(self, prefix: str) -> tuple[str, ...]:
        return within(self._objects, prefix)

    def delete(self, key: str) -> None:
        self._objects.pop(checked(key), None)

    def close(self) -> None:
        """Nothing is open."""
