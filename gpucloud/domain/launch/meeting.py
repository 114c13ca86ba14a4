"""The TCP port at which the members of an attempt meet: the same on every node, and free on all of them."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Below what Linux and macOS hand out to outgoing connections (32768 and 49152 on), above most services.
_DRAWN_FROM = range(10_000, 32_000)
_DRAWN = 12
_ANSWER = re.compile(r"([0-9]{1,5}) ([0-9]{1,5})((?: [0-9]{1,5})*)", re.ASCII)

LOOK = """import socket, sys
try:
    low, high = open("/proc/sys/net/ipv4/ip_local_port_range").read().split()
except OSError:
    low, high = 49152, 65535
free = []
for port in sys.argv[1:]:
    with socket.socket() as one:
        try:
            one.bind(("", int(port)))
            free.append(port)
        except OSError:
            pass
print(low, high, *free)"""
"""Python that says of the ports in its words which are free, behind the range of those of outgoing connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePorts:
    """What a node says: which ports are `free` of those that it was asked for, and which it gives to connections."""

    free: tuple[int, ...]
    ephemeral: range


def candidates(purpose: str) -> tuple[int, ...]:
    """Return ports to ask for; the same for the same purpose, which names the job and the attempt."""
    drawn = random.Random(hashlib.sha256(purpose.encode()).digest())  # noqa: S311  nothing is secret in a port
    return tuple(drawn.sample(_DRAWN_FROM, _DRAWN))


def parse_free(said: str, asked: Sequence[int]) -> FreePorts | None:
    """Return what a node says when it is asked by LOOK; None for anything that is no such answer."""
    match = _ANSWER.fullmatch(said.strip())
    if match is None:
        return None
    free = tuple(int(word) for word in match[3].split())
    return FreePorts(free=free, ephemeral=range(int(match[1]), int(match[2]) + 1)) if set(free) <= set(asked) else None


def common_port(nodes: Sequence[FreePorts]) -> int | None:
    """Return the port to meet at, the first node being the one that listens; None where that has none.

    One that is free on all and that no outgoing connection can take before the launcher does; else as near as can be.
    """
    first, *_ = nodes
    everywhere = [port for port in first.free if all(port in node.free for node in nodes)]
    lasting = [port for port in everywhere if not any(port in node.ephemeral for node in nodes)]
    return next(iter(lasting or everywhere or first.free), None)
