"""Where the ranks of an attempt are: Python's own account of every thread, in each rank's output."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.composing import MARK

_RANK = "RANK="
_NO_CORE = 1  # bytes; core(5): a limit of 1 keeps the kernel from feeding a core dump to a program, too


def ask_for_stacks(folder: Path) -> tuple[int, ...]:
    """Send SIGABRT to every process of a rank and return their pids; one that is stopped is let go on for it.

    With PYTHONFAULTHANDLER (`domain.launch.environment`) Python then writes the stack of every thread to its standard
    error, whatever it waits for, and ends. Any other program just ends. In containers too: their processes are seen
    from outside, by the attempt's mark.
    """
    found = told_of(folder)
    for pid in found:
        with contextlib.suppress(OSError, ValueError):
            _without_core(pid)
        for number in (signal.SIGABRT, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    return found


def told_of(folder: Path) -> tuple[int, ...]:
    """Return the pids of the attempt's ranks that are alive, with what they started: launchers are no ranks."""
    return tuple(pid for pid in processes.marked(MARK, str(folder)) if processes.has_variable(pid, _RANK))


def _without_core(pid: int) -> None:
    """A core of a process that holds a GPU's buffers takes minutes to write, and nobody asked for it."""
    if sys.platform.startswith("linux"):
        resource.prlimit(pid, resource.RLIMIT_CORE, (_NO_CORE, _NO_CORE))
