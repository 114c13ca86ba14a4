"""One stream of two ends: a channel of an SSH connection and a TCP connection, joined."""

from __future__ import annotations

import contextlib
import socket
import threading

import paramiko

_CHUNK_BYTES = 1 << 16
_LOST = (paramiko.SSHException, OSError, EOFError)


def join(channel: paramiko.Channel, connection: socket.socket) -> None:
    """Move bytes both ways until both ends have said that no more come, or one is lost; then close both."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_move_back, args=(channel, connection), daemon=True)
    back.start()
    try:
        while chunk := channel.recv(_CHUNK_BYTES):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        back.join()
    except _LOST:
        with contextlib.suppress(OSError):  # wakes whoever reads it
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        with contextlib.suppress(*_LOST):
            channel.close()
        connection.close()


def _move_back(channel: paramiko.Channel, connection: socket.socket) -> None:
    try:
        while chunk := connection.recv(_CHUNK_BYTES):
            channel.sendall(chunk)
        channel.shutdown_write()
    except _LOST:
        with contextlib.suppress(*_LOST):
            channel.close()
