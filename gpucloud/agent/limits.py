"""What the kernel lets the processes of an attempt have: open files, and memory that stays where it is."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess

_MOST_FILES = 1 << 20  # some programs close every number up to the limit, one by one
_ASKED_S = 10.0


def raise_limits(*, lock_memory: bool) -> None:
    """Raise this process's limits, and so those of all that it starts, as far as it may.

    RDMA cards register memory that must not move. What EFA's installer writes into limits.d counts from the next login
    on, and we are of an earlier one: with `lock_memory` root says it of this process.
    """
    _raise(resource.RLIMIT_NOFILE, _MOST_FILES)
    _raise(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    if lock_memory and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        root = () if os.geteuid() == 0 else ("sudo", "-n")
        argv = (*root, "prlimit", f"--pid={os.getpid()}", "--memlock=unlimited:unlimited")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # without it, the gate warns
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASKED_S, check=False)


def _raise(kind: int, most: int) -> None:
    soft, hard = resource.getrlimit(kind)
    within = hard if most == resource.RLIM_INFINITY else most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft not in (resource.RLIM_INFINITY, within) and (within == resource.RLIM_INFINITY or within > soft):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (within, hard))
