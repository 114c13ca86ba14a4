"""A way to a server that can be shut: new connections are refused, those that stand break off."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Gate:
    """Leads a port of its own to another one on this machine while it is open. Use as a context; open at first."""

    def __init__(self, port: int) -> None:
        self._beyond = ("127.0.0.1", port)
        self._listening: socket.socket | None = None
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self.port = 0

    @property
    def url(self) -> str:
        """Where the way begins."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Gate:
        """Open it."""
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Shut it."""
        self.shut()

    def open(self) -> None:
        """Let connections through, on the same port as before."""
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port, self._listening = listening.getsockname()[1], listening
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections and break those that stand."""
        with self._lock:
            ends, self._pairs = [*self._pairs, *filter(None, [self._listening])], []
        self._listening = None
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                near = listening.accept()[0]
            except OSError:
                return  # shut
            far = socket.create_connection(self._beyond)
            with self._lock:
                self._pairs += [near, far]
            for here, there in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(here, there), daemon=True).start()


def _carry(here: socket.socket, there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := here.recv(65536):
            there.sendall(data)
    for end in (here, there):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
