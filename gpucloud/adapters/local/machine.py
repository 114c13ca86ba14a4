"""A live node as the daemon holds it: its newest record, its process, its metadata service and its link."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.adapters.local import node, place
from gpucloud.adapters.local.hostkeys import new_host_key
from gpucloud.adapters.local.imds import Instance, Metadata
from gpucloud.adapters.local.place import user_name
from gpucloud.adapters.local.records import Folder, GroupRecord, NodeRecord, Schedule, Tier, noticed
from gpucloud.adapters.local.switch import METADATA_ADDRESS, Port, Switch
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, NodeState


class Machine:
    """One node from its launch to its end; `record` and `group` are kept up to date by the daemon."""

    def __init__(
        self,
        folder: Folder,
        group: GroupRecord,
        others: Collection[NodeRecord],
        now: datetime,
        *,
        devices: tuple[str, ...] | None,
        switch: Switch | None = None,
    ) -> None:
        """Reserve an id, an address, a port and a host key; nothing runs yet. OSError when there is no free port.

        `devices` are the UUIDs of the node's GPUs, None on a machine without any. With a `switch` the node is of tier
        A; ProvisionError when it has no port for it.
        """
        if group.pool is None:
            raise ProvisionError(f"{group.name} has a size and no pool", hint="set the size again")
        self._listener = place.listen({o.address for o in others}, {o.port for o in others})
        address, port = self._listener.getsockname()[:2]
        self._host_key = new_host_key()
        private = place.private_address({o.private for o in others}) if switch else None
        self._switch = switch
        self._port = switch.plug(private) if switch and private else None
        if self._port is None:
            self._metadata = Metadata(address, self._instance)
        else:
            self._metadata = Metadata(METADATA_ADDRESS, self._instance, self._port.metadata)
        self._folder = folder.node_folder
        self._layers = folder.root / "layers"
        self._process: subprocess.Popen[bytes] | None = None
        self._greeting: socket.socket | None = None
        self._frozen = False
        self._cut = False
        self._link = (True, 0)
        self.group = group
        self.record = NodeRecord(
            id=node.new_id(),
            number=group.launched,
            pool=group.pool,
            launched_at=now,
            address=address,
            port=port,
            user=user_name(),
            interface="eth0" if self._port else place.interface(),
            host_key=self._host_key.public,
            devices=devices or (),
            tier=Tier.A if self._port else Tier.B,
            private=private,
        )
        self._devices = devices

    def start(self, server: tuple[str, ...], parent_pipe: int) -> None:
        """Start the node's processes; OSError when that fails."""
        boot = node.Boot(
            id=self.record.id,
            folder=self._folder(self.group.name, self.record.id),
            server=server,
            public_key=self.group.public_key,
            host_key=self._host_key,
            user_data=self.group.user_data,
            metadata=None if self._port else self._metadata.url,
            layers=self._layers,
            devices=self._devices,
            own=self._own_space(self._port) if self._port else None,
        )
        try:
            self._process = node.start(boot, self._listener, parent_pipe)
        finally:
            for descriptor in boot.own.descriptors if boot.own else ():
                os.close(descriptor)

    def _own_space(self, port: Port) -> place.OwnSpace:
        return place.OwnSpace(
            network=port.network,
            user=port.user,
            address=self.record.private or "",
            home_mib=self.group.home_mib,
        )

    @property
    def metadata(self) -> Metadata:
        """The node's metadata service; `handle_request` is to be called when it is readable."""
        return self._metadata

    @property
    def pid(self) -> int | None:
        """The node's first process, once it was started."""
        return self._process.pid if self._process else None

    @property
    def died(self) -> bool:
        """Whether the node's first process has ended by itself, or the network that it was on."""
        if self._switch is not None and not self._switch.alive:
            return True
        return self._process is None or self._process.poll() is not None

    def greets(self) -> bool:
        """Whether an SSH server answers; looks without waiting. The socket listens before the server runs."""
        try:
            if self._greeting is None:
                self._greeting = socket.create_connection((self.record.address, self.record.port), timeout=1.0)
                self._greeting.settimeout(0.0)
            said = self._greeting.recv(4)
        except BlockingIOError:
            return False
        except OSError:  # refused or reset: tried again next time, until the process is seen to be dead
            said = b""
        self._close_greeting()
        return said == b"SSH-"

    def user_data_exit(self) -> int | None:
        """Return the exit code of the user data once it has ended."""
        path = self._folder(self.group.name, self.record.id) / "user-data.exit"
        return int(path.read_text()) if path.exists() else None

    def follow_drills(self) -> None:
        """Make the node as frozen and as cut off as its record says. ProvisionError when its link cannot be set."""
        record = self.record
        if self._process is None:
            return
        self._set_link(up=not record.cut, segment=record.segment)
        if self._frozen and not record.frozen:
            node.thaw(record.id, self._process)
            self._frozen = self._cut = False
        if record.cut != self._cut and not self._frozen:
            self._cut = node.close_way_in(self._process, closed=record.cut, own_space=self._port is not None)
        if record.frozen and not self._frozen:
            node.freeze(record.id, self._process)
            self._frozen = True

    def _set_link(self, *, up: bool, segment: int) -> None:
        if self._switch is not None and self._port is not None and self._link != (up, segment):
            self._switch.set_link(self._port.link, up=up, segment=segment)
            self._link = (up, segment)

    def end(self) -> bool:
        """End the node's processes, sockets and disk; False when a process was still there after some seconds."""
        gone = node.sweep(self.record.id) if self._process is None else node.destroy(self.record.id, self._process)
        if gone:
            self._listener.close()
            self._metadata.server_close()
            self._close_greeting()
            self._unplug()
            # As on EC2 nothing of the local disk is left. It may be large: the other nodes do not wait for it.
            home = self._folder(self.group.name, self.record.id) / "home"
            threading.Thread(target=shutil.rmtree, args=(home,), kwargs={"ignore_errors": True}).start()
        return gone

    def _unplug(self) -> None:
        if self._switch is not None and self._port is not None and self._switch.alive:
            with contextlib.suppress(ProvisionError):  # it goes with the switch
                self._switch.unplug(self._port.link)

    def _close_greeting(self) -> None:
        if self._greeting is not None:
            with contextlib.suppress(OSError):
                self._greeting.close()
            self._greeting = None

    def _instance(self) -> Instance:
        record = self.record
        return Instance(
            id=record.id,
            instance_type=record.pool.instance_type,
            region=self.group.region,
            zone=record.pool.zone,
            spot=record.pool.market is Market.SPOT,
            address=record.private or record.address,
            noticed_at=record.noticed_at,
            interrupted_at=record.interrupted_at,
            rebalance_at=record.rebalance_at,
        )


# What a node group needs next, decided from its records and the time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The records as they shall be, and how many nodes are to be started."""

    group: GroupRecord
    nodes: tuple[NodeRecord, ...]
    starts: int


def settle(group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime, notice_s: float) -> Step:
    """Return the next step: shut-off, then interruptions, then the level. Equal records and 0 starts mean: nothing."""
    if group.armed_until is None or now >= group.armed_until:
        group = replace(group, size=0)
        nodes = tuple(_ending(node, EndCause.SCHEDULE) for node in nodes)
    group, nodes = _scheduled(group, nodes, now, notice_s)
    nodes = tuple(
        _ending(node, EndCause.INTERRUPTED) if node.interrupted_at is not None and now >= node.interrupted_at else node
        for node in nodes
    )
    return _levelled(group, nodes)


def _ending(node: NodeRecord, cause: EndCause) -> NodeRecord:
    return replace(node, ending=cause) if node.alive and node.ending is None else node


def _levelled(group: GroupRecord, nodes: tuple[NodeRecord, ...]) -> Step:
    """Bring the nodes to the level; too many are those of another pool than the group's first, then the newest."""
    counted = sorted((node for node in nodes if node.counted), key=lambda node: (node.pool != group.pool, node.number))
    surplus = {node.id for node in counted[group.size :]}
    nodes = tuple(_ending(node, EndCause.CHOICE) if node.id in surplus else node for node in nodes)
    return Step(group=group, nodes=nodes, starts=max(0, group.size - len(counted)))


def _scheduled(
    group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime, notice_s: float
) -> tuple[GroupRecord, tuple[NodeRecord, ...]]:
    schedule = group.schedule
    if schedule is None:
        return group, nodes
    if group.size == 0:
        return replace(group, schedule=replace(schedule, next_at=None)), nodes
    if schedule.next_at is None:
        return replace(group, schedule=replace(schedule, next_at=now + _draw(schedule).gap)), nodes
    if now < schedule.next_at:
        return group, nodes
    later = replace(schedule, drawn=schedule.drawn + 1)
    later = replace(later, next_at=max(now, schedule.next_at + _draw(later).gap))
    return replace(group, schedule=later), _interrupted(nodes, _draw(schedule), now, notice_s)


def _interrupted(nodes: tuple[NodeRecord, ...], draw: _Draw, now: datetime, notice_s: float) -> tuple[NodeRecord, ...]:
    able = [n for n in nodes if n.counted and n.state is NodeState.RUNNING and n.interrupted_at is None]
    if not able:
        return nodes
    victim = able[int(draw.which * len(able))]
    after = noticed(victim, now, notice_s) if draw.announced else _ending(victim, EndCause.INTERRUPTED)
    return tuple(after if node.id == victim.id else node for node in nodes)


@dataclass(frozen=True, slots=True)
class _Draw:
    gap: timedelta
    announced: bool
    which: float


def _draw(schedule: Schedule) -> _Draw:
    """Return the schedule's next interruption: a function of its seed and number, so that it survives a restart."""
    dice = random.Random(f"{schedule.seed}/{schedule.drawn}")  # noqa: S311  (a reproducible drill, no secret)
    gap = timedelta(seconds=dice.expovariate(1 / schedule.mean_s))
    return _Draw(gap, dice.random() >= schedule.unannounced, dice.random())
