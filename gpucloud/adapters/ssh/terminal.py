"""What a connection carries beside commands: this process's terminal, or its pipes, and connections to ports."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import paramiko

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS
from gpucloud.domain.errors import UsageError
from gpucloud.ports import PortForward

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_CHUNK_BYTES = 1 << 16
_ENDED, _RESIZED = b"e", b"r"
_STATUS_WITHIN_S = 30.0
"""After the output's end: who closes it and goes on needs some time, who never says how it ended has no end."""
_LOOK_S = 0.05


def attach(
    channel: paramiko.Channel, command: bytes | None, *, begins_within_s: float, give_up: Callable[[], None]
) -> int:
    """Run `command`, or a shell, with this process's stdin, stdout and stderr; return its exit code, -1 when none came.

    On a terminal: a remote one of the same size, raw here, put back whatever happens. Otherwise plain pipes. Returns
    soon after the output's end, whatever the node leaves unsaid. `give_up` ends the channel where it does not begin.
    """
    on_terminal = os.isatty(_STDIN) and os.isatty(_STDOUT)
    with _within(begins_within_s, give_up):
        if on_terminal:
            width, height = os.get_terminal_size(_STDIN)
            channel.get_pty(os.environ.get("TERM", "vt100"), width, height)
        if command is None:
            channel.invoke_shell()
        else:
            channel.exec_command(command)
    events, wake = os.pipe()
    try:
        with _raw(wake) if on_terminal else contextlib.nullcontext():
            _move(channel, events, wake)
    finally:
        os.close(events)
        os.close(wake)
    channel.status_event.wait(_STATUS_WITHIN_S)
    return channel.exit_status


@contextlib.contextmanager
def _within(limit_s: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Give up what waits for the node longer than that; the library would wait for ever. Raises TimeoutError then."""
    is_over = threading.Event()

    def expire() -> None:
        is_over.set()
        give_up()

    timer = threading.Timer(limit_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except LIBRARY_ERRORS as error:
        if is_over.is_set():
            raise TimeoutError(f"the command was not begun within {limit_s:g} s") from error
        raise
    finally:
        timer.cancel()


def _move(channel: paramiko.Channel, events: int, wake: int) -> None:
    def stdout() -> None:
        try:
            _carry(channel, channel.recv, _STDOUT)
        finally:
            os.write(wake, _ENDED)

    def stderr() -> None:
        _carry(channel, channel.recv_stderr, _STDERR)

    threads = [threading.Thread(target=work, daemon=True) for work in (stdout, stderr)]
    for thread in threads:
        thread.start()
    try:
        _feed(channel, events)
    except BaseException:
        channel.close()
        raise
    finally:
        for thread in threads:
            thread.join()


def _carry(channel: paramiko.Channel, read: Callable[[int], bytes], to: int) -> None:
    try:
        while chunk := read(_CHUNK_BYTES):
            view = memoryview(chunk)
            while view:
                view = view[os.write(to, view) :]
    except LIBRARY_ERRORS:  # nobody reads here any more (`| head`), or the line is lost
        with contextlib.suppress(*LIBRARY_ERRORS):
            channel.close()


def _feed(channel: paramiko.Channel, events: int) -> None:
    """Send what is typed until the remote side ends: while it takes nothing, that is looked for all the same."""
    sources, typed = [_STDIN, events], b""
    while True:
        ready, _, _ = select.select([events] if typed else sources, [], [], _LOOK_S if typed else None)
        # The signal of a resize may be heard only after `select` came back for a key: the new size still goes first.
        if events in ready or select.select([events], [], [], 0)[0]:
            if _ENDED in os.read(events, _CHUNK_BYTES):
                return
            with contextlib.suppress(*LIBRARY_ERRORS):
                channel.resize_pty(*os.get_terminal_size(_STDIN))
        if _STDIN in ready:
            typed = _typed()
            if not typed:
                sources.remove(_STDIN)
                with contextlib.suppress(*LIBRARY_ERRORS):
                    channel.shutdown_write()
        typed = _sent(channel, typed)


def _typed() -> bytes:
    """Return local input, nothing at its end; a terminal that is gone ends it too."""
    with contextlib.suppress(OSError):
        return os.read(_STDIN, _CHUNK_BYTES)
    return b""


def _sent(channel: paramiko.Channel, typed: bytes) -> bytes:
    """Send what the far side takes now, and return the rest; nothing is left where nothing can be sent any more."""
    with contextlib.suppress(*LIBRARY_ERRORS):
        while typed and channel.send_ready():
            sent = channel.send(typed)
            typed = typed[sent:] if sent else b""
        return typed
    return b""


@contextlib.contextmanager
def _raw(wake: int) -> Iterator[None]:
    """Keys go out as they are typed. The terminal is put back at the end, and before a signal ends this process."""
    saved = termios.tcgetattr(_STDIN)

    def leave(number: int, _frame: FrameType | None) -> None:
        termios.tcsetattr(_STDIN, termios.TCSANOW, saved)
        signal.signal(number, before[number])
        os.kill(os.getpid(), number)

    def resized(_number: int, _frame: FrameType | None) -> None:
        # Only a mark: the interrupted code may hold the transport's lock, so nothing is sent from here.
        os.write(wake, _RESIZED)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, leave)
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, resized)
    try:
        tty.setraw(_STDIN)
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, saved)
        for changed, handler in before.items():
            signal.signal(changed, handler)


# Connections that go on over SSH: from a port of this machine, by way of a node, to what listens there.


_BACKLOG = 64


@contextlib.contextmanager
def listening(forward: PortForward, open_channel: Callable[[tuple[str, int]], paramiko.Channel]) -> Iterator[None]:
    """Take connections on a port of this machine, and join each to a channel of its own, until the end.

    One that the node cannot connect is closed, as OpenSSH does it. UsageError for a port that cannot be had.
    """
    family = socket.AF_INET6 if ":" in forward.bind else socket.AF_INET
    try:
        listener = socket.create_server((forward.bind, forward.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on {forward.bind}:{forward.port}: {getattr(error, 'strerror', None) or error}",
            hint=_on_another_port(forward),
        ) from error
    there = (forward.host, forward.host_port)
    with listener:
        threading.Thread(target=_accept, args=(listener, lambda: open_channel(there)), daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a thread that waits in `accept` is not woken by a close
                listener.shutdown(socket.SHUT_RDWR)


def _on_another_port(forward: PortForward) -> str:
    port = forward.port + 1 if 1024 <= forward.port < 65535 else 10_000 + forward.port % 1024
    bind, host = (f"[{name}]" if ":" in name else name for name in (forward.bind, forward.host))
    before = "" if bind == "127.0.0.1" else f"{bind}:"
    return f"another port of this machine: -L {before}{port}:{host}:{forward.host_port}"


def _accept(listener: socket.socket, open_channel: Callable[[], paramiko.Channel]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_carry_on, args=(connection, open_channel), daemon=True).start()


def _carry_on(connection: socket.socket, open_channel: Callable[[], paramiko.Channel]) -> None:
    with connection, contextlib.suppress(*LIBRARY_ERRORS):
        join(open_channel(), connection)


def join(channel: paramiko.Channel, connection: socket.socket) -> None:
    """Move bytes both ways until both ends have said that no more come, or one is lost; then close both."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_move_back, args=(channel, connection), daemon=True)
    back.start()
    try:
        while chunk := channel.recv(_CHUNK_BYTES):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        back.join()
    except LIBRARY_ERRORS:
        with contextlib.suppress(OSError):  # wakes whoever reads it
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        with contextlib.suppress(*LIBRARY_ERRORS):
            channel.close()
        connection.close()


def _move_back(channel: paramiko.Channel, connection: socket.socket) -> None:
    try:
        while chunk := connection.recv(_CHUNK_BYTES):
            channel.sendall(chunk)
        channel.shutdown_write()
    except LIBRARY_ERRORS:
        with contextlib.suppress(*LIBRARY_ERRORS):
            channel.close()
