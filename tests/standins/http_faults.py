"""A process's own death at each moment of its talk over HTTP: before it sends, half way through, and when answered.

An answer that was met by death has come: what was asked for is done, and nobody knows. Use it in a forked child.
"""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.standins import in_writers

_lock = threading.Lock()


def befall(die_at: int, count: Callable[[], int]) -> None:
    """SIGKILL this process, and the rank that it writes for, at the moment of that number, from 1 (0: never).

    `count` is told of each moment before it, and returns its number.
    """

    def met(before: Callable[[], None] = lambda: None) -> None:
        with _lock:  # several threads may read at once
            if count() == die_at:
                before()
                in_writers.end_rank()
                os.kill(os.getpid(), signal.SIGKILL)

    send, begin = http.client.HTTPConnection.send, http.client.HTTPResponse.begin

    def send_dying(self: http.client.HTTPConnection, data: Any) -> None:
        met()
        met(lambda: send(self, bytes(data)[: len(data) // 2]))
        send(self, data)

    def begin_dying(self: http.client.HTTPResponse) -> None:
        begin(self)
        met()

    http.client.HTTPConnection.send = send_dying  # type: ignore[method-assign]
    http.client.HTTPResponse.begin = begin_dying  # type: ignore[method-assign]
