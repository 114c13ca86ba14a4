"""Which network interface carries an address of this node, and whether another machine's SSH answers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Iterator

from gpucloud.domain.supervision.seen import PeerReport

_GET_ADDRESS, _GET_NETMASK = 0x8915, 0x891B  # Linux: SIOCGIFADDR, SIOCGIFNETMASK


def carrying(address: str) -> str | None:
    """Return the interface's name; None where none is found, and for all but loopback where this is not Linux."""
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    if not sys.platform.startswith("linux"):
        return "lo0" if wanted.is_loopback else None
    return choose(wanted, interfaces())


def choose(wanted: ipaddress.IPv4Address, interfaces: tuple[tuple[str, ipaddress.IPv4Interface], ...]) -> str | None:
    """Return the interface that has the address, else the one whose network is the narrowest that holds it."""
    holding = [(name, interface) for name, interface in interfaces if wanted in interface.network]
    if not holding:
        return None
    return max(holding, key=lambda pair: (pair[1].ip == wanted, pair[1].network.prefixlen))[0]


def interfaces() -> tuple[tuple[str, ipaddress.IPv4Interface], ...]:
    """Return the name of every interface with its IPv4 address and network; empty where this is not Linux."""
    return tuple(_each()) if sys.platform.startswith("linux") else ()


def _each() -> Iterator[tuple[str, ipaddress.IPv4Interface]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                address, netmask = (_ask(asker, question, name) for question in (_GET_ADDRESS, _GET_NETMASK))
                yield name, ipaddress.IPv4Interface(f"{address}/{netmask}")


def _ask(asker: socket.socket, question: int, name: str) -> str:
    answer = fcntl.ioctl(asker.fileno(), question, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


# Knocks at another machine's SSH: the second witness of a machine that the supervisor does not reach.


_OWN_FAULTS = (
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.EPERM,
    errno.EACCES,
)


def knock(address: str, port: int, *, limit_s: float) -> PeerReport:
    """Return ALIVE when an SSH server greets within `limit_s`, DEAD when none does, NOTHING for a fault of our own.

    A frozen machine still accepts connections, in its kernel; it does not greet (RFC 4253, 4.2: the server sends its
    version, perhaps after other lines).
    """
    deadline = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as connection:
            return _greeted(connection, deadline)
    except socket.gaierror:
        return PeerReport.NOTHING
    except OSError as error:
        return PeerReport.NOTHING if error.errno in _OWN_FAULTS else PeerReport.DEAD


def _greeted(connection: socket.socket, deadline: float) -> PeerReport:
    said = b""
    while b"SSH-" not in said and len(said) < 8192:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(1024)
        if not more:
            return PeerReport.DEAD
        said += more
    return PeerReport.ALIVE if b"SSH-" in said else PeerReport.DEAD
