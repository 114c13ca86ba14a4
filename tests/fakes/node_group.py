"""A node group in memory, driven by the clock that it is given; passes the same contract as the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node.node import EndCause, GroupView, Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Clock


@dataclass
class _Group:
    size: int = 0
    pool: Pool | None = None
    armed_until: datetime | None = None
    nodes: list[Node] = field(default_factory=list)
    interrupted_at: dict[str, datetime] = field(default_factory=dict)


class FakeNodeGroup:
    """Implements `NodeGroup`. Whatever time brings happens at the next call: it looks at the clock first.

    `boot_s`: seconds from launch to running. `capacity`: nodes that may live at once, None for any number.
    `calls`: every call that changes something, as `(name, group, *arguments)`, in order.
    """

    def __init__(
        self, clock: Clock, *, notice_s: float = 4.0, boot_s: float = 0.0, capacity: int | None = None
    ) -> None:
        self.clock = clock
        self.notice_s = notice_s
        self.boot_s = boot_s
        self.capacity = capacity
        self.calls: list[tuple[object, ...]] = []
        self._groups: dict[str, _Group] = {}
        self._launched = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Every group that is there."""
        return tuple(self._groups)

    def create(self, group: str) -> str:
        """Make an empty group, as a provisioner does; may be repeated."""
        self._groups.setdefault(group, _Group())
        return group

    def remove(self, group: str) -> None:
        """Remove the group, as a provisioner does."""
        self._groups.pop(group, None)

    def forget(self, group: str, node_id: str) -> None:
        """List the node no longer, as clouds do with what ended some time ago."""
        state = self._groups[group]
        state.nodes = [node for node in state.nodes if node.id != node_id]

    def notice(self, group: str, node_id: str) -> datetime | None:
        """Return when the node will be taken, as its metadata service would tell."""
        return self._groups[group].interrupted_at.get(node_id)

    def describe(self, group: str) -> GroupView:
        if group not in self._groups:
            return GroupView(exists=False, size=0, armed_until=None, nodes=())
        state = self._settled(group)
        return GroupView(exists=True, size=state.size, armed_until=state.armed_until, nodes=tuple(state.nodes))

    def arm(self, group: str, until: datetime) -> None:
        state = self._called("arm", group, until)
        state.armed_until = max(until, self.clock.now())
        self._settled(group)

    def resize(
        self,
        group: str,
        size: int,
        pool: Pool,
        *,
        cap_usd_per_hour: Decimal | None = None,
    ) -> None:
        state = self._called("resize", group, size, pool)
        if size > 0 and (state.armed_until is None or state.armed_until <= self.clock.now()):
            raise ProvisionError(f"{group}: no node starts without a shut-off time ahead", hint="arm the group first")
        state.size, state.pool = size, pool
        self._settled(group)

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        state = self._called("relieve", group, node_id)
        self._change(state, self._alive(group, node_id), relieved=True)
        self._settled(group)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        state = self._called("terminate", group, node_id, *(["bad"] if bad else []))
        self._end(state, self._alive(group, node_id), EndCause.CHOICE)
        self._settled(group)

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:
        if group not in self._groups:
            return
        state = self._called("purge", group)
        state.size = 0
        for node in state.nodes:
            self._end(state, node, EndCause.CHOICE)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> None:
        state = self._called("interrupt", group, node_id, notice)
        node = self._alive(group, node_id)
        if not notice:
            self._end(state, node, EndCause.INTERRUPTED)
        elif node is not None:
            state.interrupted_at.setdefault(node_id, self.clock.now() + timedelta(seconds=self.notice_s))
        self._settled(group)

    def _called(self, name: str, group: str, *arguments: object) -> _Group:
        if group not in self._groups:
            raise ProvisionError(f"there is no node group {group}", hint="make the cluster first")
        self.calls.append((name, group, *arguments))
        return self._settled(group)

    def _alive(self, group: str, node_id: str) -> Node | None:
        found = [node for node in self._groups[group].nodes if node.id == node_id]
        if not found:
            raise ProvisionError(f"{group} has no node {node_id}", hint="take an id from the group's list")
        return None if found[0].state is NodeState.TERMINATED else found[0]

    def _change(self, group: _Group, node: Node | None, **fields: object) -> None:
        if node is not None:
            group.nodes = [replace(n, **fields) if n.id == node.id else n for n in group.nodes]

    def _end(self, state: _Group, node: Node | None, cause: EndCause, at: datetime | None = None) -> None:
        if node is not None and node.state is not NodeState.TERMINATED:
            at = at or self.clock.now()
            self._change(state, node, state=NodeState.TERMINATED, ended_at=at, end_cause=cause)

    def _settled(self, group: str) -> _Group:
        state, now = self._groups[group], self.clock.now()
        for node in state.nodes:
            interrupted_at = state.interrupted_at.get(node.id)
            if interrupted_at is not None and interrupted_at <= min(now, state.armed_until or now):
                self._end(state, node, EndCause.INTERRUPTED, interrupted_at)
        if state.armed_until is not None and state.armed_until <= now:
            state.size = 0
            for node in state.nodes:
                self._end(state, node, EndCause.SCHEDULE, max(node.launched_at, state.armed_until))
        counted = [n for n in state.nodes if n.state is not NodeState.TERMINATED and not n.relieved]
        counted.sort(key=lambda node: node.pool != state.pool)
        for node in counted[state.size :]:
            self._end(state, node, EndCause.CHOICE)
        alive = sum(node.state is not NodeState.TERMINATED for node in state.nodes)
        room = state.size if self.capacity is None else self.capacity - alive
        for _ in range(min(state.size - len(counted), room)):
            state.nodes.append(self._launch(state, now))
        for node in state.nodes:
            if node.state is NodeState.PENDING and now >= node.launched_at + timedelta(seconds=self.boot_s):
                self._change(state, node, state=NodeState.RUNNING)
        return state

    def _launch(self, state: _Group, now: datetime) -> Node:
        assert state.pool is not None
        self._launched += 1
        return Node(
            id=f"i-{self._launched:017x}",
            pool=state.pool,
            state=NodeState.PENDING,
            launched_at=now,
            address=f"127.0.0.{9 + self._launched}",
            port=2200 + self._launched,
            user="gpucloud",
            private_address=f"127.0.0.{9 + self._launched}",
            interface="lo",
            host_key=f"ssh-ed25519 AAAA{self._launched}",
        )
