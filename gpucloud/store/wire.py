"""HTTP for large bodies: memory is sent and filled where it lies, over connections that are kept."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from gpucloud.domain.checkpoint.objects import Part, bytes_in
from gpucloud.store.threads import Pace

FAILURES = (OSError, http.client.HTTPException)
"""What an exchange raises when it broke off: nobody knows whether the server did what it was asked."""

_CONNECT_S, _SILENT_S = 5.0, 60.0
_SLICE_BYTES = 1 << 20  # sent at once: a socket's time limit is for the whole of what it is given
_SAID_BYTES = 1 << 16  # of a refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: `filled` bytes in the memory that was given, or (None) a body of another length, its start."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes = b""
    filled: int | None = None


class Wire:
    """Connections to servers, for as many threads as use them. `authorities` is a file of CA certificates.

    A connection is for the process that opened it: a forked child opens its own.
    """

    def __init__(self, *, authorities: str | None, pace: Pace) -> None:
        self._tls = ssl.create_default_context(cafile=authorities)
        self._pace = pace
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def put(self, url: str, headers: Mapping[str, str], part: Part) -> Reply:
        """Send the part as the body of a PUT. Raises FAILURES."""
        parts = urlsplit(url)
        sent = {**headers, "Content-Length": str(bytes_in(part))}
        connection = self._connection(parts)
        done = False
        try:
            whole = self._send(connection, parts, sent, part)
            answer = connection.getresponse()
            reply = Reply(status=answer.status, headers=answer.headers, body=answer.read(_SAID_BYTES))
            done = whole and answer.isclosed() and not answer.will_close
            return reply
        finally:
            self._done_with(parts, connection, keep=done)

    def get(self, url: str, headers: Mapping[str, str], into: memoryview) -> Reply:
        """Fill the memory with the body of the answer to a GET, if it fits exactly and is no refusal.

        Raises FAILURES. `filled` is less than promised by `Content-Length` when the connection was cut.
        """
        parts = urlsplit(url)
        connection = self._connection(parts)
        done = False
        try:
            _begin(connection, "GET", parts, headers)
            connection.endheaders()
            answer = connection.getresponse()
            fits = answer.status in (200, 206) and answer.length == into.nbytes
            filled = _fill(answer, into) if fits else None
            body = answer.read(_SAID_BYTES) if not fits else b""
            done = answer.isclosed() and not answer.will_close
            return Reply(status=answer.status, headers=answer.headers, body=body, filled=filled)
        finally:
            self._done_with(parts, connection, keep=done)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, parts: SplitResult, headers: Mapping[str, str], part: Part
    ) -> bool:
        """Return whether all was sent; a server that refuses may say so and close before it has read the body."""
        _begin(connection, "PUT", parts, headers)
        try:
            connection.endheaders()
            for view in part:
                for at in range(0, len(view), _SLICE_BYTES):
                    piece = view[at : at + _SLICE_BYTES]
                    self._pace.wait_for(len(piece))
                    connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _connection(self, parts: SplitResult) -> http.client.HTTPConnection:
        place = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            if self._pid != os.getpid():
                self._idle, self._pid = [], os.getpid()
            kept = next((one for one in self._idle if one[0] == place), None)
            if kept is not None:
                self._idle.remove(kept)
        if kept is not None and not _closed_by_peer(kept[1]):
            return kept[1]
        if kept is not None:
            kept[1].close()
        made = (
            http.client.HTTPSConnection(parts.netloc, timeout=_CONNECT_S, context=self._tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.netloc, timeout=_CONNECT_S)
        )
        made.connect()
        made.sock.settimeout(_SILENT_S)
        return made

    def _done_with(self, parts: SplitResult, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        if not keep:
            connection.close()
            return
        with self._lock:
            self._idle.append((f"{parts.scheme}://{parts.netloc}", connection))


def behind_a_proxy(url: str) -> bool:
    """Whether the environment names a proxy for this URL."""
    parts = urlsplit(url)
    if parts.scheme not in urllib.request.getproxies():
        return False
    return not urllib.request.proxy_bypass(parts.hostname or "")


def _begin(connection: http.client.HTTPConnection, method: str, parts: SplitResult, headers: Mapping[str, str]) -> None:
    connection.putrequest(method, f"{parts.path}?{parts.query}", skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)


def _fill(answer: http.client.HTTPResponse, into: memoryview) -> int:
    filled = 0
    while filled < len(into):
        count = answer.readinto(into[filled:])
        if count == 0:
            break
        filled += count
    return filled


def _closed_by_peer(connection: http.client.HTTPConnection) -> bool:
    """An idle connection has nothing to say but that it ends."""
    if connection.sock is None:
        return True
    with contextlib.suppress(OSError, ValueError):
        waiting = select.poll()
        waiting.register(connection.sock, select.POLLIN)
        return bool(waiting.poll(0))
    return True
