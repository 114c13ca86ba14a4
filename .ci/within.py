# ruff: noqa: INP001, T201
"""Runs a command with a time limit and ends everything that it started: `within.py SECONDS COMMAND…`.

Exits with the command's code, or 124 when the limit passed. Daemons that left the command's session are found by an
entry in their environment, or as orphans that fell to this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpucloud.system import processes  # the standard library suffices for it: nothing is installed yet

MARK = "GPUCLOUD_CI_RUN"


def main(limit_s: float, argv: list[str]) -> int:
    """Return the command's exit code; 124 when it was ended for taking too long."""
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell without job control has what it starts with `&` ignore SIGINT, and so would the tests that send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mark = (MARK, uuid.uuid4().hex)
    command = subprocess.Popen(argv, env={**os.environ, mark[0]: mark[1]}, start_new_session=True)
    code = 1
    try:
        code = ended(command, limit_s)
    finally:
        left = set(processes.descendants(os.getpid())) | set(processes.marked(*mark))
        gone = processes.kill_below(os.getpid(), mark=mark, limit_s=10)
        if left:
            print(
                f"{len(left)} processes were left and have been {'ended' if gone else 'asked in vain to end'}",
                flush=True,
            )
    return code if gone else code or 1


def ended(command: subprocess.Popen[bytes], limit_s: float) -> int:
    """Return the command's exit code, 124 after the limit. Orphans are reaped: who lists processes meets them."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            time.sleep(0.1)
        elif found.si_pid == command.pid:
            return command.wait()
        else:
            os.waitpid(found.si_pid, 0)
    print(f"no end after {limit_s:.0f} s: ending it", flush=True)
    return 124


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
