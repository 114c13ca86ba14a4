"""What is typed and what is resized goes to the far side in the order in which it happened."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import Any

import paramiko
import pytest

from gpucloud.adapters.ssh import terminal


class Channel:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def resize_pty(self, width: int, height: int) -> None:
        self.heard.append((width, height))

    def send_ready(self) -> bool:
        return True

    def send(self, typed: bytes) -> int:
        self.heard.append(typed)
        return len(typed)


def test_resize_heard_while_a_key_is_ready_goes_first(monkeypatch: pytest.MonkeyPatch):
    keys, keyboard = os.pipe()
    events, wake = os.pipe()
    channel = Channel()
    rounds = 0

    def select_before_the_signal(readers: Iterable[int], *rest: Any) -> tuple[list[int], list[int], list[int]]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:  # the kernel saw the key; the handler ran on the way back
            os.write(wake, b"r")
            return [keys], [], []
        if len(channel.heard) == 2:
            os.write(wake, b"e")
        return real(readers, *rest)

    real = select.select
    monkeypatch.setattr(terminal, "_STDIN", keys)
    monkeypatch.setattr(select, "select", select_before_the_signal)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: (100, 40))
    os.write(keyboard, b"x\r")
    terminal._feed(channel, events)  # type: ignore[arg-type]
    for end in (keys, keyboard, events, wake):
        os.close(end)
    assert channel.heard == [(100, 40), b"x\r"]


@pytest.mark.parametrize("lost", [paramiko.SSHException("no keys"), EOFError(), OSError("gone")])
@pytest.mark.timeout(20)
def test_a_line_that_is_lost_while_output_is_read_ends_the_session(
    monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    class Lost(Channel):
        def recv(self, _: int) -> bytes:
            raise lost

        def recv_stderr(self, _: int) -> bytes:
            return b""

        def close(self) -> None:
            raise lost

    keys, keyboard = os.pipe()
    events, wake = os.pipe()
    monkeypatch.setattr(terminal, "_STDIN", keys)
    terminal._move(Lost(), events, wake)  # type: ignore[arg-type]
    for end in (keys, keyboard, events, wake):
        os.close(end)
