"""gpucloud's own commands on the jobs of one run, with an eye on the money; whatever it starts, it ends."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from decimal import Decimal
from os import environ
from pathlib import Path
from typing import Any

import yaml

from tests.cloud.account import Account
from tests.cloud.figures import Machine, cost_usd, guard

DIGITS = Path(__file__).resolve().parents[2] / "templates" / "jobs" / "digits.yaml"
TYPE = "g4dn.xlarge"
SETUP = "uv pip install -q 'torch>=2.6,<2.14' numpy"  # the image has the driver alone
GPUCLOUD = (sys.executable, "-m", "gpucloud")
LOOK_S = 5.0
_FIRST_STEP = re.compile(r"\bstep [1-9]\d* of \d+|\| epoch 1 of ")


class Jobs:
    """The run's jobs: their files in one folder, and a home of gpucloud there, so that the keys outlive a crash."""

    def __init__(self, account: Account, folder: Path, budgets: Mapping[str, str], nodes: Mapping[str, int]) -> None:
        self.account = account
        self.folder = folder
        self.started: list[str] = []
        self.usd_per_hour = Decimal("1.2")  # until the plan says it: above what a g4dn.xlarge costs anywhere
        self.began = datetime.now(timezone.utc)
        self._seen: dict[str, Machine] = {}
        for name, budget in budgets.items():
            self._write(name, budget, nodes.get(name, 2))

    def train(self, job: str, *flags: str) -> tuple[dict[str, Any], float]:
        """Train to the end; return the answer, and the seconds until the first step was seen."""
        self.started.append(job)
        began, first = time.monotonic(), None
        argv = [*GPUCLOUD, "train", str(self.file(job)), "--json", *flags]
        with (
            (self.folder / f"{job}.json").open("w") as out,
            subprocess.Popen(argv, stdout=out, stderr=subprocess.PIPE, text=True, env=self._environment) as child,
        ):
            try:
                for line in self._followed(child):
                    if first is None and _FIRST_STEP.search(line):
                        first = time.monotonic() - began
            except BaseException:
                child.terminate()  # `down` ends its machines
                raise
        answer = json.loads((self.folder / f"{job}.json").read_text())
        if child.returncode:
            raise SystemExit(f"train {job} ended with {child.returncode}: {answer.get('error') or answer['message']}")
        return answer, first if first is not None else time.monotonic() - began

    def down(self, job: str) -> None:
        """End a job; it is shown that nothing of it is left."""
        self.gpucloud("down", str(self.file(job)))
        self.started.remove(job)

    def answer(self, command: str, job: str) -> dict[str, Any]:
        """Return what a command answers about a job."""
        answer: dict[str, Any] = json.loads(self.gpucloud(command, str(self.file(job)), "--json"))
        return answer

    def gpucloud(self, *words: str) -> str:
        """Run gpucloud and return its answer; its story goes to the terminal."""
        if words[0] != "down":  # an end is never refused
            guard(self.spent_usd())
        done = subprocess.run([*GPUCLOUD, *words], stdout=subprocess.PIPE, text=True, env=self._environment)
        if done.returncode:
            raise SystemExit(f"gpucloud {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout

    def end_everything(self) -> None:
        """End what this run has started and not ended, and print what lives."""
        for job in [*self.started]:
            subprocess.run([*GPUCLOUD, "down", str(self.file(job))], env=self._environment)
        alive = self.account.alive()
        if alive:
            print(f"ALIVE AND CHARGED: {', '.join(alive)}; they end at their armed time. End them now with", flush=True)
            for job in self.started:
                print(
                    f"  GPUCLOUD_HOME={self._environment['GPUCLOUD_HOME']} gpucloud down {self.file(job)}", flush=True
                )
        else:
            print("no machine of gpucloud is alive", flush=True)

    def name(self, job: str) -> str:
        """Return the job's name on AWS: of this run alone, so that no other job is ever meant."""
        return f"{job}-{self.began:%H%M%S}"

    def file(self, job: str) -> Path:
        """Return the job's file."""
        return self.folder / f"{job}.yaml"

    def spent_usd(self) -> Decimal:
        """Return what this run's machines have cost so far, at the highest price."""
        # EC2 forgets what has ended an hour ago; the bill does not.
        self._seen |= {one.id: one for one in self.account.machines() if one.launched_at >= self.began}
        return cost_usd(self._seen.values(), self.usd_per_hour, datetime.now(timezone.utc))

    @property
    def _environment(self) -> dict[str, str]:
        return {**environ, "GPUCLOUD_HOME": str(self.folder / "home"), "AWS_REGION": self.account.region}

    def _write(self, job: str, budget: str, nodes: int) -> None:
        spec = yaml.safe_load(DIGITS.read_text())
        spec.update(name=self.name(job), cloud="aws", budget=budget, setup=SETUP)
        spec["resources"].update(types=[TYPE], nodes=nodes, regions=[self.account.region])
        self.file(job).write_text(yaml.safe_dump(spec))
        shutil.copytree(DIGITS.parent / spec["code"], self.folder / spec["code"], dirs_exist_ok=True)

    def _followed(self, child: subprocess.Popen[str]) -> Iterator[str]:
        """Yield the story's lines, and look at the money meanwhile."""
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(child, lines), daemon=True).start()
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > 3 * LOOK_S:
                guard(self.spent_usd())
                looked = time.monotonic()
            try:
                line = lines.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if line is None:
                return
            sys.stderr.write(line)
            yield line


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        lines.put(line)
    lines.put(None)
