"""Ends the node that it runs on, as `shutdown` does on a machine: `python -m gpucloud.adapters.local.power_off`.

The node's first process is the topmost one above this that bears the node's mark.
"""

from __future__ import annotations

import os
import signal
import sys

from gpucloud import processes
from gpucloud.adapters.local.node import MARK


def main() -> int:
    """End the node and return 0; 1 where this is none."""
    name = os.environ.get(MARK)
    first = first_of(os.getpid(), frozenset(processes.marked(MARK, name))) if name else None
    if first is None:
        sys.stderr.write("this is no node of the embedded fleet\n")
        return 1
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)  # one that was stopped ends too
    return 0


def first_of(pid: int, members: frozenset[int]) -> int | None:
    """Return the topmost process above `pid` that belongs to the node; None when there is none."""
    parents = {process.pid: process.parent for process in processes.listing()}
    found = None
    while (pid := parents.get(pid, 0)) in members:
        found = pid
    return found


if __name__ == "__main__":
    sys.exit(main())
