"""The network between the nodes of tier A: a process in namespaces of its own that holds a bridge.

    python -m gpucloud.adapters.local.switch FD

It is told what to do on the Unix socket `FD` and ends when that is closed. Nothing of it is seen outside: the bridge
and every link are in its network namespace, and go with it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.adapters.local import namespaces
from gpucloud.adapters.local.netlink import Netlink
from gpucloud.domain.errors import ProvisionError

METADATA_ADDRESS = "169.254.169.254"

_PREFIX = 16
_LIMIT_S = 10.0
_OWN_NETWORK = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class Port:
    """A node's place at the switch: its link's name, its namespaces, and a socket at 169.254.169.254:80 in there.

    `user` is None where the cloud's processes are root. Whoever has it closes the descriptors.
    """

    link: str
    network: int
    user: int | None
    metadata: socket.socket


class Switch:
    """The switch's process as the daemon holds it. Every call raises ProvisionError when it cannot be done."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_LIMIT_S)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "gpucloud.adapters.local.switch", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            self._ask({"do": "greet"})
        except ProvisionError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs; its links are gone with it."""
        return self._process.poll() is None

    def plug(self, address: str) -> Port:
        """Return a new port, whose node has that address on `eth0`."""
        said, found = self._ask({"do": "plug", "address": address})
        metadata, network, *user = found
        return Port(said["link"], network, user[0] if user else None, socket.socket(fileno=metadata))

    def set_link(self, link: str, *, up: bool, segment: int) -> None:
        """Set a link up or down, and on which side of a partition it is: those of one segment see each other."""
        self._ask({"do": "set", "link": link, "up": up, "segment": segment})

    def unplug(self, link: str) -> None:
        """Remove a link; one that is gone is no error."""
        self._ask({"do": "unplug", "link": link})

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, order: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            self._socket.send(json.dumps(order).encode())
            said, found = _receive(self._socket)
        except OSError as error:
            raise ProvisionError(f"the nodes' switch does not answer: {error}") from error
        if said is None or "error" in said:
            why = said["error"] if said else "it ended"
            raise ProvisionError(f"the nodes' network: {why}", hint="GPUCLOUD_LOCAL_TIER=b needs no namespaces")
        return said, found


class _Fabric:
    """What the process does."""

    def __init__(self) -> None:
        self._user: int | None = None
        if os.geteuid() != 0:
            namespaces.unshare_user(as_id=0, group_id=0)
            self._user = os.open("/proc/self/ns/user", os.O_RDONLY)
        namespaces.unshare(namespaces.NETWORK)
        self._home = os.open(_OWN_NETWORK, os.O_RDONLY)
        self._netlink = Netlink()
        self._bridges: dict[int, int] = {}
        self._plugged = 0

    def greet(self) -> tuple[dict[str, str], list[int]]:
        """Show that a bridge can be made."""
        self._bridge(0)
        return {}, []

    def plug(self, address: str) -> tuple[dict[str, str], list[int]]:
        """Make a namespace with a link to the bridge, and give it away."""
        self._plugged += 1
        link = f"v{self._plugged}"
        bridge = self._bridge(0)
        namespaces.unshare(namespaces.NETWORK)
        try:
            network = os.open(_OWN_NETWORK, os.O_RDONLY)
            self._netlink.add_pair(link, "eth0", network, bridge)
            metadata = _own_network(address)
        finally:
            namespaces.enter(self._home, namespaces.NETWORK)
        user = [os.dup(self._user)] if self._user is not None else []
        return {"link": link}, [metadata, network, *user]

    def set(self, link: str, *, up: bool, segment: int) -> tuple[dict[str, str], list[int]]:
        """Set a link's level."""
        index = socket.if_nametoindex(link)
        self._netlink.set_master(index, self._bridge(segment))
        self._netlink.set_up(index, up=up)
        return {}, []

    def unplug(self, link: str) -> tuple[dict[str, str], list[int]]:
        """Remove a link."""
        names = {name: index for index, name in socket.if_nameindex()}
        if link in names:
            self._netlink.delete(names[link])
        return {}, []

    def _bridge(self, segment: int) -> int:
        if segment not in self._bridges:
            self._netlink.add_bridge(f"br{segment}")
            self._bridges[segment] = socket.if_nametoindex(f"br{segment}")
        return self._bridges[segment]


def _own_network(address: str) -> int:
    """Set up the namespace that this process is in now; return a socket that listens where EC2 has its metadata."""
    netlink = Netlink()
    try:
        loopback, link = socket.if_nametoindex("lo"), socket.if_nametoindex("eth0")
        netlink.set_up(loopback, up=True)
        netlink.add_address(loopback, METADATA_ADDRESS, 32)
        netlink.add_address(link, address, _PREFIX)
        netlink.set_up(link, up=True)
    finally:
        netlink.close()
    return socket.create_server((METADATA_ADDRESS, 80), backlog=64).detach()


def _receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a message and the descriptors that came with it; None when the other end is closed."""
    data, extra, _, _ = end.recvmsg(1 << 16, socket.CMSG_SPACE(8 * array.array("i").itemsize))
    found = array.array("i")
    for level, kind, value in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(value[: len(value) - len(value) % found.itemsize])
    for descriptor in found:
        os.set_inheritable(descriptor, False)  # noqa: FBT003  (positional in the standard library)
    return (json.loads(data) if data else None), list(found)


def _serve(end: socket.socket) -> None:
    fabric: _Fabric | None = None
    while True:
        order, _ = _receive(end)
        if order is None:
            return
        try:
            fabric = fabric or _Fabric()
            said, found = getattr(fabric, order.pop("do"))(**order)
        except OSError as error:
            said, found = {"error": f"{error.strerror or error}"}, []
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", found))] if found else []
        end.sendmsg([json.dumps(said).encode()], rights)
        for descriptor in found:
            os.close(descriptor)


if __name__ == "__main__":
    os.chdir(Path("/"))
    with socket.socket(fileno=int(sys.argv[1])) as told:
        _serve(told)
