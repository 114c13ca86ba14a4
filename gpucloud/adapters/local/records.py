"""The embedded cloud's folder: every record in a file of its own, changed under one lock.

lock                            held by whoever reads or changes records; holds the number of the last change
daemon.lock                     held by the daemon while it lives; its time is the daemon's last heartbeat
cloud.json                      Settings
groups/<name>/group.json        GroupRecord
groups/<name>/nodes/<id>.json   NodeRecord
groups/<name>/nodes/<id>/       the node's own files, `home` among them
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.system import processes
from gpucloud.system.wholefile import write_whole

_Record = TypeVar("_Record")
_GROUP_NAME = re.compile(r"[a-z0-9-]{1,63}")


class Folder:
    """Records of one embedded cloud. Reads and writes belong inside `with locked():`, save single reads."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # the daemon works elsewhere
        self.daemon_lock = self.root / "daemon.lock"
        self.daemon_pid = self.root / "daemon.pid"
        self.log = self.root / "daemon.log"
        self._lock = self.root / "lock"
        self._groups = self.root / "groups"

    @property
    def exists(self) -> bool:
        """Whether the folder has been made."""
        return self._lock.exists()

    def create(self) -> None:
        """Make the folder, readable by its owner only; may be repeated."""
        try:
            self._groups.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            self._lock.touch(mode=0o600)
        except OSError as error:
            raise ProvisionError(
                f"cannot make the embedded cloud's folder {self.root}: {error.strerror}",
                hint="set GPUCLOUD_HOME to a folder that you may write to",
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cloud's lock; FileNotFoundError when the folder is gone."""
        with processes.locked(self._lock, make=False):
            yield

    def changes(self) -> int:
        """Return the number of the last change; FileNotFoundError when the folder is gone."""
        return int(self._lock.read_bytes() or b"0")

    def settings(self) -> Settings:
        """Return the settings, or the defaults where none were written."""
        return self._read(self.root / "cloud.json", settings_from) or Settings()

    def save_settings(self, settings: Settings) -> None:
        """Write the settings."""
        self._write(self.root / "cloud.json", to_json(settings))

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups."""
        return tuple(sorted(path.parent.name for path in self._groups.glob("*/group.json")))

    def group(self, name: str) -> GroupRecord | None:
        """Return the group, None when there is none; ProvisionError for a name that no group can have."""
        return self._read(self._group_folder(name) / "group.json", group_from)

    def save_group(self, group: GroupRecord) -> None:
        """Write the group."""
        self._write(self._group_folder(group.name) / "group.json", to_json(group))

    def nodes(self, group: str) -> tuple[NodeRecord, ...]:
        """Return the group's nodes, the ended ones too, in the order of their launch."""
        found = (self._read(path, node_from) for path in (self._group_folder(group) / "nodes").glob("*.json"))
        return tuple(sorted((node for node in found if node is not None), key=lambda node: node.number))

    def node(self, group: str, node_id: str) -> NodeRecord | None:
        """Return the node, None when there is none."""
        return self._read(self._group_folder(group) / "nodes" / f"{node_id}.json", node_from)

    def save_node(self, group: str, node: NodeRecord) -> None:
        """Write the node."""
        self._write(self._group_folder(group) / "nodes" / f"{node.id}.json", to_json(node))

    def node_folder(self, group: str, node_id: str) -> Path:
        """Return the folder of the node's own files."""
        return self._group_folder(group) / "nodes" / node_id

    def remove_group(self, name: str) -> None:
        """Remove the group with everything below it, in one step as others see it; what is gone is no error."""
        removed = self.root / "removed"
        removed.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._group_folder(name).rename(removed / f"{name}-{secrets.token_hex(4)}")
            self._count_change()
        shutil.rmtree(removed, ignore_errors=True)

    def _group_folder(self, name: str) -> Path:
        if not _GROUP_NAME.fullmatch(name):
            raise ProvisionError(
                f"{name!r} cannot name a node group", hint="use 1 to 63 of a-z, 0-9 and '-', as in gpucloud-digits"
            )
        return self._groups / name

    def _read(self, path: Path, parse: Callable[[str], _Record]) -> _Record | None:
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProvisionError(
                f"{path} is damaged: {error}", hint=f"end this cloud's nodes and remove {self.root}"
            ) from error

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, lasting=True)
        self._count_change()

    def _count_change(self) -> None:
        # In place: the lock belongs to this very file. Equal lengths, so that a reader without the lock sees a number.
        number = f"{self.changes() + 1:020d}"
        with self._lock.open("r+") as file:
            file.write(number)


# What the embedded cloud remembers: groups, their nodes and its settings, as values and as JSON.


NOTICE_S = 120.0  # what EC2 gives
NO_GPUS = "InsufficientGpus"
CLOCK_FACTOR = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The cloud's settings: how much faster than EC2 it takes nodes; the SSH server's command, None for ours.

    Until `no_spot_until` it has no spot machines to start. `daemon` is the command that keeps the folder, None for
    ours; it gets the options of ours behind its own.
    """

    clock_factor: float = CLOCK_FACTOR
    server: tuple[str, ...] | None = None
    no_spot_until: datetime | None = None
    daemon: tuple[str, ...] | None = None

    @property
    def notice_s(self) -> float:
        """Seconds between a notice and the node's end (in whole seconds of the clock: up to one more)."""
        return NOTICE_S / self.clock_factor


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

    `short_of` is why fewer nodes than the level run, while that is so.
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
    launched: int = 0
    short_of: ShortOf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node; `devices` are the UUIDs of its GPUs.

    `ending` is why it is to end, written before it is done; `number` counts launches in the group. `private` is where
    the other nodes reach it, None where that is `address`. What a drill did to it, `frozen`, is a level.
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
    interrupted_at: datetime | None = None
    ending: EndCause | None = None
    ended_at: datetime | None = None
    user_data_exit: int | None = None
    devices: tuple[str, ...] = ()
    private: str | None = None
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
    if node.interrupted_at is not None:
        return node
    interrupted_at = now + timedelta(seconds=notice_s)
    if interrupted_at.microsecond:
        interrupted_at = interrupted_at.replace(microsecond=0) + timedelta(seconds=1)
    return replace(node, noticed_at=now, interrupted_at=interrupted_at)


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
    return Settings(
        clock_factor=raw["clock_factor"],
        server=_command(raw["server"]),
        daemon=_command(raw.get("daemon")),
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
        short_of=_short_of(raw.get("short_of")),
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
        interrupted_at=_time(raw["interrupted_at"]),
        ending=EndCause(raw["ending"]) if raw["ending"] else None,
        devices=tuple(raw.get("devices", ())),
        rebalance_at=_time(raw.get("rebalance_at")),
        ended_at=_time(raw["ended_at"]),
    )
    return NodeRecord(**raw)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    raise TypeError(f"not a field of a record: {value!r}")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _command(raw: list[str] | None) -> tuple[str, ...] | None:
    return None if raw is None else tuple(raw)


def _pool(raw: dict[str, Any]) -> Pool:
    return Pool(instance_type=raw["instance_type"], zone=raw["zone"], market=Market(raw["market"]))


def _short_of(raw: dict[str, Any] | None) -> ShortOf | None:
    if raw is None:
        return None
    pool = _pool(raw["pool"]) if raw.get("pool") else None
    at = datetime.fromisoformat(raw["at"])
    return ShortOf(message=raw["message"], at=at, pool=pool, code=raw.get("code", NO_GPUS))
