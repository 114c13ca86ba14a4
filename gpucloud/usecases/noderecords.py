"""Writing down what new machines need to make themselves fit and to drive their job: in the job's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal

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
from gpucloud.domain.driving import order_key
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Market
from gpucloud.domain.node import Node
from gpucloud.domain.offer import Pool
from gpucloud.store import put_once
from gpucloud.usecases.gate import of_any_node
from gpucloud.usecases.needs import builds_in_code
from gpucloud.usecases.world import SelfBoot, World

_LEANER = "name what is not needed in .gpucloudignore"
_CODE = f"{Node.__dataclass_fields__['root'].default}/code"


@dataclass(slots=True)
class NodeRecords:
    """The record of one cluster. Objects that are named by their content are written once."""

    world: World
    _written: tuple[bytes, bytes] = (b"", b"")
    _on_demand: dict[str, Decimal] = field(default_factory=dict)
    _told: Left | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(
        self, needs: Callable[[str], Wanted], pool: Pool, gpu: str | None, story: Callable[[str], None]
    ) -> None:
        """Write the record, unless that very one is there; nothing where machines do not make themselves fit.

        `needs` says what is wanted where the code lies at a path; machines come from `pool`. Raises StoreError,
        UsageError.
        """
        if self.world.self_boot is None:
            return
        with self._lock:
            record = self._record(self.world.self_boot, needs, pool.region, gpu)
            data, order = to_json(record).encode(), self._order(record, pool)
            if (data, order) == self._written:
                return
            self._once(record.package.key, self.world.package.data)
            if order:  # before the record, by which a machine starts its driver
                self.world.store.put(order_key(self.world.cluster), order, private=True)
            self.world.store.put(record_key(self.world.cluster), data)
            self._written = (data, order)
            if record.left is not None and record.left != self._told:
                story(f"machines do not make {record.left.step} themselves: {record.left.why}")
            self._told = record.left

    def withdraw_order(self) -> None:
        """Have the job's machines drive it no longer: their drivers end at their next look. Raises StoreError."""
        self.world.store.delete(order_key(self.world.cluster))

    def withdraw(self) -> None:
        """Remove the record and the packages: there will be no machine to read them. Raises StoreError."""
        if self.world.self_boot is None:
            return
        with self._lock:
            store, cluster = self.world.store, self.world.cluster
            store.delete(order_key(cluster))
            store.delete(record_key(cluster))
            for key in store.list(package_key(cluster, "").removesuffix(".zip")):
                store.delete(key)
            self._written = (b"", b"")

    def _order(self, record: NodeRecord, pool: Pool) -> bytes:
        """Return what machines that drive their job go by; nothing where none does."""
        world = self.world
        if world.order is None:
            return b""
        if record.code is None:
            size = LARGEST_CODE_BYTES >> 20
            raise UsageError(f"the code has grown beyond {size} MiB, and machines take it from the store", hint=_LEANER)
        now = world.clock.now()
        on_demand = world.market.prices(replace(pool, market=Market.ON_DEMAND), now, now)
        self._on_demand[pool.instance_type] = on_demand[-1].usd_per_hour
        order = replace(
            world.order,
            group=world.provisioner.group(world.cluster, pool.region),
            region=pool.region,
            on_demand=tuple(sorted(self._on_demand.items())),
            tree=record.code.key,
            tree_name=record.code.tree,
            package=record.package.key,
            package_sha256=record.package.sha256,
        )
        return to_json(order).encode()

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
        if key not in self.world.store.list(key):
            put_once(self.world.store, key, data)
