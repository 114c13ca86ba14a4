"""The network between nodes with namespaces of their own: a process in namespaces of its own that holds a bridge.

    python -m tests.emulation.switch FD

It is told what to do on the Unix socket `FD` and ends when that is closed. Nothing of it is seen outside: the bridge
and every link are in its network namespace, and go with it.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.domain.errors import ProvisionError
from tests.emulation import namespaces, program

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

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The namespaces, as the node's process inherits them."""
        return (self.network,) if self.user is None else (self.network, self.user)


class Switch:
    """The switch's process as the daemon holds it. Every call raises ProvisionError when it cannot be done."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_LIMIT_S)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                (*program("tests.emulation.switch"), str(theirs.fileno())),
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
            raise ProvisionError(f"the nodes' network: {why}")
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
        os.set_inheritable(descriptor, False)
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


# The kernel's network interfaces, made and changed by rtnetlink(7): no program such as `ip` is needed.


_NEW_LINK, _DELETE_LINK, _NEW_ADDRESS = 16, 17, 20  # linux/rtnetlink.h
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400  # linux/netlink.h
_ERROR = 2
_NAME, _MASTER, _LINK_INFO, _NAMESPACE_FD = 3, 10, 18, 28  # linux/if_link.h: IFLA_…
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UP = 0x1
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")


class Netlink:
    """The interfaces of the network namespace that the process was in when this was made. Raises OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        """Close the socket, which would keep the namespace."""
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """Make a bridge and set it up."""
        info = _attribute(_LINK_INFO, _attribute(_INFO_KIND, b"bridge"))
        self._ask(_NEW_LINK, _link(flags=_UP) + _text(_NAME, name) + info, _CREATE | _EXCLUSIVE)

    def add_pair(self, name: str, peer: str, peer_namespace: int, master: int) -> None:
        """Make a pair of joined interfaces: `name` here, up and on the bridge `master`; `peer` in that namespace."""
        other = _link() + _text(_NAME, peer) + _number(_NAMESPACE_FD, peer_namespace)
        info = _attribute(_INFO_KIND, b"veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, other))
        link = _link(flags=_UP) + _text(_NAME, name) + _number(_MASTER, master) + _attribute(_LINK_INFO, info)
        self._ask(_NEW_LINK, link, _CREATE | _EXCLUSIVE)

    def set_up(self, index: int, *, up: bool) -> None:
        """Set an interface up or down."""
        self._ask(_NEW_LINK, _link(index=index, flags=_UP if up else 0))

    def set_master(self, index: int, master: int) -> None:
        """Put an interface on a bridge; it leaves the one that it was on."""
        self._ask(_NEW_LINK, _link(index=index, change=0) + _number(_MASTER, master))

    def delete(self, index: int) -> None:
        """Remove an interface, its other end with it; one that is gone is no error."""
        try:
            self._ask(_DELETE_LINK, _link(index=index))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Give an interface an IPv4 address."""
        packed = socket.inet_aton(address)
        message = _ADDRESS.pack(socket.AF_INET, prefix, 0, 0, index)
        message += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
        self._ask(_NEW_ADDRESS, message, _CREATE | _EXCLUSIVE)

    def _ask(self, kind: int, body: bytes, flags: int = 0) -> None:
        self._sequence += 1
        size = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(size, kind, _REQUEST | _ACK | flags, self._sequence, 0) + body)
        while True:
            answer = self._socket.recv(1 << 16)
            _, answered, _, sequence, _ = _HEADER.unpack_from(answer)
            if answered == _ERROR and sequence == self._sequence:
                break
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if code:
            raise OSError(-code, os.strerror(-code))


def _link(*, index: int = 0, flags: int = 0, change: int = _UP) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, index, flags, change)


def _attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + bytes(-size % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


if __name__ == "__main__":
    os.chdir(Path("/"))
    with socket.socket(fileno=int(sys.argv[1])) as told:
        _serve(told)
