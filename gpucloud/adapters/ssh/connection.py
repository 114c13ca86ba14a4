"""One authenticated connection to a node with a pinned key, closed as soon as the node goes silent."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import paramiko

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS, key_mismatch, may_pass
from gpucloud.adapters.ssh.line import HeardSocket, open_line
from gpucloud.adapters.ssh.transport import BoundedTransport
from gpucloud.domain.errors import HostKeyMismatch
from gpucloud.domain.node import Node

# Without a handler, logging would print the library's messages over the story on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CHANNELS = 10  # stock sshd: MaxSessions 10
PROBE_EVERY_S = 2.0
SILENCE_STEPS, STEP_S = 12, 0.25  # 3 s
ANSWER_STEPS = 1200  # 5 min: ten windows of 2 MiB, one for each channel, lie before the answer, on a line of 100 KB/s
_FULL_PAUSE_S = 0.2
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
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            try:
                return self._transport.open_session(timeout=left_s)
            except paramiko.ChannelException:
                if left_s <= _FULL_PAUSE_S or self._closing.wait(_FULL_PAUSE_S):
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
