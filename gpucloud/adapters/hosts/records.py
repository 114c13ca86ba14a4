"""What is remembered of a group of own hosts: which are taken, which are excluded, until when it is paid.

The record is one object in the job's store, changed by compare-and-swap: whoever drives the job next, from whatever
machine, finds the same hosts taken. Who has a host's GPUs at all is written on the host itself (`onhost`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, GroupView, Node, NodeState, Refusal
from gpucloud.domain.offer import Pool
from gpucloud.ports import Clock
from gpucloud.store import Conflict, ObjectStore

POOL = Pool(instance_type="host", zone="ssh", market=Market.OWNED)
"""Own hosts are one pool: they have one price."""

# A host is another's only some time after its paid time: clocks differ, and the last save may take a moment.
GRACE = timedelta(minutes=2)
WRITTEN = ("code",)
"""Where scripts have written, below a node's root."""
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
class UsedHost:
    """A host that is, or was, a node. `leaves_at` is when a drill ends it; `cleared`: nothing of the job is on it.

    `given_up`: it was ended because it did not serve, so that nobody waits for it to be cleared. `freed`: nothing of
    the job runs there; what was written there stays until the group ends, and of that `keeps`, paths below `root`,
    for good.
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
    freed: bool = False
    keeps: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the job has it."""
        return self.ended_at is None

    @property
    def is_to_free(self) -> bool:
        """Whether something of the job may run there; what was to end by itself has, at the time that it was told."""
        return not (self.alive or self.cleared or self.freed or self.end_cause is EndCause.SCHEDULE)

    def as_released(self, *, whole: bool) -> UsedHost:
        """Return it as freed; `whole`: what was written there is removed, too."""
        return replace(self, freed=True, cleared=self.cleared or whole)

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
            remains=not self.alive and not self.cleared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
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
    nodes: tuple[UsedHost, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    removed: bool = False
    """The group is gone. A job that goes on later makes it anew, and must not take a node for one that has ended."""

    @property
    def counted(self) -> tuple[UsedHost, ...]:
        """What the level counts."""
        return tuple(node for node in self.nodes if node.alive and not node.relieved)

    def kept(self, node: UsedHost) -> tuple[str, ...]:
        """Return what is kept where the node was: all nodes of one host have one folder there."""
        return tuple(name for one in self.nodes if one.place.name == node.place.name for name in one.keeps)

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


def runs_until(node: UsedHost, record: Hosts, now: datetime) -> datetime | None:
    """Return until when, at the latest, what ran on the ended node's host may run there and have its GPUs.

    None where it has ended by itself, at the time that it was told, or was ended.
    """
    if node.freed:
        return None
    told = node.ended_at if node.end_cause is EndCause.SCHEDULE else record.armed_until
    return told + GRACE if told is not None and now < told + GRACE else None


def ended(node: UsedHost, at: datetime, cause: EndCause) -> UsedHost:
    """Return the node as ended; one that had ended before stays as it was."""
    return replace(node, ended_at=at, end_cause=cause) if node.alive else node


def all_ended(record: Hosts, now: datetime, keep: tuple[tuple[str, str], ...]) -> tuple[UsedHost, ...]:
    """Return the nodes as they are when the group ends; `keep` names nodes, each with what stays there."""
    nodes = (ended(node, now, EndCause.CHOICE) for node in settled(record, now).nodes)
    return tuple(replace(one, keeps=(*one.keeps, *(path for i, path in keep if i == one.id))) for one in nodes)


def levelled(record: Hosts, now: datetime) -> Hosts:
    """Return the record without the newest nodes above its level."""
    surplus = {node.id for node in record.counted[record.size :]}
    nodes = tuple(ended(node, now, EndCause.CHOICE) if node.id in surplus else node for node in record.nodes)
    return replace(record, nodes=nodes)


def candidates(record: Hosts, places: tuple[Place, ...], now: datetime) -> tuple[Place, ...]:
    """Return the hosts to ask, in the file's order; those that failed lately come last, or not at all yet."""
    taken = {node.place.name for node in record.nodes if node.alive}
    marks = {mark.name: mark for mark in record.excluded}
    free = [p for p in places if p.name not in taken and (p.name not in marks or marks[p.name].again_at <= now)]
    return tuple(sorted(free, key=lambda place: place.name in marks and marks[place.name].last_until > now))


def _left(node: UsedHost, now: datetime) -> UsedHost:
    due = node.leaves_at is not None and now >= node.leaves_at
    return ended(node, node.leaves_at, EndCause.INTERRUPTED) if due and node.leaves_at is not None else node


# Groups of own hosts in the job's store: read, and changed by compare-and-swap.


_ALIKE = timedelta(seconds=3)  # S3 tells whole seconds, and the answer takes its time


class Recollection:
    """The records of one store, and the time by its clock: `clock` is this machine's, and may be wrong."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        """Return the time by the clock that the shut-off is reckoned by, as far as a record was read yet."""
        return self._clock.now() - self._ahead

    def read(self, group: str) -> Hosts | None:
        """Return the group's record; None when there is none. ProvisionError when it is damaged."""
        found = self._read(group)
        return found[0] if found and not found[0].removed else None

    def make(self, group: str) -> Hosts:
        """Return the group's record, made with nothing in it if there is none. Its nodes' numbers go on."""
        while True:
            found = self._read(group)
            if found is not None and not found[0].removed:
                return found[0]
            launched, version = (found[0].launched, found[1]) if found is not None else (0, None)
            fresh = Hosts(name=group, token=secrets.token_hex(16), launched=launched)
            try:
                self._store.put(_key(group), to_json(fresh).encode(), if_absent=found is None, if_version=version)
            except Conflict:
                continue
            return fresh

    def change(self, group: str, change: Callable[[Hosts], Hosts]) -> Hosts:
        """Return the record after the change, which may be made again when another was faster. ProvisionError: none."""
        while True:
            found = self._read(group)
            if found is None or found[0].removed:
                raise ProvisionError(f"there is no group of hosts {group}", hint="gpucloud up makes it")
            old, version = found
            new = change(old)
            if new == old:
                return old
            try:
                self._store.put(_key(group), to_json(new).encode(), if_version=version)
            except Conflict:
                continue
            return new

    def remove(self, group: str) -> None:
        """Forget the group, all but how many nodes it had; one that is gone already is no error."""
        if self.read(group) is not None:
            self.change(group, lambda old: Hosts(name=old.name, token="", launched=old.launched, removed=True))

    def path(self, group: str) -> str:
        """Return the record's file as hosts must see it too, where the store is a folder; else nothing."""
        url = urlsplit(self._store.url)
        return str(Path(unquote(url.path)) / _key(group)) if url.scheme == "file" else ""

    def _read(self, group: str) -> tuple[Hosts, str] | None:
        stored = self._store.get(_key(group))
        if stored is None:
            return None
        ahead = self._clock.now() - stored.store_time
        self._ahead = ahead if abs(ahead) > _ALIKE else timedelta(0)
        try:
            return from_json(Hosts, stored.data), stored.version
        except Malformed as error:
            raise ProvisionError(
                f"{self._store.url}/{_key(group)} is damaged: {error}", hint="remove that object; hosts free themselves"
            ) from error


def _key(group: str) -> str:
    return f"clusters/{group}/hosts.json"
