"""Writing to agents what is wanted of them, and node records for machines that make themselves fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import HostUnreachable, NodeError, UsageError
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.bootstrap.wanted import (
    VERSION,
    Left,
    NodeRecord,
    StoredCode,
    StoredPackage,
    Wanted,
    code_key,
    first_left,
    package_key,
    record_key,
    without_secrets,
)
from gpucloud.domain.node.node import Node
from gpucloud.domain.offer import Pool
from gpucloud.domain.supervision.self_driving import order_key
from gpucloud.store import put_once
from gpucloud.usecases.services import SelfBoot, Services
from gpucloud.usecases.supervise.needs import builds_in_code, of_any_node

_ACKNOWLEDGED_IN = timedelta(seconds=0.5)
_AGAIN = timedelta(seconds=2)
_REFUSED_FOR = timedelta(seconds=10)
_WAITED_FOR_S = 0.1
_LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)
_WRITE = 'umask 077; cat >"$1.new" && mv -f "$1.new" "$1"'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """That a node refuses its orders: since when, when it last did, and why."""

    since: datetime
    at: datetime
    error: NodeError


@dataclass(slots=True)
class AgentWriter:
    """Writes orders to the nodes' agents, to one node one after the other: an older one never overtakes a newer one."""

    services: Services
    pool: ThreadPoolExecutor
    _under_way: dict[str, Future[None]] = field(default_factory=dict)
    _told: dict[str, tuple[bytes, datetime]] = field(default_factory=dict)
    _refused: dict[str, _Refused] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether an order is being written."""
        return any(not work.done() for work in self._under_way.values())

    def is_on_its_way(self, node_id: str, order: bytes) -> bool:
        """Whether the order was written just now, or has to wait: for one that is being written, or after a refusal."""
        if node_id in self._under_way:
            if not self._under_way[node_id].done():
                return True
            self._end(node_id)
        refused = self._refused.get(node_id)
        if refused is not None and self.services.clock.now() - refused.at < _AGAIN:
            return True
        told, at = self._told.get(node_id, (b"", _LONG_AGO))
        return told == order and self.services.clock.now() - at < _ACKNOWLEDGED_IN

    def tell(self, orders: Mapping[str, tuple[Node, bytes]]) -> None:
        """Write the orders, by node, waiting 0.1 s at most; whom it takes longer is told meanwhile.

        One that cannot be reached is passed over: its silence shows, or it is told again. One that refuses is asked
        again too; see `gave_up`.
        """
        for node_id, (node, order) in orders.items():
            if not self.is_on_its_way(node_id, order):
                self._under_way[node_id] = self.pool.submit(self._write, node, order)
        wait([self._under_way[node_id] for node_id in orders if node_id in self._under_way], timeout=_WAITED_FOR_S)
        for node_id in orders:
            if node_id in self._under_way and self._under_way[node_id].done():
                self._end(node_id)

    def forget(self, node_id: str) -> None:
        """Take nothing for told any more: the agent is another one."""
        self._told.pop(node_id, None)
        self._refused.pop(node_id, None)

    def gave_up(self, node_id: str) -> NodeError | None:
        """Return why the node takes no order, once it has refused for long; None while it is asked again."""
        refused = self._refused.get(node_id)
        lasting = refused is not None and refused.at - refused.since >= _REFUSED_FOR
        return refused.error if refused is not None and lasting else None

    def _end(self, node_id: str) -> None:
        """One node's refusal is something seen of that node: no supervisor ends for it."""
        error, now = self._under_way.pop(node_id).exception(), self.services.clock.now()
        if isinstance(error, NodeError) and not isinstance(error, HostUnreachable):
            since = self._refused[node_id].since if node_id in self._refused else now
            self._refused[node_id] = _Refused(since=since, at=now, error=error)
        elif error is None:
            self._refused.pop(node_id, None)
        elif not isinstance(error, HostUnreachable):
            raise error

    def _write(self, node: Node, order: bytes) -> None:
        host = self.services.shell.host(node)
        done = host.run(("sh", "-c", _WRITE, "sh", f"{node.root}/agent/desired.json"), stdin=order)
        if done.exit_code != 0:
            raise NodeError(f"{node.id}: cannot write desired.json: {done.stderr.decode(errors='replace').strip()}")
        self._told[node.id] = (order, self.services.clock.now())


# Writing down what new machines need to make themselves fit and to drive their job: in the job's store.


_LEANER = "name what is not needed in .gpucloudignore"
_CODE = f"{Node.__dataclass_fields__['root'].default}/code"


@dataclass(slots=True)
class NodeRecords:
    """The record of one cluster. Objects that are named by their content are written once."""

    services: Services
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
        if self.services.self_boot is None:
            return
        with self._lock:
            record = self._record(self.services.self_boot, needs, pool.region, gpu)
            data, order = to_json(record).encode(), self._order(record, pool)
            if (data, order) == self._written:
                return
            self._once(record.package.key, self.services.package.data)
            if order:  # before the record, by which a machine starts its driver
                self.services.store.put(order_key(self.services.cluster), order, private=True)
            self.services.store.put(record_key(self.services.cluster), data)
            self._written = (data, order)
            if record.left is not None and record.left != self._told:
                story(f"machines do not make {record.left.step} themselves: {record.left.why}")
            self._told = record.left

    def withdraw_order(self) -> None:
        """Have the job's machines drive it no longer: their drivers end at their next look. Raises StoreError."""
        self.services.store.delete(order_key(self.services.cluster))

    def withdraw(self) -> None:
        """Remove the record and the packages: there will be no machine to read them. Raises StoreError."""
        if self.services.self_boot is None:
            return
        with self._lock:
            store, cluster = self.services.store, self.services.cluster
            store.delete(order_key(cluster))
            store.delete(record_key(cluster))
            for key in store.list(package_key(cluster, "").removesuffix(".zip")):
                store.delete(key)
            self._written = (b"", b"")

    def _order(self, record: NodeRecord, pool: Pool) -> bytes:
        """Return what machines that drive their job go by; nothing where none does."""
        services = self.services
        if services.order is None:
            return b""
        if record.code is None:
            size = LARGEST_CODE_BYTES >> 20
            raise UsageError(f"the code has grown beyond {size} MiB, and machines take it from the store", hint=_LEANER)
        now = services.clock.now()
        on_demand = services.market.prices(replace(pool, market=Market.ON_DEMAND), now, now)
        self._on_demand[pool.instance_type] = on_demand[-1].usd_per_hour
        order = replace(
            services.order,
            group=services.provisioner.group(services.cluster, pool.region),
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
        services, job = self.services, self.services.job
        whole = boots.pack_code(job.code, limit=LARGEST_CODE_BYTES)
        tree, code = whole.sha256, whole.packed
        stored = StoredCode(key=code_key(services.name, tree), tree=tree) if code is not None else None
        if stored is not None and code is not None:
            self._once(stored.key, code)
        plain = needs(f"{_CODE}/{tree}" if builds_in_code(job) else "")
        wanted = of_any_node(plain, job, gpu, region, services.store.url)
        secrets = frozenset(job.secrets)
        return NodeRecord(
            version=VERSION,
            login=boots.login,
            package=StoredPackage(
                key=package_key(services.cluster, services.package.sha256), sha256=services.package.sha256
            ),
            code=stored,
            wanted=without_secrets(wanted, secrets),
            left=first_left(wanted, secrets, has_code=stored is not None),
        )

    def _once(self, key: str, data: bytes) -> None:
        if key not in self.services.store.list(key):
            put_once(self.services.store, key, data)
