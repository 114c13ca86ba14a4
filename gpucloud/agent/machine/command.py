"""The node's `machine` command: its wish on standard input, its answer as one line, how it ended as the exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from gpucloud.agent.machine.making import make
from gpucloud.domain.bootstrap.answers import REFUSED, Answer
from gpucloud.domain.bootstrap.step import REBOOT_WANTED
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.machine import MachineWanted


def machine_command(root: Path) -> int:
    """Make this machine what the wish says and return 0; 101 when it must boot anew, 102 when nothing mends it."""
    made = make(root, from_json(MachineWanted, sys.stdin.read()))
    if made.stuck is not None:
        answer, code = Answer(said=made.stuck.what, hint=made.stuck.hint, steps=made.steps), REFUSED
    elif made.reboot:
        answer, code = Answer(said=made.reboot, steps=made.steps), REBOOT_WANTED
    else:
        answer, code = Answer(said="ready", steps=made.steps), 0
    sys.stdout.write(f"{to_json(answer)}\n")
    return code
