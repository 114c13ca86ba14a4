"""What the embedded fleet's SSH server connects for a forwarded port."""

from __future__ import annotations

import socket
import threading

import pytest

from gpucloud.adapters.local import sshd


def test_a_connection_that_takes_too_long_is_none_and_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch):
    asked, answered = threading.Event(), threading.Event()

    def slow(*_args: object, **_options: object) -> socket.socket:
        asked.set()
        answered.wait()
        raise OSError

    monkeypatch.setattr(sshd, "_CONNECT_S", 0.05)
    monkeypatch.setattr(socket, "create_connection", slow)
    assert sshd._connected(("name.example", 80)) is None
    assert asked.is_set()
    answered.set()


def test_a_connection_that_is_refused_is_none_at_once(monkeypatch: pytest.MonkeyPatch):
    def refused(*_args: object, **_options: object) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refused)
    assert sshd._connected(("127.0.0.1", 9)) is None
