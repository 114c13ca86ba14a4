"""What is remembered of a group of own hosts: which are taken, which are passed over, until when it is paid.

The record is one object in the job's store, changed by compare-and-swap: whoever drives the job next, from whatever
machine, finds the same hosts taken. Who has a host's GPUs at all is written on the host itself (`onhost`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.job import Market
from gpucloud.domain.node import EndCause, GroupView, Node, NodeState, Refusal
from gpucloud.domain.offer import Pool

POOL = Pool(instance_type="host", zone="ssh", market=Market.OWNED)
"""Own hosts are one pool: they have one price."""

_REFUSALS_LAST = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host of the job file and how SSH reaches it; `name` is its own among them, `devices` its GPUs, empty for all.

    `private_address` is None where the user did not say: the host then tells by which address it was reached.
    """

    name: str
    address: str
    port: int
    user: str
    host_key: str
    proxy: tuple[str, ...] = ()
    private_address: str | None = None
    interface: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A host that is, or was, a node. `leaves_at` is when a drill ends it; `cleared`: nothing of the job is on it.

    `given_up`: it was ended because it did not serve, so that nobody waits for it to be cleared.
    """

    id: str
    place: Place
    pool: Pool
    root: str
    private_address: str
    launched_at: datetime
    relieved: bool = False
    leaves_at: datetime | None = None
    ended_at: datetime | None = None
    end_cause: EndCause | None = None
    cleared: bool = False
    given_up: bool = False

    @property
    def alive(self) -> bool:
        """Whether the job has it."""
        return self.ended_at is None

    def node(self) -> Node:
        """Return the node as the port shows it."""
        place = self.place
        return Node(
            id=self.id,
            pool=self.pool,
            state=NodeState.RUNNING if self.alive else NodeState.TERMINATED,
            launched_at=self.launched_at,
            address=place.address,
            port=place.port,
            user=place.user,
            private_address=self.private_address,
            interface=place.interface,
            host_key=place.host_key,
            proxy=place.proxy,
            root=self.root,
            devices=place.devices,
            relieved=self.relieved,
            ended_at=self.ended_at,
            end_cause=self.end_cause,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A host that did not serve: not asked before `again_at`, and after all others before `last_until`.

    `lasting`: asking again cannot help before somebody has changed something.
    """

    name: str
    why: str
    again_at: datetime
    last_until: datetime
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """One group. `token` tells it from every other group, also of the same name; `launched` numbers the nodes."""

    name: str
    token: str
    size: int = 0
    armed_until: datetime | None = None
    launched: int = 0
    nodes: tuple[Taken, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    removed: bool = False
    """The group is gone. A job that goes on later makes it anew, and must not take a node for one that has ended."""

    @property
    def counted(self) -> tuple[Taken, ...]:
        """What the level counts."""
        return tuple(node for node in self.nodes if node.alive and not node.relieved)

    def view(self, now: datetime) -> GroupView:
        """Return the group as the port shows it."""
        return GroupView(
            exists=True,
            size=self.size,
            armed_until=self.armed_until,
            nodes=tuple(node.node() for node in self.nodes),
            refusals=tuple(refusal for refusal in self.refusals if now - refusal.at < _REFUSALS_LAST),
        )


def settled(record: Hosts, now: datetime) -> Hosts:
    """Return the record as time has changed it: what the shut-off and drills have ended."""
    if record.armed_until is not None and now >= record.armed_until:
        until = record.armed_until
        nodes = tuple(ended(node, max(node.launched_at, until), EndCause.SCHEDULE) for node in record.nodes)
        record = replace(record, size=0, nodes=nodes)
    return replace(record, nodes=tuple(_left(node, now) for node in record.nodes))


def ended(node: Taken, at: datetime, cause: EndCause) -> Taken:
    """Return the node as ended; one that had ended before stays as it was."""
    return replace(node, ended_at=at, end_cause=cause) if node.alive else node


def levelled(record: Hosts, now: datetime) -> Hosts:
    """Return the record without the newest nodes above its level."""
    surplus = {node.id for node in record.counted[record.size :]}
    nodes = tuple(ended(node, now, EndCause.CHOICE) if node.id in surplus else node for node in record.nodes)
    return replace(record, nodes=nodes)


def candidates(record: Hosts, places: tuple[Place, ...], now: datetime) -> tuple[Place, ...]:
    """Return the hosts to ask, in the file's order; those that failed lately come last, or not at all yet."""
    taken = {node.place.name for node in record.nodes if node.alive}
    marks = {mark.name: mark for mark in record.passed_over}
    free = [p for p in places if p.name not in taken and (p.name not in marks or marks[p.name].again_at <= now)]
    return tuple(sorted(free, key=lambda place: place.name in marks and marks[place.name].last_until > now))


def _left(node: Taken, now: datetime) -> Taken:
    due = node.leaves_at is not None and now >= node.leaves_at
    return ended(node, node.leaves_at, EndCause.INTERRUPTED) if due and node.leaves_at is not None else node
