"""What carries a connection to a node: TCP, or the input and output of a program that leads there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from typing import IO

from gpucloud.domain.errors import ToolMissing
from gpucloud.domain.node import Node

_FAREWELL_S = 0.1
_MERCY_S = 1.0
_SAID_BYTES = 2000


class HeardSocket(socket.socket):
    """A socket that counts the bytes it received."""

    heard = 0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive, and count."""
        data = super().recv(bufsize, flags)
        self.heard += len(data)
        return data

    def fault(self) -> str | None:
        """Return why the line itself ended, None when nothing is known of that."""
        return None


def open_line(node: Node, limit_s: float) -> HeardSocket:
    """Return a line to the node's SSH server. Raises OSError; ToolMissing without the program of `node.proxy`."""
    if node.proxy:
        return _ProgramSocket.started(node.proxy)
    opened = socket.create_connection((node.address, node.port), timeout=limit_s)
    line = HeardSocket(fileno=opened.detach())
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Nagle's delay is 40 ms a command
    return line


class _ProgramSocket(HeardSocket):
    """Our end of a program's input and output; the program ends with it."""

    _program: _Program

    @classmethod
    def started(cls, argv: tuple[str, ...]) -> _ProgramSocket:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = _Program(argv, theirs)
            line = cls(fileno=ours.detach())
        line._program = program
        return line

    def fault(self) -> str | None:
        """Close the line, and return how the program had ended by itself."""
        self.close()
        return self._program.fault

    def close(self) -> None:
        """Close the line, and end the program with all that it started."""
        super().close()
        self._program.end()


class _Program:
    """A program that leads to a node; `fault` is how it ended, None when it was ended by us."""

    def __init__(self, argv: tuple[str, ...], stream: socket.socket) -> None:
        self.fault: str | None = None
        self._argv = argv
        self._ending = threading.Lock()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the program runs
        try:
            # A session of its own: Ctrl-C at our terminal is for the command over there.
            self._process = subprocess.Popen(
                argv, stdin=stream.fileno(), stdout=stream.fileno(), stderr=self._said, start_new_session=True
            )
        except OSError as error:
            self._said.close()
            raise ToolMissing(
                f"cannot run {argv[0]}, which leads to the node: {error.strerror}", hint=f"install {argv[0]}"
            ) from error

    def end(self) -> None:
        """End it, unless it does so by itself, its line being closed."""
        with self._ending:
            if self._said.closed:
                return
            if self._ends_within(_FAREWELL_S):
                self.fault = f"{self._argv[0]} ended with exit code {self._process.returncode}: {self._last_words()}"
            self._said.close()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
                    os.killpg(self._process.pid, number)
                if self._ends_within(_MERCY_S):
                    return

    def _ends_within(self, limit_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.returncode is not None

    def _last_words(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _SAID_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
