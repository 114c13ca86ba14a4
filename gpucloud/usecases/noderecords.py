"""Writing down what new machines need to make themselves fit: record, package and code, in the job's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpucloud.domain.bootstrap.noderecord import (
    LARGEST_CODE_BYTES,
    VERSION,
    Left,
    NodeRecord,
    StoredCode,
    StoredPackage,
    code_key,
    first_left,
    package_key,
    record_key,
    without_secrets,
)
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.node import Node
from gpucloud.store import Conflict
from gpucloud.usecases.gate import of_any_node
from gpucloud.usecases.needs import builds_in_code
from gpucloud.usecases.world import SelfBoot, World

_CODE = f"{Node.__dataclass_fields__['root'].default}/code"


@dataclass(slots=True)
class NodeRecords:
    """The record of one cluster. Objects that are named by their content are written once."""

    world: World
    _written: bytes = b""
    _told: Left | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(
        self, needs: Callable[[str], Wanted], region: str | None, gpu: str | None, story: Callable[[str], None]
    ) -> None:
        """Write the record, unless that very one is there; nothing where machines do not make themselves fit.

        `needs` says what is wanted where the code lies at a path. Raises StoreError, UsageError.
        """
        if self.world.self_boot is None:
            return
        with self._lock:
            record = self._record(self.world.self_boot, needs, region, gpu)
            data = to_json(record).encode()
            if data == self._written:
                return
            self._once(record.package.key, self.world.package.data)
            self.world.store.put(record_key(self.world.cluster), data)
            self._written = data
            if record.left is not None and record.left != self._told:
                story(f"machines do not make {record.left.step} themselves: {record.left.why}")
            self._told = record.left

    def withdraw(self) -> None:
        """Remove the record and the packages: there will be no machine to read them. Raises StoreError."""
        if self.world.self_boot is None:
            return
        with self._lock:
            store, cluster = self.world.store, self.world.cluster
            store.delete(record_key(cluster))
            for key in store.list(package_key(cluster, "").removesuffix(".zip")):
                store.delete(key)
            self._written = b""

    def _record(
        self, boots: SelfBoot, needs: Callable[[str], Wanted], region: str | None, gpu: str | None
    ) -> NodeRecord:
        world, job = self.world, self.world.job
        tree, code = boots.pack_code(job.code, limit=LARGEST_CODE_BYTES)
        stored = StoredCode(key=code_key(world.name, tree), tree=tree) if code is not None else None
        if stored is not None and code is not None:
            self._once(stored.key, code)
        plain = needs(f"{_CODE}/{tree}" if builds_in_code(job) else "")
        wanted = of_any_node(plain, job, gpu, region, world.store.url)
        secrets = frozenset(job.secrets)
        return NodeRecord(
            version=VERSION,
            login=boots.login,
            package=StoredPackage(key=package_key(world.cluster, world.package.sha256), sha256=world.package.sha256),
            code=stored,
            wanted=without_secrets(wanted, secrets),
            left=first_left(wanted, secrets, has_code=stored is not None),
        )

    def _once(self, key: str, data: bytes) -> None:
        if key in self.world.store.list(key):
            return
        try:
            self.world.store.put(key, data, if_absent=True)
        except Conflict:
            return
