"""A TCP line to an SSH server that can be cut, and that knows what of it was sent after the key exchange."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_NEWKEYS = 21  # RFC 4253, 7.3: the last message in clear


class Conversation:
    """What the client sent on one connection; `secret` counts the bytes after its NEWKEYS: only those can tell."""

    def __init__(self) -> None:
        self.clear = bytearray()
        self.secret = 0
        self._parsed = -1  # -1: the banner is awaited
        self._over = False

    def sent(self, data: bytes) -> None:
        """Take what was sent."""
        if self._over:
            self.secret += len(data)
            return
        self.clear += data
        while not self._over and self._one():
            pass
        if self._over:
            self.secret += len(self.clear) - self._parsed

    def _one(self) -> bool:
        """Pass over the banner or one packet in clear; whether there was one."""
        if self._parsed < 0:
            end = self.clear.find(b"\n")
            self._parsed = end + 1 if end >= 0 else -1
            return end >= 0
        head = bytes(self.clear[self._parsed : self._parsed + 6])
        if len(head) < 6 or len(self.clear) < self._parsed + 4 + int.from_bytes(head[:4], "big"):
            return False
        self._parsed += 4 + int.from_bytes(head[:4], "big")
        self._over = head[5] == _NEWKEYS
        return True


class Line:
    """Listens on loopback at `port` and leads to `target`, another port there."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.conversations: list[Conversation] = []
        self._sockets: list[socket.socket] = []
        self._left: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def secret(self) -> int:
        """The bytes that any client sent after a key exchange."""
        return sum(one.secret for one in self.conversations)

    def cut_after(self, size: int) -> None:
        """Cut once the server has answered that many more bytes."""
        self._left = size

    def cut(self) -> int:
        """End every connection at once, as a network does; return how many there were."""
        cut, self._sockets = self._sockets, []
        for one in cut:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        return len(cut) // 2

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            conversation = Conversation()
            self.conversations.append(conversation)
            self._sockets += [client, server]
            threading.Thread(target=_pass_on, args=(client, server, conversation.sent), daemon=True).start()
            threading.Thread(target=_pass_on, args=(server, client, self._answered), daemon=True).start()

    def _answered(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self._left = None
                self.cut()


@contextlib.contextmanager
def line_to(target: int) -> Iterator[Line]:
    """Give a line to that port of this machine."""
    line = Line(target)
    try:
        yield line
    finally:
        line.close()


def _pass_on(source: socket.socket, sink: socket.socket, heard: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            heard(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
