"""Knocks at another machine's SSH: the second witness of a machine that the supervisor does not reach."""

from __future__ import annotations

import errno
import socket
import time

from gpucloud.domain.witness import Word

_OWN_FAULTS = (
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.EPERM,
    errno.EACCES,
)


def knock(address: str, port: int, *, limit_s: float) -> Word:
    """Return ALIVE when an SSH server greets within `limit_s`, DEAD when none does, NOTHING for a fault of our own.

    A frozen machine still accepts connections, in its kernel; it does not greet (RFC 4253, 4.2: the server sends its
    version, perhaps after other lines).
    """
    deadline = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as connection:
            return _greeted(connection, deadline)
    except socket.gaierror:
        return Word.NOTHING
    except OSError as error:
        return Word.NOTHING if error.errno in _OWN_FAULTS else Word.DEAD


def _greeted(connection: socket.socket, deadline: float) -> Word:
    said = b""
    while b"SSH-" not in said and len(said) < 8192:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(1024)
        if not more:
            return Word.DEAD
        said += more
    return Word.ALIVE if b"SSH-" in said else Word.DEAD
