"""Commands on nodes over SSH, in words that every login shell reads alike; reopened when a connection was lost."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import paramiko

from gpucloud.adapters.ssh.connection import Connection, connect
from gpucloud.adapters.ssh.failures import GONE, LIBRARY_ERRORS, may_pass, node_error, translated
from gpucloud.adapters.ssh.identity import Identity, OneKey
from gpucloud.adapters.ssh.terminal import attach, listening
from gpucloud.adapters.transfer.sync import sync_tree
from gpucloud.domain.errors import HostUnreachable, ShellClosed, UsageError
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.node.node import Node
from gpucloud.domain.untrusted import ANSWER_BYTES
from gpucloud.ports import Completed, PortForward
from gpucloud.system.retries import Retry

HANDSHAKES = 8  # stock sshd drops some of 10 and more (MaxStartups 10:30:100)
_ATTEMPT_S = 10.0
_REOPEN_S = 3.0
_BOOTING = Retry(first_s=0.05, longest_s=1.0)
_CHUNK_BYTES = 1 << 17
_UNNAMED_SIGNAL = 128


class SshShell:
    """Opens hosts with the private key in a file, or with the user's own keys.

    A node that does not listen yet is tried again for `connect_timeout_s`; one that was connected before for 3 s at
    most, and not at all when nobody listens there any more. `python` is the interpreter that nodes run for a code
    sync; `cache` a folder that keeps hashes of local files between runs.
    """

    def __init__(
        self,
        identity: Path | Identity,
        *,
        connect_timeout_s: float = 15.0,
        python: str = "python3",
        cache: Path | None = None,
    ) -> None:
        self.python = python
        self.cache = cache
        self.connect_timeout_s = connect_timeout_s
        self._identity = OneKey(identity) if isinstance(identity, Path) else identity
        self._hosts: dict[str, SshHost] = {}
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(HANDSHAKES)
        self._closed = threading.Event()

    def host(self, node: Node) -> SshHost:
        """Return the node's host, connected. Raises HostUnreachable, HostKeyMismatch."""
        with self._lock:
            host = self._hosts.get(node.id)
            if host is None or not host.reaches(node):
                if host is not None:
                    host.close()
                host = self._hosts[node.id] = SshHost(self, node)
        host.connect()
        return host

    def close(self) -> None:
        """Close every connection; no host can be used after."""
        self._closed.set()
        with self._lock:
            hosts = tuple(self._hosts.values())
        for host in hosts:
            host.close()

    def open(self, node: Node, limit_s: float, *, was_up: bool = False) -> Connection:
        """Return a new connection, trying again while the failure is one of a node that boots."""
        if self._closed.is_set():
            raise ShellClosed("the shell was closed")
        deadline = time.monotonic() + limit_s
        tries = replace(_BOOTING, within_s=limit_s).begin(self._closed.wait)
        while True:
            try:
                with self._handshakes, self._identity.keys() as keys:
                    return connect(node, keys, limit_s=max(0.5, min(_ATTEMPT_S, deadline - time.monotonic())))
            except LIBRARY_ERRORS as error:
                died = was_up and isinstance(error, ConnectionRefusedError)
                if died or not may_pass(error) or not tries.again():
                    raise node_error(error, node) from error
            if self._closed.is_set():
                raise ShellClosed(f"{node.id}: the shell was closed")


class SshHost:
    """One node over SSH; implements `gpucloud.ports.Host`."""

    def __init__(self, shell: SshShell, node: Node) -> None:
        self.node = node
        self._shell = shell
        self._connection: Connection | None = None
        self._left: list[Connection] = []
        self._was_up = False
        self._lock = threading.Lock()

    def reaches(self, node: Node) -> bool:
        """Whether this host is that node, where it is now."""
        return _way(self.node) == _way(node)

    def connect(self, limit_s: float = math.inf) -> Connection:
        """Return the connection; a new one if there is none or it was lost."""
        limit_s = min(limit_s, self._shell.connect_timeout_s, _REOPEN_S if self._was_up else math.inf)
        with self._lock:
            if self._connection is None or not self._connection.alive:
                self._drop()
                self._connection = self._shell.open(self.node, limit_s, was_up=self._was_up)
                self._was_up = True
            return self._connection

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Run argv and return when it ended. A death by signal n is exit code 128 + n, as in a shell.

        A command is never sent twice. Raises HostUnreachable when the connection is lost (a silent node: within 5 s)
        and when the command did not end in `timeout_s`, or answers without end; it is hung up then.
        """
        command = watched(argv)  # a death by signal has a number then: the library drops `exit-signal`
        connection = self.connect(timeout_s)
        with translated(self.node), connection.channel(timeout_s) as channel:
            exchange = _Exchange(connection, channel, stdin)
            completed = exchange.complete(command, timeout_s)
        if completed is None and exchange.is_endless:
            said = f"`{_shown(argv)}` answered more than {format_size(ANSWER_BYTES)}"
            raise HostUnreachable(f"{self.node.id}: {said}; nothing of it is believed", hint=GONE)
        if completed is None:
            raise HostUnreachable(f"{self.node.id}: `{_shown(argv)}` did not end within {timeout_s:g} s", hint=GONE)
        return self._judged(completed, connection)

    def sync(self, root: Path, target: str) -> str:
        """Make `<target>/<sha256 of the manifest>` equal to the tree at `root`; see `sync_tree`."""
        return sync_tree(self, root, target, python=self._shell.python, cache=self._shell.cache)

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:
        """Connect this terminal to a remote shell (or argv) and return its exit code; ports lead there meanwhile.

        Raises UsageError for a port of this machine that cannot be had.
        """
        command = replacing(argv) if argv else None  # a shell of ours in between would die of Ctrl-C too
        connection = self.connect()
        limit_s = self._shell.connect_timeout_s
        with contextlib.ExitStack() as stack:
            for forward in forwards:
                stack.enter_context(listening(forward, connection.open_forward))
            stack.enter_context(translated(self.node))
            channel = stack.enter_context(connection.channel(limit_s))
            exit_code = attach(channel, command, begins_within_s=limit_s, give_up=lambda: connection.give_up(channel))
        return self._judged(Completed(exit_code=exit_code, stdout=b"", stderr=b""), connection).exit_code

    def renew(self) -> None:
        """Have the next call open a new connection; what goes on over the old one ends there."""
        with self._lock:
            if self._connection is not None:
                self._left.append(self._connection)
                self._connection = None

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        with self._lock:
            for connection in self._left:
                connection.close()
            self._left.clear()
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _judged(self, completed: Completed, connection: Connection) -> Completed:
        """The library says -1 for "no exit status came": the shell was killed, or the connection was lost."""
        if completed.exit_code >= 0:
            return completed
        if not connection.answers():
            raise HostUnreachable(
                f"{self.node.id} ({self.node.address}:{self.node.port}): the connection was lost", hint=GONE
            )
        return Completed(exit_code=_UNNAMED_SIGNAL, stdout=completed.stdout, stderr=completed.stderr)


class _Exchange:
    """One command's three streams, moved at the same time so that none can fill up and block another."""

    def __init__(self, connection: Connection, channel: paramiko.Channel, stdin: bytes) -> None:
        self._connection = connection
        self._channel = channel
        self._stdin = memoryview(stdin)
        self._stderr: list[bytes] = []
        self._left = ANSWER_BYTES
        self._expired = threading.Event()
        self.is_endless = False
        """Whether it answered more than is read."""

    def complete(self, command: bytes, limit_s: float) -> Completed | None:
        """Return the command's end; None when it had to be cut off."""
        timer = threading.Timer(limit_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            return self._complete(command)
        except LIBRARY_ERRORS:
            if not self._expired.is_set():
                raise
            return None
        finally:
            timer.cancel()

    def _complete(self, command: bytes) -> Completed | None:
        self._channel.exec_command(command)
        threads = [threading.Thread(target=work, daemon=True) for work in (self._feed, self._read_stderr)]
        for thread in threads:
            thread.start()
        stdout: list[bytes] = []
        while chunk := self._channel.recv(_CHUNK_BYTES):
            self._take(stdout, chunk)
        threads[1].join()
        exit_code = self._channel.recv_exit_status()
        if self._expired.is_set():
            return None
        return Completed(exit_code=exit_code, stdout=b"".join(stdout), stderr=b"".join(self._stderr))

    def _feed(self) -> None:
        # A command need not read its input to the end.
        with contextlib.suppress(*LIBRARY_ERRORS):
            for start in range(0, len(self._stdin), _CHUNK_BYTES):
                self._channel.sendall(bytes(self._stdin[start : start + _CHUNK_BYTES]))
            self._channel.shutdown_write()

    def _read_stderr(self) -> None:
        while chunk := self._channel.recv_stderr(_CHUNK_BYTES):
            self._take(self._stderr, chunk)

    def _take(self, into: list[bytes], chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left >= 0:
            into.append(chunk)
        elif not self._expired.is_set():
            self.is_endless = True
            self._expire()

    def _expire(self) -> None:
        self._expired.set()
        self._connection.give_up(self._channel)


def _way(node: Node) -> tuple[object, ...]:
    return (node.address, node.port, node.proxy, node.user, node.host_key)


def _shown(argv: tuple[str, ...]) -> str:
    """Words may be long or secret: name the program only."""
    return f"{argv[0]} …" if len(argv) > 1 else argv[0]


# A command as every login shell hands it on: sh, bash, zsh, fish and csh read it alike.
#
# sshd gives the command to the login shell, whichever that is. fish knows neither `$?` nor the usual escapes, csh no
# line breaks within quotes, and both read some characters otherwise. So all of them are only told to become `/bin/sh`,
# by one line in single quotes in which there is nothing that any of them reads: no quote, no line break, no `!`, and no
# backslash before a backslash. What a word has of these, `/bin/sh` makes from its number.


_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_OF_SH = re.compile(r'(["$`])')
_MADE = {"\n": ("n", '$(printf "\\012x"); n=${n%x}'), "'": ("q", '$(printf "\\047")'),
         "\\": ("b", '$(printf "\\134")'), "!": ("e", '$(printf "\\041")')}  # fmt: skip


def watched(argv: tuple[str, ...]) -> bytes:
    """Return the command; a shell stays and reports how it ended, so that a death by signal n is exit code 128 + n."""
    return _line(argv, "{}; exit $?")


def replacing(argv: tuple[str, ...]) -> bytes:
    """Return the command in the shell's own place: nothing of ours is between a terminal and its program."""
    return _line(argv, "exec {}")


def _line(argv: tuple[str, ...], form: str) -> bytes:
    if any("\0" in word for word in argv):
        raise UsageError("a word of a command holds a NUL character")
    made = "".join(f"{name}={value}; " for char, (name, value) in _MADE.items() if any(char in w for w in argv))
    return os.fsencode(f"exec /bin/sh -c '{made}{form.format(' '.join(map(_word, argv)))}'")


def _word(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    return '"' + "".join(f"${{{_MADE[c][0]}}}" if c in _MADE else _OF_SH.sub(r"\\\1", c) for c in word) + '"'
