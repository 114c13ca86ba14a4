"""An object store in memory with one clock of its own, and lines to it that lose requests and replies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.errors import StoreError
from gpucloud.store import Conflict, Stored
from gpucloud.store.contract import within
from tests.fakes.whole_objects import WholeObjects
from tests.sim.loom import Loom, Process


@dataclass(slots=True)
class Object:
    data: bytes
    version: str
    modified: datetime


class Store(WholeObjects):
    """Implements `ObjectStore` at once and without faults: what is so. `history` counts versions."""

    url = "s3://simulated"

    def __init__(self, loom: Loom) -> None:
        self.loom = loom
        self.objects: dict[str, Object] = {}
        self.writes = 0
        self.down_until = 0.0

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store."""
        return self.url

    def get(self, key: str) -> Stored | None:
        found = self.objects.get(key)
        if found is None:
            return None
        return Stored(data=found.data, version=found.version, modified=found.modified, store_time=self.loom.time)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None) -> str:
        old = self.objects.get(key)
        if (if_absent and old is not None) or (if_version is not None and (old is None or old.version != if_version)):
            raise Conflict(key)
        self.writes += 1
        self.objects[key] = Object(bytes(data), f"v{self.writes}", self.loom.time)
        return self.objects[key].version

    def list(self, prefix: str) -> tuple[str, ...]:
        return within(self.objects, prefix)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


@dataclass(slots=True, kw_only=True)
class Faults:
    """How often a call fails before it does anything, and how often it is done but its reply is lost."""

    refused: float = 0.0
    reply_lost: float = 0.0


class StoreLine(WholeObjects):
    """Implements `ObjectStore` for one process, as boto3 gives it: three tries, so that a write whose reply was lost
    is refused by its own effect."""

    def __init__(self, store: Store, process: Process, dice: random.Random, faults: Faults) -> None:
        self.url = self.address = store.url
        self._store = store
        self._process = process
        self._dice = dice
        self._faults = faults

    def get(self, key: str) -> Stored | None:
        return self._tried(lambda: self._store.get(key))

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None) -> str:
        whole = bytes(data)
        return self._tried(lambda: self._store.put(key, whole, if_absent=if_absent, if_version=if_version))

    def list(self, prefix: str) -> tuple[str, ...]:
        return self._tried(lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        self._tried(lambda: self._store.delete(key))

    def _tried(self, work):
        for _ in range(3):
            self._process.call(self._dice.uniform(0.002, 0.02))
            if not self._process.online or self._store.loom.now < self._store.down_until:
                self._process.sleep(1.0)
                continue
            if self._dice.random() < self._faults.refused:
                continue
            try:
                answer = work()
            except Conflict:
                self._process.call(0.005)
                raise
            self._process.call(0.005)
            if self._dice.random() >= self._faults.reply_lost:
                return answer
        raise StoreError("the store does not answer", may_pass=True)
