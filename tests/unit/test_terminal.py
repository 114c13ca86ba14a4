"""What is typed and what is resized goes to the far side in the order in which it happened."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import Any

import pytest

from gpucloud.adapters.ssh import terminal


class Channel:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def resize_pty(self, width: int, height: int) -> None:
        self.heard.append((width, height))

    def sendall(self, typed: bytes) -> None:
        self.heard.append(typed)


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
