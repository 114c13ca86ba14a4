"""Speaking with agents: what is wanted of them, what they say; and node records for machines that fit themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath

from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import GpucloudError, HostUnreachable, NodeError, UsageError
from gpucloud.domain.job.code import LARGEST_CODE_BYTES, is_name
from gpucloud.domain.job.quantities import format_span
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
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.node.status import (
    OUTPUT,
    AttemptStatus,
    RunState,
    Status,
    Stop,
    desired_from_json,
    desired_to_json,
    status_from_json,
)
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.domain.supervision.renewal import lost_outputs, still_to_bring, to_bring, without_unasked
from gpucloud.domain.supervision.self_driving import order_key
from gpucloud.domain.supervision.snapshot import asked_of
from gpucloud.domain.untrusted import STATUS_BYTES
from gpucloud.ports import Host
from gpucloud.store import put_once
from gpucloud.usecases.services import SelfBoot, Services
from gpucloud.usecases.supervise.needs import builds_in_code, of_any_node
from gpucloud.usecases.supervise.story import brought_lines, missing_line

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
        _write_desired(self.services.shell.host(node), order)
        self._told[node.id] = (order, self.services.clock.now())


def _write_desired(host: Host, order: bytes) -> None:
    done = host.run(("sh", "-c", _WRITE, "sh", f"{host.node.root}/agent/desired.json"), stdin=order)
    if done.exit_code != 0:
        raise NodeError(f"{host.node.id}: cannot write desired.json: {done.stderr.decode(errors='replace').strip()}")


def read_status(host: Host) -> Status | None:
    """Return what the node's agent says, None before it says anything. Raises HostUnreachable."""
    done = host.run(("cat", f"{host.node.root}/agent/status.json"))
    try:
        return status_from_json(done.stdout) if done.exit_code == 0 and len(done.stdout) <= STATUS_BYTES else None
    except ValueError:
        return None


# The end of a job of which no state can be written: its script is stopped, what it wrote comes home, its machines end.


_KILLED_WITHIN = timedelta(seconds=20)
"""For a script that heeds SIGTERM to leave, and for a container to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHome:
    """Results that could not come home, and why: their machines are paid on."""

    attempt: int
    error: GpucloudError


def end_by_agents(
    services: Services, state: JobState, story: Callable[[str], None], *, abandons: bool
) -> NotHome | None:
    """End what runs on the job's machines, bring home what it wrote, and end the machines; None where they are ended.

    Where results cannot come, no machine is ended while any is paid, unless one `abandons` them.
    """
    group, attempt, found = state.group or "", state.attempt, list[NotHome]()
    listed = services.group.describe(group)
    if attempt is not None:
        alive = {node.id: node for node in listed.alive}
        members = tuple(alive[member.node_id] for member in attempt.members if member.node_id in alive)
        _Stopper(services=services, attempt=attempt.number, story=story).stop(members)
    keep = list[tuple[str, str]]()
    for attempts in still_to_bring(state.attempts):
        error = _bring_home(services, attempts, listed, story)
        if error is not None:
            found.append(NotHome(attempt=attempts[-1].number, error=error))
            keep.append((attempts[-1].members[0].node_id, f"code/{attempts[-1].tree}"))
            told = lost_outputs(attempts, services.job.outputs, listed.there) if abandons or not listed.alive else ()
            for line in map(missing_line, told):
                story(line)
    if found and not abandons and services.group.describe(group).alive:
        return found[0]
    services.group.purge(group, keep=tuple(keep))
    return None


def _bring_home(
    services: Services, attempts: Sequence[Attempt], listed: GroupView, story: Callable[[str], None]
) -> GpucloudError | None:
    """Bring what the last of these attempts wrote, if that can be asked for; return why it did not come."""
    last, outputs = attempts[-1], services.job.outputs
    node = listed.there(last.members[0].node_id) if last.members else None
    paths = to_bring(attempts, outputs, listed.there) if node is not None else ()
    if node is None or not paths or not is_name(last.tree):
        return None
    try:
        code = str(PurePosixPath("~", node.root, "code", last.tree))
        brought = services.outputs.bring_home(services.shell.host(node), code, last.number, None, paths)
    except GpucloudError as lost:
        story(f"the outputs of attempt {last.number} could not be brought home: {lost}")
        return lost
    missing = without_unasked(brought.missing, asked_of(attempts, outputs))
    services.outputs.note(last, missing, attempts[0].started_at)
    for line in (*brought_lines(brought), *map(missing_line, missing)):
        story(line)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stopper:
    """Ends an attempt by its machines' agents, which have all that is wanted of them but the stop."""

    services: Services
    attempt: int
    story: Callable[[str], None]

    def stop(self, nodes: Sequence[Node]) -> None:
        """Return when nothing of it runs there any more, as far as the agents can be asked: saved, or killed."""
        leave, left = self.services.rules.limits.leave, tuple(nodes)
        if any(self._asks(node, self._saves) for node in nodes):
            left = self._without(left, Stop.SAVE, leave)
            if left:
                self.story(f"attempt {self.attempt} has not left within {format_span(leave)}: killing it")
        self._without(left, Stop.KILL, _KILLED_WITHIN)

    def _without(self, nodes: Sequence[Node], stop: Stop, within: timedelta) -> tuple[Node, ...]:
        """Return which of the machines still run it after that time."""
        clock = self.services.clock
        running = tuple(node for node in nodes if self._asks(node, lambda host: self._tell(host, stop)))
        until = clock.now() + within
        while running and clock.now() < until:
            clock.sleep(self.services.period_s)
            running = tuple(node for node in running if self._asks(node, self._runs))
        return running

    def _asks(self, node: Node, ask: Callable[[Host], bool]) -> bool:
        """Return what the machine answers; False for one that does not, which is told: its script ends with it."""
        try:
            return ask(self.services.shell.host(node))
        except GpucloudError as error:
            self.story(f"the script on {node.id} could not be stopped first: {error}")
            return False

    def _tell(self, host: Host, stop: Stop) -> bool:
        """Return whether the attempt was to run there."""
        done = host.run(("cat", f"{host.node.root}/agent/desired.json"))
        try:
            desired = desired_from_json(done.stdout) if len(done.stdout) <= STATUS_BYTES else None
        except ValueError:
            desired = None
        if desired is None or desired.launch is None or desired.launch.attempt != self.attempt:
            return False
        _write_desired(host, desired_to_json(replace(desired, stop=stop)).encode())
        return True

    def _runs(self, host: Host) -> bool:
        part = self._part(host)
        return part is None or part.state is RunState.RUNNING

    def _saves(self, host: Host) -> bool:
        """Whether the script there saves when it is asked to: rank 0 tells how far it is, and not by its output."""
        part = self._part(host)
        return part is not None and part.progress is not None and part.progress.phase != OUTPUT

    def _part(self, host: Host) -> AttemptStatus | None:
        part = status.attempt if (status := read_status(host)) is not None else None
        return part if part is not None and part.attempt == self.attempt else None


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
