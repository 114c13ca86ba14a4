"""Runs one command and holds the caller's lock for as long as that command lives.

A killed CLI must not kill Terraform, and the next CLI must wait for it. So the CLI starts this file in a session of
its own, with the lock's descriptor open: the lock is free again when both the CLI and the command are gone.
The command itself does not inherit the descriptor: a daemon that it starts would hold the lock for ever.
"""

from __future__ import annotations

import os
import sys


def main(lock_fd: int, argv: list[str]) -> int:
    """Return the command's exit code; 128 + n when signal n ended it, 127 when it cannot be started."""
    os.set_inheritable(lock_fd, False)  # noqa: FBT003  the call takes no keyword
    try:
        pid = os.posix_spawn(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
