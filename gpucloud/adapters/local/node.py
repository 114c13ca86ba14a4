"""One embedded node: as the daemon holds it, its sockets, keys and files, its process tree, and that tree's end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gpucloud.adapters.local import ground
from gpucloud.adapters.local.ground import Ground, Grounds, Instance, Launch, Metadata
from gpucloud.adapters.local.records import Folder, GroupRecord, NodeRecord
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.variables import GPUCLOUD_LAYERS, GPUCLOUD_NODE, GPUCLOUD_NOTICE_POLL_S, GPUCLOUD_PYTHON
from gpucloud.system import processes
from gpucloud.system.processes import import_path, user_name

MARK = GPUCLOUD_NODE
"""The variable that every process of a node bears, with the node's id."""


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
            id=new_id(),
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
        boot = Boot(
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
        self._process = start(boot, self._ground, self._listener, parent_pipe)

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
            (freeze if record.frozen else thaw)(record.id, self._process)
            self._frozen = record.frozen

    def end(self) -> bool:
        """End the node's processes, sockets and disk; False when a process was still there after some seconds."""
        gone = sweep(self.record.id) if self._process is None else destroy(self.record.id, self._process)
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


# Its sockets, keys and files, its process tree, and that tree's end.


_NOTICE_POLL_S = "0.2"  # notices run faster here than on EC2, so that agents look for them more often than each second


def new_id() -> str:
    """Return an id in EC2's form, never used before."""
    return f"i-0{secrets.token_hex(8)}"


def server_command() -> tuple[str, ...]:
    """Return the command of the SSH server, without its options."""
    return (sys.executable, "-m", "gpucloud.adapters.local.sshd")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A node's Ed25519 pair for SSH: the private half as an OpenSSH file, the public one as `ssh-ed25519 AAAA…`."""

    private: bytes
    public: str


def new_host_key() -> HostKey:
    """Return a fresh pair."""
    key = Ed25519PrivateKey.generate()
    return HostKey(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a node is started from. `folder` is made; `user_data` is a shell script, empty for none.

    `layers` keeps what jobs' `setup` made, for all nodes of this machine. `devices` are the UUIDs of the node's GPUs;
    None on a machine without any. `variables` are added to its environment.
    """

    id: str
    folder: Path
    server: tuple[str, ...]
    public_key: str
    host_key: HostKey
    user_data: str
    variables: dict[str, str]
    layers: Path
    devices: tuple[str, ...] | None = None

    @property
    def home(self) -> Path:
        """The node's home folder."""
        return self.folder / "home"

    def argv(self, listener: int, parent_pipe: int) -> tuple[str, ...]:
        """Return the node's command line; both numbers are descriptors that it inherits."""
        server = (
            *self.server,
            *("--fd", str(listener)),
            *("--host-key", str(self.folder / "host_key")),
            *("--authorized-keys", str(self.folder / "authorized_keys")),
            *("--home", str(self.home)),
            *("--parent-pipe", str(parent_pipe)),
        )
        if self.user_data:
            return (sys.executable, "-m", "gpucloud.adapters.local.first_boot", "run", str(self.folder), *server)
        return server

    def environment(self) -> dict[str, str]:
        """Return the node's whole environment: nothing of the caller's, so that no secret of theirs is in it."""
        search = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        tool = shutil.which("nvidia-smi") if self.devices else None
        if tool and str(Path(tool).parent) not in search:
            search.append(str(Path(tool).parent))
        return {
            "PATH": os.pathsep.join(search),
            "LANG": "C.UTF-8",
            "HOME": str(self.home),
            "USER": user_name(),
            "LOGNAME": user_name(),
            MARK: self.id,
            GPUCLOUD_NOTICE_POLL_S: _NOTICE_POLL_S,
            GPUCLOUD_PYTHON: sys.executable,
            GPUCLOUD_LAYERS: str(self.layers),
            **self.variables,
            **import_path(),
            **self._gpus(),
        }

    def _gpus(self) -> dict[str, str]:
        """Return the variables by which the node's processes see its GPUs, and those of no other node."""
        if self.devices is None:
            return {}
        library = os.environ.get("LD_LIBRARY_PATH")
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            **({"LD_LIBRARY_PATH": library} if library else {}),
        }


def start(boot: Boot, ground: Ground, listener: socket.socket, parent_pipe: int) -> subprocess.Popen[bytes]:
    """Write the node's files and start its process, which takes over `listener`; the caller's copy is closed."""
    boot.home.mkdir(parents=True)
    _write_private(boot.folder / "host_key", boot.host_key.private)
    _write_private(boot.folder / "authorized_keys", f"{boot.public_key}\n".encode())
    if boot.user_data:
        _write_private(boot.folder / "user-data", boot.user_data.encode())
    with listener:
        return ground.start(
            Launch(
                argv=boot.argv(listener.fileno(), parent_pipe),
                environment=boot.environment(),
                folder=boot.folder,
                home=boot.home,
                descriptors=(listener.fileno(), parent_pipe),
                parent_pipe=parent_pipe,
            )
        )


def destroy(node_id: str, process: subprocess.Popen[bytes]) -> bool:
    """End the node at once with everything that it started; False when something was still there after 5 s.

    Its first process is stopped, then everything below it killed, then the process itself: as long as it is there
    it is the parent of every orphan of the node (Linux), so that nothing escapes.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        processes.kill_below(process.pid, mark=(MARK, node_id))
        process.kill()
        process.wait()
    return sweep(node_id)


def sweep(node_id: str) -> bool:
    """End whatever bears the node's mark, with everything below it; False when something was left after 5 s."""
    return processes.kill_marked((MARK, node_id))


def end_orphans(nodes: Collection[int]) -> None:
    """End the children of this process, and everything below them, whose pids are not in `nodes`.

    This process adopts what a node leaves behind whose first process was killed by somebody else: it may bear no mark.
    """
    own = os.getpid()
    while orphans := [p.pid for p in processes.listing() if p.parent == own and p.pid not in nodes]:
        for pid in orphans:
            processes.kill_below(pid)
            os.kill(pid, signal.SIGKILL)  # it is there, as a zombie at least, until it is waited for
            os.waitpid(pid, 0)


def freeze(node_id: str, process: subprocess.Popen[bytes]) -> None:
    """Stop every process of the node, so that it answers nothing and yet is there."""
    processes.stop_tree(process.pid, mark=(MARK, node_id))


def thaw(node_id: str, process: subprocess.Popen[bytes]) -> None:
    """Let every process of the node go on."""
    processes.continue_tree(process.pid, mark=(MARK, node_id))


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


# Ends the node that it runs on, as `shutdown` does on a machine: `python -m gpucloud.adapters.local.node`.
#
# The node's first process is the topmost one above this that bears the node's mark.


def power_off() -> int:
    """End the node and return 0; 1 where this is none."""
    name = os.environ.get(MARK)
    first = first_of(os.getpid(), frozenset(processes.marked(MARK, name))) if name else None
    if first is None:
        sys.stderr.write("this is no node of the embedded fleet\n")
        return 1
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)  # one that was stopped ends too
    return 0


def first_of(pid: int, members: frozenset[int]) -> int | None:
    """Return the topmost process above `pid` that belongs to the node; None when there is none."""
    parents = {process.pid: process.parent for process in processes.listing()}
    found = None
    while (pid := parents.get(pid, 0)) in members:
        found = pid
    return found


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


if __name__ == "__main__":
    sys.exit(power_off())
