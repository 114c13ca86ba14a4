"""Ends the loop's rest early: a child exited, or another thread has news."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Wake:
    """A pipe that `rest` listens to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def at_child_exit(self) -> None:
        """Wake whenever a child of this process ends; only the main thread may ask for it."""
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the rest now; from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._writer, b"w")

    def rest(self, seconds: float) -> None:
        """Return after `seconds`, or at once when there is news."""
        if select.select([self._reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
