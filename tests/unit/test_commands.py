"""A command that hangs, even in the kernel, holds up nobody."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from gpucloud.system.processes import Answered, answered, leave


def test_a_commands_answer_is_what_it_said_and_how_it_ended():
    script = "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"
    assert answered((sys.executable, "-c", script), timeout_s=60) == Answered(exit_code=3, stdout="1\n", stderr="2\n")
    assert answered((sys.executable, "-c", "print(1)"), timeout_s=60, merged=True).stderr == ""


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    script = f"(sleep 600; true) & echo $! >{tmp_path}/pid; sleep 600"
    with pytest.raises(subprocess.TimeoutExpired):
        answered(("sh", "-c", script), timeout_s=0.5)
    assert dies(int((tmp_path / "pid").read_text()))


def dies(pid):
    """Whether the process ends; one that was killed may take a moment, and nobody here is its parent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


def test_a_program_that_is_not_there_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        answered(("/nowhere/nvidia-smi",), timeout_s=1)


class Held:
    """A process that the kernel holds: it is killed, and does not die."""

    pid = 2**22 + 7  # no process has it
    stdin = stdout = stderr = None
    returncode = None

    def __init__(self):
        self.waited = []

    def wait(self, timeout=None):
        self.waited.append(timeout)
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)


def test_a_process_that_does_not_die_is_waited_for_a_second_and_left():
    held = Held()
    leave(held)
    assert (held.waited, held.returncode) == ([1.0], -9)
