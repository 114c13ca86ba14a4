"""The processes below an embedded node: started, waited for, and reaped even when they are orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from typing import Any


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
