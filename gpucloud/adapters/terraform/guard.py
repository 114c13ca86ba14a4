"""Runs one command and holds the caller's lock for as long as that command lives, but for no longer than its limit.

A killed CLI must not kill Terraform, and the next CLI must wait for it. So the CLI starts this file in a session of
its own, with the lock's descriptor open: the lock is free again when both the CLI and the command are gone.
The command itself does not inherit the descriptor: a daemon that it starts would hold the lock for ever.

Nothing runs before the CLI has written a line here: by then it has put on record which processes these are.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

_TICK_S = 1.0


def main(lock_fd: int, limit_s: float, mercy_s: float, argv: list[str]) -> int:
    """Return the command's exit code; 128 + n when signal n ended it, 127 when it cannot be started.

    After `limit_s` it gets SIGINT (Terraform then saves its state and ends); `mercy_s` later this whole process
    group is killed. 125: the caller was gone before it said go.
    """
    os.set_inheritable(lock_fd, False)  # noqa: FBT003  the call takes no keyword
    if not os.read(0, 1):
        return 125
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        pid = os.posix_spawn(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127
    _limit(pid, limit_s, mercy_s)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # An interpreter that ends puts the default back, which is death: the next tick would be the exit code.
    signal.setitimer(signal.ITIMER_REAL, 0)
    if code < 0:
        _end_rest()
    return code if code >= 0 else 128 - code


def _limit(pid: int, limit_s: float, mercy_s: float) -> None:
    begun, asked = _now(), False

    def check(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        age = _now() - begun
        if age > limit_s + mercy_s:
            os.killpg(0, signal.SIGKILL)
        elif age > limit_s and not asked:
            asked = True
            os.kill(pid, signal.SIGINT)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)


def _now() -> float:
    # A laptop's sleep counts: elsewhere the same time has passed, and the lock may have been taken over.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)


def _end_rest() -> None:
    # A Terraform that was killed leaves its providers behind, some 300 MB each, for ever (go-plugin #10).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
