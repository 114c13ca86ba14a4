"""Which network interface carries an address of this node."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator

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
