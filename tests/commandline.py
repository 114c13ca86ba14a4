"""The real command line over the embedded fleet, in a folder of its own, with a quick job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.system import processes
from tests.running import words_of

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 400.0

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import hashlib
from gpucloud import resume

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
run = resume.init(model=model, optimizer=optimizer, scheduler=scheduler, total_steps=STEPS)
x = torch.randn(512, 16)
y = (x.sum(1) > 0).long()
for a, b in run.loader(torch.utils.data.TensorDataset(x, y), global_batch=32):
    loss = nn.functional.cross_entropy(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    time.sleep(STEP_S)
    run.step(loss=loss)
    if run.rank == 0:
        print("step", run.steps_done, flush=True)
    if run.steps_done == RAISES_AT and run.rank == RAISES_ON:
        raise ValueError("the data has a hole")
run.done()
os.makedirs("results/deep", exist_ok=True)
open("results/deep/rank", "w").write(str(run.rank))
if run.rank == 0:
    weights = b"".join(t.numpy().tobytes() for t in net.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
"""

JOB = """\
name: {name}
code: code
run: train.py
resources: {{nodes: 2, gpus: {gpus}}}
checkpoint: {{every: {every}}}
budget: {budget}
{extra}"""


@dataclass
class Answer:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        return json.loads(self.stdout)


class CommandLine:
    """`gpucloud` with a home of its own. `close` ends what is left."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**os.environ, "GPUCLOUD_HOME": str(self.home), "PYTHONPATH": str(ROOT), **environment}

    def job(
        self, name="small", *, steps=40, step_s=0.02, gpus=1, every="10 steps", budget="1 USD", extra="", raises=(0, 0)
    ):
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        text = TRAIN.replace("STEPS", str(steps)).replace("STEP_S", str(step_s))
        text = text.replace("RAISES_AT", str(raises[0])).replace("RAISES_ON", str(raises[1]))
        (code / "train.py").write_text(text)
        file = self.folder / f"{name}.yaml"
        file.write_text(JOB.format(name=name, gpus=gpus, every=every, budget=budget, extra=extra))
        return str(file)

    def run(self, *arguments: str, stdin: str | None = None, limit_s: float = LIMIT_S) -> Answer:
        done = subprocess.run(
            self.argv(*arguments), env=self.env, cwd=self.folder, input=stdin or "", capture_output=True, text=True,
            timeout=limit_s,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own; its output goes to `<folder>/out` and `err`."""
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            process = subprocess.Popen(
                self.argv(*arguments), env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True, text=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "gpucloud", *arguments]

    def state(self, job="small"):
        """The stored state, None while there is none."""
        path = self.home / "store" / "jobs" / job / "state.json"
        return json.loads(path.read_text()) if path.exists() else None

    def order(self, job="small"):
        """The newest order, None while there is none."""
        path = self.home / "store" / "jobs" / job / "control" / "order.json"
        return json.loads(json.loads(path.read_text())["order"]) if path.exists() else None

    def step(self, job="small"):
        """The last step that the stored state knows of the newest attempt; 0 before the first."""
        attempts = (self.state(job) or {}).get("attempts") or [{}]
        return attempts[-1].get("last_step") or 0

    @property
    def group(self) -> LocalNodeGroup:
        return LocalNodeGroup(self.home / "cloud")

    def nodes(self, job="small"):
        """The ids of the job's nodes that are alive."""
        return [node.id for node in self.group.describe(f"gpucloud-{job}").alive]

    def processes(self) -> list[int]:
        """What still runs of this folder's fleet and supervisors."""
        return list(processes.marked("GPUCLOUD_HOME", str(self.home))) + [
            pid for pid in (p.pid for p in processes.listing()) if str(self.home) in " ".join(words_of(pid))
        ]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for job in ("small", "small-2", "small-3", "other"):
            if self.nodes(job):
                self.group.purge(f"gpucloud-{job}")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def command_line(folder: Path, **environment: str) -> Iterator[CommandLine]:
    line = CommandLine(folder, **environment)
    try:
        yield line
    finally:
        line.close()


def until(holds: Callable[[], object], what: str | Callable[[], str], limit_s: float = 90.0):
    """Return what `holds` returns once it is true; `what` was waited for, and may say how it stands at last."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)
    return found


def weights(line: CommandLine, job="small") -> str:
    """The hash that the script printed at its end."""
    text = line.run("logs", job, "--rank", "0").stdout
    return next(row.split()[1] for row in reversed(text.splitlines()) if row.startswith("weights "))


def undisturbed_weights(folder: Path, job: Callable[[CommandLine], str], limit_s: float) -> str:
    """The hash that the job's script prints when nothing befalls the job; `folder` is made for it."""
    folder.mkdir()
    with command_line(folder) as line:
        answer = line.run("train", job(line), "--json", limit_s=limit_s)
        assert answer.code == 0, answer.stderr
        return weights(line)
