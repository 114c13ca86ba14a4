"""paramiko's transport with the bounds that it lacks: what a server sends costs its client a known amount of memory.

paramiko allocates what a packet's first four bytes announce, before a key was compared; collects a first line without
an end; and keeps what a server sends beyond the window that it was granted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko.common import (
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_EXT_INFO,
    cMSG_CHANNEL_REQUEST,
)
from paramiko.packet import Packetizer

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS
from gpucloud.domain.quantities import format_size

PACKET_BYTES = 256 << 10
"""Of one packet, as OpenSSH (PACKET_MAX_SIZE); we ask for 32 KiB, and RFC 4253 (6.1) for 35000 bytes at least."""

GREETING_BYTES = 64 << 10
"""Of all lines before the first packet: 100 of them are read, and one of OpenSSH's has 255 bytes at most."""

_EXTENSIONS = 64
"""In one list of a server's (RFC 8308): some five exist."""

_DATA = (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA)


class BoundedTransport(paramiko.Transport):
    """A client's transport; ends, with SSHException, where the server sends more than it may, or what is no SSH."""

    _handler_table: dict[int, Any]
    _channel_handler_table: dict[int, Any]

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, packetizer_class=_BoundedPacketizer)
        self._handler_table = {**self._handler_table, MSG_EXT_INFO: self._take_extensions}
        feeds = {kind: _within_the_window(self._channel_handler_table[kind]) for kind in _DATA}
        self._channel_handler_table = {**self._channel_handler_table, **feeds}

    def get_exception(self) -> Exception | None:
        """Return what ended the transport, and forget it; what the library does not foresee is an SSHException, too."""
        error = super().get_exception()
        if error is None or isinstance(error, LIBRARY_ERRORS):
            return error
        return paramiko.SSHException(f"what the node says is not SSH: {type(error).__name__}")

    def send_signal(self, channel: paramiko.Channel, name: str) -> None:
        """Send a signal to a channel's command (RFC 4254, 6.9); the library knows no such request."""
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(channel.remote_chanid)
        message.add_string("signal")
        message.add_byte(b"\0")  # a reply is not wanted
        message.add_string(name)
        self._send_user_message(message)  # type: ignore[attr-defined]

    def _take_extensions(self, message: paramiko.Message) -> None:
        """The library counts to any number that it is told."""
        if message.get_int() > _EXTENSIONS:
            raise paramiko.SSHException(f"the node lists more than {_EXTENSIONS} extensions of SSH")
        message.rewind()
        self._parse_ext_info(message)  # type: ignore[attr-defined]


class _BoundedPacketizer(Packetizer):
    """Reads packets and first lines of bounded size."""

    _greeted = 0

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:  # noqa: FBT001, FBT002 - the library's own
        if n > PACKET_BYTES:
            most = format_size(PACKET_BYTES)
            raise paramiko.SSHException(f"the node announced a packet of {format_size(n)}, and {most} is the most")
        return super().read_all(n, check_rekey)

    def _read_timeout(self, timeout: float) -> bytes:
        """Return some bytes of the lines before the first packet."""
        found: bytes = super()._read_timeout(timeout)  # type: ignore[misc]
        self._greeted += len(found)
        if self._greeted > GREETING_BYTES:
            raise paramiko.SSHException(f": more than {format_size(GREETING_BYTES)} of it")
        return found


def _within_the_window(feed: Callable[[paramiko.Channel, Any], None]) -> Callable[[paramiko.Channel, Any], None]:
    """Return `feed`, which keeps data until it is read, for no more than the server was allowed to send."""

    def feed_some(channel: Any, message: Any) -> None:
        feed(channel, message)
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("the node sent more than the channel's window")

    return feed_some
