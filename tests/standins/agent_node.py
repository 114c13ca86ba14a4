"""A node as the agent knows one: a folder of its own, and real processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpucloud.domain.node.status import Desired, Launch, RunState, Status, Stop, desired_to_json, status_from_json
from gpucloud.system import processes


class AgentNode:
    def __init__(self, home: Path, package: Path):
        self.root = home / ".gpucloud"
        self.package = package
        self.env = {**os.environ, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}

    def start(self, *arguments: str) -> str:
        command = [sys.executable, "-I", str(self.package), "agent", "--root", str(self.root), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def pid(self) -> int:
        return json.loads((self.root / "agent" / "agent.json").read_text())["pid"]

    def sigkill(self) -> None:
        pid, start = self.pid, processes.started(self.pid)
        if start:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not processes.alive(pid, start), "the agent to die")

    def want(self, launch=None, *, stop=Stop.NO, epoch=1, paid_until=None):
        desired = Desired(epoch=epoch, launch=launch, stop=stop, paid_until=paid_until)
        self.write_desired(desired_to_json(desired))

    def write_desired(self, text: str) -> None:
        path = self.root / "agent" / "desired.json"
        beside = path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(path)

    def launch(self, number: int, *argv: str, **env: str) -> Launch:
        return Launch(attempt=number, argv=argv, directory=str(self.root), env=tuple(env.items()))

    def python(self, number: int, code: str, **env: str) -> Launch:
        return self.launch(number, sys.executable, "-u", "-c", code, **env)

    def status(self) -> Status:
        return status_from_json((self.root / "agent" / "status.json").read_text())

    def wait_for(self, holds, what: str, limit_s: float = 15.0) -> Status:
        wait_until(lambda: holds(self.status()), what, limit_s)
        return self.status()

    def wait_running(self, number: int) -> Status:
        return self.wait_for(
            lambda s: s.attempt and (s.attempt.attempt, s.attempt.state) == (number, RunState.RUNNING), "it to run"
        )

    def wait_exited(self, number: int, limit_s: float = 15.0) -> Status:
        return self.wait_for(
            lambda s: s.attempt and (s.attempt.attempt, s.attempt.state) == (number, RunState.EXITED),
            f"attempt {number} to end",
            limit_s,
        )

    def folder(self, number: int) -> Path:
        return self.root / "attempts" / f"{number:04d}"

    def alive(self, number: int) -> tuple[int, ...]:
        return processes.marked("GPUCLOUD_ATTEMPT_DIR", str(self.folder(number)))

    def destroy(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.sigkill()
        for number in range(1, 10):
            for pid in self.alive(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def wait_until(holds, what: str, limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.01)
