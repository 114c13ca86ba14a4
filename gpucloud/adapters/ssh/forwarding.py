"""Connections that go on over SSH: from a port of this machine, by way of a node, to what listens there."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import paramiko

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS
from gpucloud.adapters.transfer.streams import join
from gpucloud.domain.errors import UsageError
from gpucloud.ports import PortForward

_BACKLOG = 64


@contextlib.contextmanager
def listening(forward: PortForward, open_channel: Callable[[tuple[str, int]], paramiko.Channel]) -> Iterator[None]:
    """Take connections on a port of this machine, and join each to a channel of its own, until the end.

    One that the node cannot connect is closed, as OpenSSH does it. UsageError for a port that cannot be had.
    """
    family = socket.AF_INET6 if ":" in forward.bind else socket.AF_INET
    try:
        listener = socket.create_server((forward.bind, forward.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on {forward.bind}:{forward.port}: {getattr(error, 'strerror', None) or error}",
            hint=_on_another_port(forward),
        ) from error
    there = (forward.host, forward.host_port)
    with listener:
        threading.Thread(target=_accept, args=(listener, lambda: open_channel(there)), daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a thread that waits in `accept` is not woken by a close
                listener.shutdown(socket.SHUT_RDWR)


def _on_another_port(forward: PortForward) -> str:
    port = forward.port + 1 if 1024 <= forward.port < 65535 else 10_000 + forward.port % 1024
    bind, host = (f"[{name}]" if ":" in name else name for name in (forward.bind, forward.host))
    before = "" if bind == "127.0.0.1" else f"{bind}:"
    return f"another port of this machine: -L {before}{port}:{host}:{forward.host_port}"


def _accept(listener: socket.socket, open_channel: Callable[[], paramiko.Channel]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_carry, args=(connection, open_channel), daemon=True).start()


def _carry(connection: socket.socket, open_channel: Callable[[], paramiko.Channel]) -> None:
    with connection, contextlib.suppress(*LIBRARY_ERRORS):
        join(open_channel(), connection)
