"""What the embedded cloud remembers: groups, their nodes and its settings, as values and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

from gpucloud.domain.job import Market
from gpucloud.domain.node import EndCause, Node, NodeState
from gpucloud.domain.offer import Pool

NOTICE_S = 120.0  # what EC2 gives
NO_GPUS = "InsufficientGpus"
CLOCK_FACTOR = 30.0


class Tier(str, Enum):
    """How real nodes are: A gives each its own namespaces, B none, so that it runs everywhere."""

    A = "a"
    B = "b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The cloud's settings: how much faster than EC2 it takes nodes; the SSH server's command, None for ours.

    Until `no_spot_until` it has no spot machines to start.
    """

    clock_factor: float = CLOCK_FACTOR
    server: tuple[str, ...] | None = None
    no_spot_until: datetime | None = None

    @property
    def notice_s(self) -> float:
        """Seconds between a notice and the node's end (in whole seconds of the clock: up to one more)."""
        return NOTICE_S / self.clock_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Seeded interruptions: `drawn` counts those that came; `next_at` is None while the group's size is 0."""

    seed: int
    mean_s: float
    unannounced: float
    drawn: int = 0
    next_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortOf:
    """What there is too little of to start a node of the pool, and when that was found last."""

    message: str
    at: datetime
    pool: Pool | None = None
    code: str = NO_GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One node group: what Terraform set, the level, the shut-off. `launched` numbers the nodes.

    `short_of` is why fewer nodes than the level run, while that is so. In tier A each node's home may be a disk of its
    own of `home_mib`; 0: it is a folder.
    """

    name: str
    region: str
    zones: tuple[str, ...]
    node_type: str
    market: Market
    tags: tuple[tuple[str, str], ...]
    public_key: str
    store: str
    user_data: str = ""
    size: int = 0
    pool: Pool | None = None
    armed_until: datetime | None = None
    schedule: Schedule | None = None
    launched: int = 0
    short_of: ShortOf | None = None
    tier: Tier = Tier.B
    home_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node; `devices` are the UUIDs of its GPUs.

    `ending` is why it is to end, written before it is done; `number` counts launches in the group. `private` is where
    the other nodes reach it, None where that is `address`. What a drill did to it are levels: `frozen`; `cut` off from
    everyone; on which side of a partition it is, `segment`.
    """

    id: str
    number: int
    pool: Pool
    launched_at: datetime
    address: str
    port: int
    user: str
    interface: str
    host_key: str
    state: NodeState = NodeState.PENDING
    relieved: bool = False
    frozen: bool = False
    noticed_at: datetime | None = None
    taken_at: datetime | None = None
    ending: EndCause | None = None
    ended_at: datetime | None = None
    user_data_exit: int | None = None
    devices: tuple[str, ...] = ()
    tier: Tier = Tier.B
    private: str | None = None
    cut: bool = False
    segment: int = 0
    rebalance_at: datetime | None = None

    @property
    def alive(self) -> bool:
        """Whether processes of the node may be there."""
        return self.state is not NodeState.TERMINATED

    @property
    def counted(self) -> bool:
        """Whether the node counts towards the group's level."""
        return self.alive and not self.relieved and self.ending is None

    def listed(self) -> Node:
        """Return the node as the port shows it."""
        return Node(
            id=self.id,
            pool=self.pool,
            state=self.state,
            launched_at=self.launched_at,
            address=self.address,
            port=self.port,
            user=self.user,
            private_address=self.private or self.address,
            interface=self.interface,
            host_key=self.host_key,
            devices=self.devices,
            relieved=self.relieved,
            ended_at=self.ended_at,
            end_cause=self.ending if not self.alive or self.ending is EndCause.CHOICE else None,
        )


def noticed(node: NodeRecord, now: datetime, notice_s: float) -> NodeRecord:
    """Return the node with its notice posted; one that has a notice keeps it.

    EC2 gives the time in whole seconds: it is rounded up here, so that what is said is what is done.
    """
    if node.taken_at is not None:
        return node
    taken_at = now + timedelta(seconds=notice_s)
    if taken_at.microsecond:
        taken_at = taken_at.replace(microsecond=0) + timedelta(seconds=1)
    return replace(node, noticed_at=now, taken_at=taken_at)


def ended(node: NodeRecord, group: GroupRecord, now: datetime) -> NodeRecord:
    """Return the node as terminated. What the shut-off ends is charged until the shut-off and no longer."""
    if node.ending is EndCause.SCHEDULE and group.armed_until is not None:
        now = max(node.launched_at, min(now, group.armed_until))
    return replace(node, state=NodeState.TERMINATED, ended_at=now)


def to_json(record: Settings | GroupRecord | NodeRecord) -> str:
    """Return the record as JSON."""
    return json.dumps(asdict(record), default=_plain, indent=1)


def settings_from(text: str) -> Settings:
    """Return the settings; ValueError, KeyError, TypeError or AttributeError when it is none, as in those below."""
    raw = json.loads(text)
    server = raw["server"]
    return Settings(
        clock_factor=raw["clock_factor"],
        server=None if server is None else tuple(server),
        no_spot_until=_time(raw.get("no_spot_until")),
    )


def group_from(text: str) -> GroupRecord:
    """Return the group."""
    raw = json.loads(text)
    raw.update(
        zones=tuple(raw["zones"]),
        market=Market(raw["market"]),
        tags=tuple((key, value) for key, value in raw["tags"]),
        pool=_pool(raw["pool"]) if raw["pool"] else None,
        armed_until=_time(raw["armed_until"]),
        schedule=_schedule(raw["schedule"]) if raw["schedule"] else None,
        short_of=_short_of(raw.get("short_of")),
        tier=Tier(raw.get("tier", Tier.B)),
    )
    return GroupRecord(**raw)


def node_from(text: str) -> NodeRecord:
    """Return the node."""
    raw = json.loads(text)
    raw.update(
        pool=_pool(raw["pool"]),
        launched_at=datetime.fromisoformat(raw["launched_at"]),
        state=NodeState(raw["state"]),
        noticed_at=_time(raw["noticed_at"]),
        taken_at=_time(raw["taken_at"]),
        ending=EndCause(raw["ending"]) if raw["ending"] else None,
        devices=tuple(raw.get("devices", ())),
        rebalance_at=_time(raw.get("rebalance_at")),
        ended_at=_time(raw["ended_at"]),
        tier=Tier(raw.get("tier", Tier.B)),
    )
    return NodeRecord(**raw)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    raise TypeError(f"not a field of a record: {value!r}")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _pool(raw: dict[str, Any]) -> Pool:
    return Pool(instance_type=raw["instance_type"], zone=raw["zone"], market=Market(raw["market"]))


def _short_of(raw: dict[str, Any] | None) -> ShortOf | None:
    if raw is None:
        return None
    pool = _pool(raw["pool"]) if raw.get("pool") else None
    at = datetime.fromisoformat(raw["at"])
    return ShortOf(message=raw["message"], at=at, pool=pool, code=raw.get("code", NO_GPUS))


def _schedule(raw: dict[str, Any]) -> Schedule:
    return Schedule(**{**raw, "next_at": _time(raw["next_at"])})
