"""torchrun with a store that the network does not reach; its arguments are torchrun's.

Torch's own store, where ranks tell each other their addresses, listens on every interface of the machine and knows no
password: whoever connects may read and write. On AWS the cluster's security group stands before it. The embedded
fleet's nodes are addresses of the loopback network, and there it listens on the node's address alone, so that nobody
outside of this machine gets to it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from ipaddress import AddressValueError, IPv4Address
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous


def main() -> None:
    """Run torchrun, which makes its store in one place."""
    static_tcp_rendezvous.TCPStore = store  # type: ignore[assignment, attr-defined]
    torchrun.main()


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


if __name__ == "__main__":
    main()
