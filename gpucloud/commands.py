"""Short commands of the system, of which none can hold up whoever asks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DIES_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How a command ended, and what it said; `stderr` is empty where both streams were asked for as one."""

    exit_code: int
    stdout: str
    stderr: str = ""


def answered(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, merged: bool = False
) -> Answered:
    """Run the command without any input and return its answer; `merged`: both streams as one.

    Raises OSError where there is no such program, subprocess.TimeoutExpired a second after the limit at the latest:
    `subprocess.run` waits without a limit for what it has killed, and a process that the kernel holds (state D, as
    nvidia-smi before a driver that is stuck) does not die.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except BaseException:
        leave(child)
        raise
    return Answered(exit_code=child.returncode, stdout=out, stderr=err or "")


def leave(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill the process group that it leads, wait a second for it, and leave it where it does not die."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_DIES_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # nobody waits for it any more, and nobody warns of it
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # what it did not read yet
                stream.close()
