"""A TCP line on loopback through which only so many bytes a second go towards the server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK_BYTES = 1 << 16


class _Pace:
    """What all connections share: a byte may go on when those before it have had their time."""

    def __init__(self, bytes_per_s: float) -> None:
        self._each_s = 1 / bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """Return when so many bytes more have had their time."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count * self._each_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


@contextmanager
def narrow_line(target: int, bytes_per_s: float) -> Iterator[int]:
    """Give the port of a line to `target`, another port of loopback; answers come back as fast as they can."""
    pace = _Pace(bytes_per_s)
    ends: list[socket.socket] = []

    def carry(source: socket.socket, to: socket.socket, pace: _Pace | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if pace is not None:
                    pace.wait(len(data))
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", target))
                ends.extend((near, far))
                threading.Thread(target=carry, args=(near, far, pace), daemon=True).start()
                threading.Thread(target=carry, args=(far, near, None), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            accepting.join()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
