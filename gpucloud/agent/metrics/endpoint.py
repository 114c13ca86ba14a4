"""A tiny HTTP server for Prometheus, on this machine's loopback and nowhere else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from gpucloud.agent.metrics.exposition import CONTENT_TYPE

PORT = 9401  # DCGM's own exporter has 9400
_ADDRESS = "127.0.0.1"
_PATIENCE_S = 2.0


class Endpoint:
    """Answers `GET /metrics`; anything else is 404. `port` is where, 0 when it could not listen."""

    def __init__(self, text: Callable[[], str], *, port: int = PORT) -> None:
        """Listen on `port`, or on any free one when it is taken: several nodes may share one machine."""
        self._text = text
        self._listener = _listener(port)
        self.port: int = self._listener.getsockname()[1] if self._listener else 0

    def start(self) -> None:
        """Answer from a thread of its own."""
        if self._listener is not None:
            threading.Thread(target=self._serve, args=(self._listener,), name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # stopped
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            words = stream.readline(4096).split()
            while stream.readline(8192).strip():
                pass  # its headers: nothing of them matters
        known = words[:1] == [b"GET"] and len(words) > 1 and words[1].partition(b"?")[0] == b"/metrics"
        body = (self._text() if known else "gpucloud: /metrics\n").encode()
        status = "200 OK" if known else "404 Not Found"
        head = f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


def fetch(port: int) -> str:
    """Return the text of the endpoint on this machine. Raises OSError."""
    with socket.create_connection((_ADDRESS, port), timeout=_PATIENCE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as stream:
            answer = stream.read()
    return answer.partition(b"\r\n\r\n")[2].decode()


def _listener(port: int) -> socket.socket | None:
    for wanted in (port, 0):
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_ADDRESS, wanted))
            listener.listen(8)
        except OSError:
            listener.close()
        else:
            return listener
    return None
