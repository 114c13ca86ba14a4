"""Grounds for nodes: loopback whose way in can be closed, and namespaces with a link to a switch.

What is done to a node stands in `drill.json` in its folder: `cut` off from everyone, and the `segment`, on which side
of a partition it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gpucloud.adapters.local.ground import Ground, Instance, Launch, Metadata, OnLoopback
from gpucloud.domain.errors import ProvisionError
from gpucloud.system import processes
from gpucloud.system.wholefile import write_whole
from tests.emulation import program
from tests.emulation.switch import METADATA_ADDRESS, Port, Switch

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    cut: bool = False
    segment: int = 0

    def write(self, node_folder: Path) -> None:
        write_whole(node_folder / "drill.json", json.dumps(asdict(self)))


def drill_of(node_folder: Path) -> Drill:
    """Return what is done to the node; nothing where nothing was written."""
    path = node_folder / "drill.json"
    return Drill(**json.loads(path.read_text())) if path.exists() else Drill()


class Cuttable:
    """Loopback. A node that is cut off still reaches the others, and they reach it, but no SSH comes through."""

    pids: frozenset[int] = frozenset()

    def make(self, address: str, taken: Collection[str | None], instance: Callable[[], Instance]) -> Ground:
        return CuttableGround(address, instance)

    def close(self) -> None:
        pass


class CuttableGround(OnLoopback):
    def __init__(self, address: str, instance: Callable[[], Instance]) -> None:
        super().__init__(address, instance)
        self._way_in = WayIn()

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        self._way_in.folder = launch.folder
        return launch.start()

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        self._way_in.follow(process.pid, frozen=frozen)


@dataclass(slots=True)
class WayIn:
    """Whether the node's SSH server runs. Stopped, its connections stay and nothing comes through, as when all
    packets are lost; nothing else of the node is stopped.
    """

    folder: Path | None = None
    closed: bool = False

    @property
    def drill(self) -> Drill:
        return drill_of(self.folder) if self.folder is not None else Drill()

    def follow(self, server: int | None, *, frozen: bool) -> None:
        if frozen:
            self.closed = False  # all of a node goes on when it thaws
        elif server is not None and self.closed != self.drill.cut:
            self.closed = not self.closed
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGSTOP if self.closed else signal.SIGCONT)


class OwnSpaces:
    """Namespaces of its own for each node, and a network between them; `home_mib`: its disk, 0: no limit."""

    def __init__(self, home_mib: int = 0) -> None:
        self._home_mib = home_mib
        self._switch: Switch | None = None

    @property
    def pids(self) -> frozenset[int]:
        return frozenset({self._switch.pid}) if self._switch else frozenset()

    def make(self, address: str, taken: Collection[str | None], instance: Callable[[], Instance]) -> Ground:
        if self._switch is None or not self._switch.alive:
            self._switch = Switch()
        return OwnSpaceGround(self._switch, private_address(taken), self._home_mib, instance)

    def close(self) -> None:
        if self._switch is not None:
            self._switch.close()


class OwnSpaceGround:
    interface = "eth0"

    def __init__(self, switch: Switch, private: str, home_mib: int, instance: Callable[[], Instance]) -> None:
        self.private = private
        self.variables: dict[str, str] = {}
        self._switch = switch
        self._port = switch.plug(private)
        self._home_mib = home_mib
        self.metadata = Metadata(METADATA_ADDRESS, instance, self._port.metadata)
        self._way_in = WayIn()
        self._link = (True, 0)

    @property
    def stands(self) -> bool:
        return self._switch.alive

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        self._way_in.folder = launch.folder
        try:
            return inside(self._port, launch, self.private, self._home_mib).start()
        finally:
            for descriptor in self._port.descriptors:
                os.close(descriptor)

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        drill = self._way_in.drill
        if self._link != (not drill.cut, drill.segment):
            self._link = (not drill.cut, drill.segment)
            self._switch.set_link(self._port.link, up=not drill.cut, segment=drill.segment)
        self._way_in.follow(_first_command(process.pid), frozen=frozen)

    def close(self) -> None:
        self.metadata.server_close()
        if self._switch.alive:
            with contextlib.suppress(ProvisionError):  # it goes with the switch
                self._switch.unplug(self._port.link)


def private_address(taken: Collection[str | None]) -> str:
    """Return an address on the network between nodes that no live node has."""
    free = (f"10.88.{k // 200}.{10 + k % 200}" for k in range(5000))
    return next(candidate for candidate in free if candidate not in taken)


def inside(port: Port, launch: Launch, address: str, home_mib: int) -> Launch:
    """Return the launch of the same command in namespaces of its own."""
    own = (
        *program("tests.emulation.own_space"),
        *("--network", str(port.network)),
        *(() if port.user is None else ("--user", str(port.user))),
        *("--name", f"ip-{address.replace('.', '-')}"),
        *("--address", address),
        *("--home-mib", str(home_mib)),
        *("--folder", str(launch.folder)),
        *("--home", str(launch.home)),
        *("--parent-pipe", str(launch.parent_pipe)),
    )
    return replace(launch, argv=(*own, "--", *launch.argv), descriptors=(*launch.descriptors, *port.descriptors))


def _first_command(outside: int) -> int | None:
    """Return the process that the first one of the PID namespace below `outside` started first; None if gone.

    It has the number 2 there.
    """
    for pid in processes.descendants(outside):
        with contextlib.suppress(OSError):
            status = (_PROC / str(pid) / "status").read_text()
            numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
            if len(numbers) > 1 and numbers[-1] == "2":
                return pid
    return None
