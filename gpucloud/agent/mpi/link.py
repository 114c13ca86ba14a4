"""Signed messages between two nodes of an attempt."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
from typing import Any

_LONGEST = 1 << 20
Message = dict[str, Any]


class LinkLost(Exception):
    """The other side is gone, or is not who it should be."""


class Link:
    """One line of JSON a message, each with a MAC over its place in the order: none is made up, repeated or left out.

    The two sides prove to each other that they know the attempt's secret before anything else is said. What is said
    is not hidden: there is no secret in it.
    """

    def __init__(self, connection: socket.socket, secret: str, *, leads: bool) -> None:
        self.connection = connection
        self._lines = connection.makefile("rb")
        self._sent = self._received = 0
        self._lock = threading.Lock()
        # Nonces of both sides go into the key, so that messages of another connection are worth nothing here.
        mine = secrets.token_hex(16)
        self._write(mine.encode())
        theirs = self._read().decode("ascii", errors="replace")
        both = f"{mine} {theirs}" if leads else f"{theirs} {mine}"
        self._key = hmac.new(secret.encode(), both.encode(), hashlib.sha256).digest()
        self._ours, self._other = (b"head", b"member") if leads else (b"member", b"head")
        self.send({"hello": 1})
        self.receive()

    def send(self, message: Message) -> None:
        """Send one message; any thread may. Raises LinkLost."""
        text = json.dumps(message).encode()
        with self._lock:
            self._write(self._mac(self._ours, self._sent, text).encode() + b" " + text)
            self._sent += 1

    def receive(self) -> Message:
        """Return the next message. Raises LinkLost."""
        mac, _, text = self._read().partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, text).encode()):
            raise LinkLost("a message that is not signed with the attempt's secret")
        self._received += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise LinkLost("a message that is none")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self.connection.close()

    def _mac(self, side: bytes, number: int, text: bytes) -> str:
        return hmac.new(self._key, b"%s %d " % (side, number) + text, hashlib.sha256).hexdigest()

    def _write(self, line: bytes) -> None:
        try:
            self.connection.sendall(line + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def _read(self) -> bytes:
        try:
            line = self._lines.readline(_LONGEST)
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not line.endswith(b"\n"):
            raise LinkLost("the connection was closed")
        return line[:-1]
