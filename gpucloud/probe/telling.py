"""How workers speak: one JSON object a line, and torch's store for ranks, out of the network's reach where need be."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from ipaddress import AddressValueError, IPv4Address
from typing import Any

from torch._C._distributed_c10d import TCPStore

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.gate.report import Said


def tell(said: Said) -> None:
    """Write one line."""
    sys.stdout.write(to_json(said) + "\n")
    sys.stdout.flush()


def reason(error: Exception) -> str:
    """Return the first line of what torch said: the rest is its stack."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


# Torch's store, where ranks tell each other their addresses, out of the network's reach where nothing else guards it.
#
# Torch's own listens on every interface of the machine and knows no password: whoever connects may read and write. On
# AWS
# the cluster's security group stands before it. The embedded fleet's nodes are addresses of the loopback network, and
# there it listens on the node's address alone, so that nobody outside of this machine gets to it.


def store(host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: Any) -> TCPStore:  # noqa: FBT001  torch's own signature
    """Return the store, or a client of it; one on a loopback address accepts connections to that address alone.

    Raises RuntimeError, as torch does.
    """
    if is_master and _is_loopback(host):
        try:
            options["master_listen_fd"] = socket.create_server((host, port)).detach()
        except OSError as error:
            raise RuntimeError(f"the ranks cannot meet at {host}:{port}: {error}") from error
    return TCPStore(host, port, world_size, is_master, timeout, **options)


def _is_loopback(host: str) -> bool:
    try:
        return IPv4Address(host).is_loopback
    except AddressValueError:
        return False
