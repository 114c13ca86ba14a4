"""On a real terminal (a pty): the live display, and what Ctrl-C asks."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from decimal import Decimal

import pytest

from gpucloud.system import processes
from tests.commandline import command_line, until
from tests.running import words_of


class Terminal:
    """A command on a pty: what it shows, and keys for it."""

    def __init__(self, line, *arguments):
        self._master, slave = pty.openpty()
        env = {**line.env, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            line.argv(*arguments),
            env=env,
            cwd=line.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        line.started.append(self.process)
        os.close(slave)
        self.shown = ""

    def wait_for(self, text, limit_s=90.0):
        """Wait until it is shown; a command that is over shows nothing more."""

        def is_shown():
            over = self.process.poll() is not None
            self._look()
            assert text in self.shown or not over, f"no {text!r} in {self.shown[-2000:]!r}"
            return text in self.shown

        until(is_shown, lambda: f"{text!r} in {self.shown[-2000:]!r}", limit_s)

    def press_ctrl_c(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def type(self, text):
        os.write(self._master, text.encode())

    def end(self, limit_s=60.0):
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look()
        self._look()
        os.close(self._master)
        return self.process.wait(timeout=1)

    def _look(self):
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self.shown += data.decode(errors="replace")
        return True


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def detach(line, job):
    """Start the job on a terminal, press Ctrl-C, say "detach", and return the terminal after the command's end."""
    terminal = Terminal(line, "train", job)
    terminal.wait_for("step 3")
    terminal.wait_for("USD/h")

    terminal.press_ctrl_c()
    terminal.wait_for("[s]top the job")
    terminal.type("d\n")
    assert terminal.end() == 0
    return terminal


def processes_of(line):
    """The commands of gpucloud's own that run on this machine for the job, its embedded cloud's keeper aside."""
    return [pid for pid in processes.marked("GPUCLOUD_HOME", line.env["GPUCLOUD_HOME"]) if "train" in words_of(pid)]


def test_ctrl_c_asks_and_a_detached_job_is_driven_by_its_own_machines_until_it_is_stopped(line):
    terminal = detach(line, line.job(steps=2000, step_s=0.05))
    assert "small drives itself until" in terminal.shown
    assert processes_of(line) == []
    until(lambda: "its own node i-" in line.run("status", "small").stdout, "a machine that drives")
    before = line.step()
    until(lambda: line.step() > before, "more steps")
    assert len(line.state()["attempts"]) == 1

    assert line.run("down", "small").code == 0
    assert line.nodes() == []


@pytest.mark.slow
def test_a_detach_while_no_machine_is_there_is_said_at_once_everywhere_and_keeps_to_the_sum_it_told(line):
    """The process itself stays until machines come: what is told and what is armed come of two sessions."""
    assert line.run("local", "shortage", "15s").code == 0
    terminal = Terminal(line, "train", line.job(steps=2000, step_s=0.05))
    terminal.wait_for("no capacity")
    terminal.press_ctrl_c()
    terminal.wait_for("[s]top the job")
    terminal.type("d\n")
    terminal.wait_for("as soon as one is there that can drive it; until then this process stays")
    assert " until its machines drive it" in line.run("status", "small").stdout
    assert terminal.end() == 0

    told = Decimal(re.search(r"when ([0-9.]+) of [0-9.]+ USD are spent at the most", terminal.shown)[1])
    spend = json.loads(line.run("status", "small", "--json").stdout)["spend"]
    assert Decimal(spend["spent_usd"]) + Decimal(spend["promised_usd"]) <= told
    assert line.run("down", "small").code == 0


@pytest.mark.slow
def test_a_detached_job_that_needs_this_machine_goes_on_in_a_process_here(line):
    line.env["TOKEN"] = "hush"
    terminal = detach(line, line.job(extra="secrets: [TOKEN]\n", steps=2000, step_s=0.05))
    assert "secrets are not in the store" in terminal.shown
    assert "goes on in the background" in terminal.shown
    assert len(processes_of(line)) == 1

    assert line.run("down", "small").code == 0
    assert line.nodes() == []


def test_machines_that_are_only_brought_up_are_not_left_to_drive_the_job(line):
    terminal = Terminal(line, "up", line.job())
    terminal.wait_for("bootstrap")
    terminal.press_ctrl_c()
    terminal.wait_for("[s]top the job")
    assert "[d]etach" not in terminal.shown
    terminal.type("d\ns\n")
    assert terminal.end() == 130
    assert line.nodes() == []


def test_ctrl_c_and_stop_saves_and_ends_the_machines(line):
    terminal = Terminal(line, "train", line.job(steps=2000, step_s=0.05))
    terminal.wait_for("step 3")

    terminal.press_ctrl_c()
    terminal.wait_for("[s]top the job")
    terminal.type("s\n")

    assert terminal.end() == 130
    state = line.state()
    assert state["exit_reason"] == "stopped"
    assert state["checkpoint"]["step"] == state["attempts"][0]["last_step"]
    assert line.nodes() == []


def test_ctrl_c_twice_leaves_and_says_what_is_alive(line):
    terminal = Terminal(line, "train", line.job(steps=2000, step_s=0.05))
    terminal.wait_for("step 3")

    terminal.press_ctrl_c()
    terminal.wait_for("[s]top the job")
    terminal.press_ctrl_c()

    assert terminal.end() == 130
    assert "alive and paid until" in terminal.shown
    assert len(line.nodes()) == 2
