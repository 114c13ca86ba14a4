"""A port at which ranks can meet: none that the kernel gives to whoever connects meanwhile, or that a job draws."""

from __future__ import annotations

import random
import socket

_BELOW_DRAWN = range(4_000, 10_000)  # Linux gives 32768 and more (ip_local_port_range), jobs draw from 10,000 on


def free_port() -> int:
    """Return a port of this machine at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_BELOW_DRAWN)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
