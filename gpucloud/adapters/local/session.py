"""One SSH session of an embedded node, on pipes or on a terminal, and the processes below it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

_Send = Callable[[bytes], object]
_NO = b"\0"

_LOOK_EVERY_S = 0.5  # for a client that went away
_GRACE_S = 1.0  # between SIGHUP and SIGTERM
_CHUNK_BYTES = 1 << 18
# A session leader must take its terminal itself; `preexec_fn` would run Python between fork and exec, which can
# hang in a process with threads.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class NodeTransport(paramiko.Transport):
    """A server's transport that can report a death by signal and lets a command wait for its own acceptance.

    `opened` gets each channel when it is opened, and keeps it: nothing else does.
    """

    def __init__(self, sock: socket.socket, opened: Callable[[paramiko.Channel], None]) -> None:
        super().__init__(sock)
        self._opened = opened
        self._after_reply: list[Callable[[], None]] = []

    def start_after_reply(self, work: Callable[[], None]) -> None:
        """Run `work` when the request now being answered has its answer; for the transport's own thread only.

        A fast command could otherwise end, and its channel close, before the client hears that it was started.
        """
        self._after_reply.append(work)

    def _queue_incoming_channel(self, channel: paramiko.Channel) -> None:
        """Hand it on at once; the library would keep all that were ever opened."""
        self._opened(channel)

    def send_exit_signal(self, channel: paramiko.Channel, number: int) -> None:
        """Tell the client which signal ended its command (RFC 4254, 6.10)."""
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(channel.remote_chanid)
        message.add_string("exit-signal")
        message.add_byte(_NO)  # a reply is not wanted
        message.add_string(signal.Signals(number).name.removeprefix("SIG"))
        message.add_byte(_NO)  # no core was dumped
        message.add_string("")
        message.add_string("")
        self._send_user_message(message)

    def _send_user_message(self, data: paramiko.Message) -> None:
        super()._send_user_message(data)  # type: ignore[misc]
        if threading.current_thread() is self:
            while self._after_reply:
                self._after_reply.pop()()


def node_transport(channel: paramiko.Channel) -> NodeTransport:
    """Return the transport of a channel that this server opened."""
    transport = channel.get_transport()
    if not isinstance(transport, NodeTransport):
        raise TypeError(f"not a channel of this server: {transport!r}")
    return transport


class Terminal:
    """What the client said about its terminal, and our end of the one made for it."""

    def __init__(self, kind: str, width: int, height: int) -> None:
        self.kind = kind
        self._size = (width, height)
        self._master: int | None = None
        self._lock = threading.Lock()

    def open(self) -> tuple[int, int]:
        """Return both ends of a new pseudo terminal of that size; `close` closes the first one."""
        self._master, slave = pty.openpty()
        self.resize(*self._size)
        return self._master, slave

    def resize(self, width: int, height: int) -> None:
        """Set the size, now or when it is opened."""
        with self._lock:
            self._size = (width, height)
            if self._master is not None:
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def close(self) -> None:
        """Close our end: the kernel hangs up whoever still has the other one."""
        with self._lock:
            if self._master is not None:
                os.close(self._master)
                self._master = None


class Session:
    """What a client asks for on one channel, and the command that it then runs there."""

    def __init__(self, home: Path, children: Children) -> None:
        self.channel: paramiko.Channel | None = None
        """Held until its command ended: the library knows channels by weak references."""
        self.env: dict[str, str] = {}
        self.terminal: Terminal | None = None
        self._home = home
        self._children = children

    def run(self, channel: paramiko.Channel, command: bytes | None) -> None:
        """Run a command (None: a shell), move its streams, report its end, close the channel."""
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            # A client may go away at any moment; its command is hung up then.
            stack.enter_context(contextlib.suppress(OSError, EOFError, paramiko.SSHException))
            argv = ["/bin/sh", "-c", os.fsdecode(command)] if command is not None else [_shell()]
            if self.terminal is None:
                self._on_pipes(channel, argv)
            else:
                stack.callback(self.terminal.close)
                self._on_terminal(channel, argv, self.terminal)

    def _on_pipes(self, channel: paramiko.Channel, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        child = self._children.start(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd=self._home, env=self._environment()
        )
        stdin, stdout, stderr = child.process.stdin, child.process.stdout, child.process.stderr
        if not (stdin and stdout and stderr):
            raise EOFError
        threading.Thread(target=_feed, args=(channel, stdin), daemon=True).start()
        with stdout, stderr:
            outputs: dict[int, _Send] = {stdout.fileno(): channel.sendall, stderr.fileno(): channel.sendall_stderr}
            _attend(channel, child, outputs, leave_rest=False)

    def _on_terminal(self, channel: paramiko.Channel, argv: list[str], terminal: Terminal) -> None:
        master, slave = terminal.open()
        try:
            child = self._children.start(
                [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *argv],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=self._home,
                env={**self._environment(), "TERM": terminal.kind},
            )
        finally:
            os.close(slave)
        keyboard = os.fdopen(os.dup(master), "wb", buffering=0)
        threading.Thread(target=_feed, args=(channel, keyboard), daemon=True).start()
        _attend(channel, child, {master: channel.sendall}, leave_rest=True)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self._home), **self.env}


def _shell() -> str:
    """Not a login shell: `/etc/profile` would replace the node's PATH."""
    return shutil.which("bash") or "/bin/sh"


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    # Closed by this thread only: another one could close it, and its number be reused, in the middle of a write.
    with stdin, contextlib.suppress(OSError, EOFError):
        while chunk := channel.recv(_CHUNK_BYTES):
            view = memoryview(chunk)
            while view:
                view = view[stdin.write(view) :]


def _attend(channel: paramiko.Channel, child: Child, outputs: dict[int, _Send], *, leave_rest: bool) -> None:
    """Move output until the command ended, then report how; or hang up when the client is gone."""
    try:
        _forward(channel, child, outputs, leave_rest=leave_rest)
        while not child.wait(_LOOK_EVERY_S):
            if channel.closed:
                raise EOFError  # noqa: TRY301
        if child.exit_code >= 0:
            channel.send_exit_status(child.exit_code)
        else:
            node_transport(channel).send_exit_signal(channel, -child.exit_code)
    except (OSError, EOFError, paramiko.SSHException):
        child.signal_group(signal.SIGHUP)
        child.signal_group(signal.SIGCONT)
        if not child.wait(_GRACE_S):
            child.signal_group(signal.SIGTERM)


def _forward(channel: paramiko.Channel, child: Child, outputs: dict[int, _Send], *, leave_rest: bool) -> None:
    poll = select.poll()
    for fd in outputs:
        poll.register(fd, select.POLLIN)
    while outputs:
        ready = poll.poll(int(_LOOK_EVERY_S * 1000))
        if channel.closed:
            raise EOFError
        for fd, _ in ready:
            chunk = _read(fd)
            if chunk:
                outputs[fd](chunk)
            else:
                poll.unregister(fd)
                del outputs[fd]
        # A background process may keep a terminal open for ever.
        if leave_rest and not ready and child.wait(0):
            return


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK_BYTES)
    except OSError:  # Linux: EIO when nobody has the terminal's other end any more
        return b""


# The processes below an embedded node: started, waited for, and reaped even when they are orphans.


class Child:
    """A process that leads a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._ended = threading.Event()

    def wait(self, limit_s: float | None = None) -> bool:
        """Whether it ended; waits at most `limit_s`."""
        return self._ended.wait(limit_s)

    @property
    def exit_code(self) -> int:
        """The exit code; minus the signal's number when one killed it. Only after `wait` said True."""
        return int(self.process.returncode)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to its process group, unless it ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def end(self, status: int) -> None:
        """Take the status that the reaper got."""
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class Children:
    """Starts processes and reaps everything that becomes a child of this one, orphans included.

    One thread waits for any child, since a thread that waited for its own could not reap orphans, and two that wait
    for the same process steal its status from each other: nobody else may wait.
    """

    def __init__(self) -> None:
        self._known: dict[int, Child] = {}
        self._started = threading.Condition()
        threading.Thread(target=self._reap, name="reaper", daemon=True).start()

    def start(self, argv: list[str], **streams: Any) -> Child:
        """Start argv in a session of its own; the keywords are Popen's. Raises OSError."""
        # Held until the child is known, so that the reaper cannot meet it first.
        with self._started:
            child = Child(subprocess.Popen(argv, start_new_session=True, **streams))
            self._known[child.process.pid] = child
            self._started.notify()
        return child

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                with self._started:
                    # While there is no child there can be no orphan: wait for the next start.
                    if not self._known:
                        self._started.wait()
                continue
            with self._started:
                child = self._known.pop(pid, None)
            if child is not None:
                child.end(status)
