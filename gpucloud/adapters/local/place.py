"""Where an embedded node is: its address, its socket, the account that it runs as, and where it finds this package."""

from __future__ import annotations

import os
import pwd
import socket
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

import gpucloud


def interface() -> str:
    """Return the name of the loopback interface, which carries the traffic between nodes."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def listen(addresses: Collection[str], ports: Collection[int]) -> socket.socket:
    """Return a socket that listens on an address and a port that no live node has.

    On Linux each node has an address of its own (all of 127.0.0.0/8 binds there); elsewhere they share 127.0.0.1.
    """
    free = (f"127.0.{k // 200}.{10 + k % 200}" for k in range(5000))
    address = next(candidate for candidate in free if candidate not in addresses)
    while True:
        try:
            listener = socket.create_server((address, 0), backlog=256)
        except OSError:
            if address == "127.0.0.1":
                raise
            address = "127.0.0.1"
            continue
        if listener.getsockname()[1] not in ports:
            return listener
        listener.close()


# The account that nodes run as.


def user_name() -> str:
    """Return the name of the account that nodes run as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run as numbers without a name
        return str(os.getuid())


def import_path() -> dict[str, str]:
    """Return PYTHONPATH where this package is not installed, else nothing."""
    parent = Path(gpucloud.__file__).resolve().parent.parent
    installed = {Path(sysconfig.get_path(scheme)).resolve() for scheme in ("purelib", "platlib")}
    return {} if parent in installed else {"PYTHONPATH": str(parent)}
