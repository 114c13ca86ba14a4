"""One authenticated connection to a node with a pinned key: the line it runs on, paramiko's transport with bounds."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA, MSG_EXT_INFO, cMSG_CHANNEL_REQUEST
from paramiko.packet import Packetizer

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS, key_mismatch, may_pass
from gpucloud.domain.errors import HostKeyMismatch, ToolMissing
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.node.node import Node
from gpucloud.system.retries import Retry

# Without a handler, logging would print the library's messages over the story on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CHANNELS = 10  # stock sshd: MaxSessions 10
PROBE_EVERY_S = 2.0
SILENCE_STEPS, STEP_S = 12, 0.25  # 3 s
ANSWER_STEPS = 1200  # 5 min: ten windows of 2 MiB, one for each channel, lie before the answer, on a line of 100 KB/s
FORWARD_S = 30.0  # the node's own patience with what it connects to is unknown
_FULL = Retry(first_s=0.2, factor=1.0)
_HANGS_UP_WITHIN_S = 2.0
_RSA_PROOFS = ("rsa-sha2-512", "rsa-sha2-256")


class Connection:
    """A transport with a limit of channels and a thread that asks the node every 2 s whether it is there.

    Neither `set_keepalive` (awaits no reply) nor TCP (a stopped process acknowledges) finds a dead peer.
    """

    def __init__(self, node: Node, transport: BoundedTransport, sock: HeardSocket) -> None:
        self._transport = transport
        self._sock = sock
        self._slots = threading.BoundedSemaphore(CHANNELS)
        self._asking = threading.Lock()  # the library keeps one reply at a time
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name=f"ssh-watch-{node.id}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """False as soon as the loss is known."""
        return self._transport.is_active()

    @contextlib.contextmanager
    def channel(self, limit_s: float) -> Iterator[paramiko.Channel]:
        """Open a session channel, waiting for a free one; closed at the end. Raises the library's errors."""
        if not self._slots.acquire(timeout=limit_s):
            raise TimeoutError(f"all {CHANNELS} channels of the connection were busy for {limit_s:.0f} s")
        try:
            channel = self._open(time.monotonic() + limit_s)
            try:
                yield channel
            finally:
                self.give_up(channel)
        finally:
            self._slots.release()

    def open_forward(self, there: tuple[str, int]) -> paramiko.Channel:
        """Return a channel that the node has connected with that address of its own. Raises the library's errors.

        Servers limit sessions (`MaxSessions`), and such channels are none.
        """
        return self._transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=FORWARD_S)

    def hang_up(self, channel: paramiko.Channel) -> None:
        """Close a channel; end its command if that still runs, since OpenSSH would let it run on."""
        if not channel.exit_status_ready():
            with contextlib.suppress(*LIBRARY_ERRORS):
                self._transport.send_signal(channel, "TERM")
        with contextlib.suppress(*LIBRARY_ERRORS):
            channel.close()

    def give_up(self, channel: paramiko.Channel) -> None:
        """Hang up a channel that took too long, or end the whole connection where the node does not let us do that.

        It may keep what is to be sent waiting for as long as it likes: by a key exchange without an end, by reading
        nothing. No lock of the library's is waited for.
        """
        hangs_up = threading.Thread(target=self.hang_up, args=(channel,), daemon=True)
        hangs_up.start()
        hangs_up.join(_HANGS_UP_WITHIN_S)
        if hangs_up.is_alive():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self.close()

    def answers(self) -> bool:
        """Ask the node for a sign of life; False, and the connection closed, when nothing came for 3 s.

        Nor may it say other things for ever: the answer comes within 5 minutes.
        """
        with self._asking:
            answered = threading.Event()
            guard = threading.Thread(target=self._close_when_silent, args=(answered,), daemon=True)
            guard.start()
            # Every server answers a request that wants a reply, be it with "no such request" (RFC 4254, 4).
            with contextlib.suppress(*LIBRARY_ERRORS):
                self._transport.global_request("keepalive@openssh.com", wait=True)
            answered.set()
            guard.join()
        return self._transport.is_active()

    def close(self) -> None:
        """Close the connection; whoever waits on one of its channels is woken."""
        self._closing.set()
        self._transport.close()
        self._sock.close()

    def _open(self, deadline: float) -> paramiko.Channel:
        """A server that has no session left may have one soon: an abandoned command holds its own until it ends."""
        tries = replace(_FULL, within_s=deadline - time.monotonic()).begin(self._closing.wait)
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            try:
                return self._transport.open_session(timeout=left_s)
            except paramiko.ChannelException:
                if not tries.again() or self._closing.is_set():
                    raise

    def _watch(self) -> None:
        while not self._closing.wait(PROBE_EVERY_S):
            if not self.answers():
                return

    def _close_when_silent(self, answered: threading.Event) -> None:
        """Count steps, not the clock: a supervisor that was itself asleep must not take that for the node's silence.

        Any byte counts as a sign of life, since the answer may queue behind megabytes on a slow line.
        """
        silent, heard = 0, self._sock.heard
        for _ in range(ANSWER_STEPS):
            if answered.wait(STEP_S):
                return
            silent = silent + 1 if heard == self._sock.heard else 0
            heard = self._sock.heard
            if silent == SILENCE_STEPS:
                break
        self._transport.close()


def connect(node: Node, keys: tuple[paramiko.PKey, ...], *, limit_s: float) -> Connection:
    """Return a connection whose host proved the pinned key. Raises HostKeyMismatch, ToolMissing, the library's errors.

    The host's key is compared before the user's name or key is sent. The first of `keys` that it accepts counts.
    """
    if node.host_key is None:
        raise HostKeyMismatch(
            f"{node.id}: its host key is not known yet; nothing was sent", hint="wait until the node has published it"
        )
    kind, text = node.host_key.split()[:2]
    with contextlib.ExitStack() as undo:
        sock = open_line(node, limit_s)
        undo.callback(sock.close)
        undo.enter_context(_line_blamed(sock))
        transport = BoundedTransport(sock)
        undo.callback(transport.close)
        transport.get_security_options().key_types = _RSA_PROOFS if kind == "ssh-rsa" else (kind,)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = limit_s
        transport.start_client(timeout=limit_s)
        if not transport.initial_kex_done:
            raise TimeoutError(f"no SSH handshake within {limit_s:.0f} s")
        if transport.get_remote_server_key().get_base64() != text:
            raise key_mismatch(node)
        _log_in(transport, node.user, keys)
        undo.pop_all()
    return Connection(node, transport, sock)


def _log_in(transport: paramiko.Transport, user: str, keys: tuple[paramiko.PKey, ...]) -> None:
    for key in keys[:-1]:
        with contextlib.suppress(paramiko.AuthenticationException):
            transport.auth_publickey(user, key)
            return
    transport.auth_publickey(user, keys[-1])


@contextlib.contextmanager
def _line_blamed(sock: HeardSocket) -> Iterator[None]:
    """Raise OSError with what ended the line, in place of a library error that only says that it ended."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        fault = sock.fault() if may_pass(error) else None
        if fault is None:
            raise
        raise OSError(fault) from error


# What carries a connection to a node: TCP, or the input and output of a program that leads there.


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


# paramiko's transport with the bounds that it lacks: what a server sends costs its client a known amount of memory.
#
# paramiko allocates what a packet's first four bytes announce, before a key was compared; collects a first line
# without an end; and keeps what a server sends beyond the window that it was granted.


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
