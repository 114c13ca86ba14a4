"""The kernel's network interfaces, made and changed by rtnetlink(7): no program such as `ip` is needed."""

from __future__ import annotations

import errno
import os
import socket
import struct

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
