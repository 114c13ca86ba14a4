"""A port at which ranks can meet: none that the kernel gives to whoever connects somewhere meanwhile."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(12_000, 32_000)  # Linux gives 32768 and more (ip_local_port_range)


def free_port() -> int:
    """Return a port of this machine at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
