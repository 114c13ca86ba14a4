"""Connects this process's terminal, or its pipes, to a channel."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import paramiko

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_CHUNK_BYTES = 1 << 16
_ENDED, _RESIZED = b"e", b"r"


def attach(channel: paramiko.Channel, command: bytes | None) -> int:
    """Run `command`, or a shell, with this process's stdin, stdout and stderr; return its exit code, -1 when none came.

    On a terminal: a remote one of the same size, raw here, put back whatever happens. Otherwise plain pipes.
    """
    on_terminal = os.isatty(_STDIN) and os.isatty(_STDOUT)
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
            return channel.recv_exit_status()
    finally:
        os.close(events)
        os.close(wake)


def _move(channel: paramiko.Channel, events: int, wake: int) -> None:
    def stdout() -> None:
        _carry(channel, channel.recv, _STDOUT)
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
    except OSError:
        channel.close()  # nobody reads here any more (`| head`)


def _feed(channel: paramiko.Channel, events: int) -> None:
    """Send what is typed until the remote side ends."""
    sources = [_STDIN, events]
    while True:
        ready, _, _ = select.select(sources, [], [])
        # The signal of a resize may be heard only after `select` came back for a key: the new size still goes first.
        if events in ready or select.select([events], [], [], 0)[0]:
            if _ENDED in os.read(events, _CHUNK_BYTES):
                return
            with contextlib.suppress(*LIBRARY_ERRORS):
                channel.resize_pty(*os.get_terminal_size(_STDIN))
        if _STDIN in ready and not _send_typed(channel):
            sources.remove(_STDIN)


def _send_typed(channel: paramiko.Channel) -> bool:
    """Return False when the local input has ended; a terminal that is gone ends it too."""
    with contextlib.suppress(*LIBRARY_ERRORS):
        typed = os.read(_STDIN, _CHUNK_BYTES)
        if typed:
            channel.sendall(typed)
            return True
        channel.shutdown_write()
    return False


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
