"""Writing to agents what is wanted of them, beside the supervisor's passes: a node that is gone holds nobody up."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.domain.node import Node
from gpucloud.usecases.world import World

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
class Teller:
    """Writes orders to the nodes' agents, to one node one after the other: an older one never overtakes a newer one."""

    world: World
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
        if refused is not None and self.world.clock.now() - refused.at < _AGAIN:
            return True
        told, at = self._told.get(node_id, (b"", _LONG_AGO))
        return told == order and self.world.clock.now() - at < _ACKNOWLEDGED_IN

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
        error, now = self._under_way.pop(node_id).exception(), self.world.clock.now()
        if isinstance(error, NodeError) and not isinstance(error, HostUnreachable):
            since = self._refused[node_id].since if node_id in self._refused else now
            self._refused[node_id] = _Refused(since=since, at=now, error=error)
        elif error is None:
            self._refused.pop(node_id, None)
        elif not isinstance(error, HostUnreachable):
            raise error

    def _write(self, node: Node, order: bytes) -> None:
        host = self.world.shell.host(node)
        done = host.run(("sh", "-c", _WRITE, "sh", f"{node.root}/agent/desired.json"), stdin=order)
        if done.exit_code != 0:
            raise NodeError(f"{node.id}: cannot write desired.json: {done.stderr.decode(errors='replace').strip()}")
        self._told[node.id] = (order, self.world.clock.now())
