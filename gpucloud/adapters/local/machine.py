"""A live node as the daemon holds it: its newest record, its process, and the ground that it stands on."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gpucloud.adapters.local import ground, node
from gpucloud.adapters.local.ground import Grounds, Instance, Metadata
from gpucloud.adapters.local.node import HostKey
from gpucloud.adapters.local.records import Folder, GroupRecord, NodeRecord
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause
from gpucloud.system.processes import user_name


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
        grounds: Grounds,
    ) -> None:
        """Reserve an id, an address, a port and a host key; nothing runs yet. OSError when there is no free port.

        `devices` are the UUIDs of the node's GPUs, None on a machine without any. ProvisionError when `grounds` has
        none for it.
        """
        if group.pool is None:
            raise ProvisionError(f"{group.name} has a size and no pool", hint="set the size again")
        self._listener = ground.listen({o.address for o in others}, {o.port for o in others})
        address, port = self._listener.getsockname()[:2]
        self._host_key = new_host_key()
        self._ground = grounds.make(address, {o.private for o in others}, self._instance)
        self._folder = folder.node_folder
        self._layers = folder.root / "layers"
        self._process: subprocess.Popen[bytes] | None = None
        self._greeting: socket.socket | None = None
        self._frozen = False
        self.group = group
        self.record = NodeRecord(
            id=node.new_id(),
            number=group.launched,
            pool=group.pool,
            launched_at=now,
            address=address,
            port=port,
            user=user_name(),
            interface=self._ground.interface,
            host_key=self._host_key.public,
            devices=devices or (),
            private=self._ground.private,
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
            variables=self._ground.variables,
            layers=self._layers,
            devices=self._devices,
        )
        self._process = node.start(boot, self._ground, self._listener, parent_pipe)

    @property
    def metadata(self) -> Metadata:
        """The node's metadata service; `handle_request` is to be called when it is readable."""
        return self._ground.metadata

    @property
    def pid(self) -> int | None:
        """The node's first process, once it was started."""
        return self._process.pid if self._process else None

    @property
    def died(self) -> bool:
        """Whether the node's first process has ended by itself, or the ground that it was on."""
        return not self._ground.stands or self._process is None or self._process.poll() is not None

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
        """Make the node as frozen as its record says, and its ground as it shall be. ProvisionError from the ground."""
        record = self.record
        if self._process is None:
            return
        self._ground.follow(self._process, frozen=self._frozen)
        if record.frozen != self._frozen:
            (node.freeze if record.frozen else node.thaw)(record.id, self._process)
            self._frozen = record.frozen

    def end(self) -> bool:
        """End the node's processes, sockets and disk; False when a process was still there after some seconds."""
        gone = node.sweep(self.record.id) if self._process is None else node.destroy(self.record.id, self._process)
        if gone:
            self._listener.close()
            self._close_greeting()
            self._ground.close()
            # As on EC2 nothing of the local disk is left. It may be large: the other nodes do not wait for it.
            home = self._folder(self.group.name, self.record.id) / "home"
            threading.Thread(target=shutil.rmtree, args=(home,), kwargs={"ignore_errors": True}).start()
        return gone

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


def settle(group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime) -> Step:
    """Return the next step: shut-off, then interruptions, then the level. Equal records and 0 starts mean: nothing."""
    if group.armed_until is None or now >= group.armed_until:
        group = replace(group, size=0)
        nodes = tuple(_ending(node, EndCause.SCHEDULE) for node in nodes)
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


def new_host_key() -> HostKey:
    """Return a fresh pair."""
    key = Ed25519PrivateKey.generate()
    return HostKey(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )
