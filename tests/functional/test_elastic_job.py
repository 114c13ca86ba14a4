"""A job on a range of nodes over the embedded fleet: it goes on with fewer, and grows again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commandline import CommandLine, command_line, until
from tests.standins.quick_fleet import quick_fleet

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])

STEPS = 500
# In double precision, without anything random in the model: on another number of ranks only the last bits differ.
TRAIN = f"""
import json, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gpucloud import resume

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
run = resume.init(model=model, optimizer=optimizer, total_steps={STEPS})
x = torch.randn(120, 8, dtype=torch.float64)
for a, b in run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=12):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    time.sleep(float(__import__("os").environ["STEP_S"]))
    run.step(loss=loss)
run.done()
if run.rank == 0:
    print("weights", json.dumps([p.tolist() for p in model.module.parameters()]), flush=True)
dist.destroy_process_group()
"""
JOB = """\
name: small
code: code
run: train.py
resources: {nodes: 2-3, gpus: 1}
checkpoint: {every: 10 steps}
env: {STEP_S: "0.25"}
budget: 5 USD
"""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[CommandLine]:
    with command_line(tmp_path) as one:
        yield one


@pytest.mark.timeout(300)
def test_a_job_that_loses_a_node_for_good_goes_on_with_the_rest_at_once(tmp_path):
    with quick_fleet(tmp_path) as line:
        train = line.start("train", line.quick_job(steps=100, step_s=0.2, nodes="1-2"), "--json")
        commits = line.home / "store" / "jobs" / "small" / "checkpoints" / "commit"
        until(lambda: any(commits.rglob("*.json")), "a commit")
        assert line.run("local", "shortage", "30min").code == 0
        line.group.interrupt("gpucloud-small", line.nodes()[-1], notice=False)

        assert train.wait(timeout=200) == 0, (line.folder / "err").read_text()
        first, second = line.state()["attempts"]
        assert (first["reason"], second["reason"]) == ("lost", "succeeded")
        assert (len(first["members"]), len(second["members"])) == (2, 1)
        (_, first_step), (_, then) = line.history()
        assert first_step == 0 < then
        assert len(line.paid_for()) == 2


@pytest.mark.slow  # minutes: a new machine joins when it has been there for as long as it takes to make up for the stop
@pytest.mark.timeout(420)
def test_a_job_goes_on_with_fewer_nodes_and_grows_again_and_no_step_changes(line):
    code = line.folder / "code"
    code.mkdir()
    (code / "train.py").write_text(TRAIN)
    file = line.folder / "small.yaml"
    file.write_text(JOB)

    train = line.start("train", str(file), "--json")
    until(lambda: line.step() >= 15, "step 15")
    assert line.run("local", "shortage", "30min").code == 0
    line.group.interrupt("gpucloud-small", line.nodes()[-1], notice=False)
    until(lambda: len(line.state()["attempts"]) == 2, "a second attempt")
    before = line.step()
    until(lambda: line.step() > max(before, 25), "steps on two nodes")
    assert line.run("local", "shortage", "0s").code == 0

    assert train.wait(timeout=360) == 0, (line.folder / "err").read_text()
    attempts = line.state()["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["lost", "resized", "succeeded"]
    assert [len(attempt["members"]) for attempt in attempts] == [3, 2, 3]
    assert attempts[2]["first_step"] == attempts[1]["last_step"] + 1
    assert "1 more machine is ready: it goes on with 3 nodes" in (line.folder / "err").read_text()
    log = line.run("logs", "small", "--rank", "0").stdout
    assert "same_samples" in log, log
    assert weights(log) == pytest.approx(undisturbed(line, code), rel=1e-9)


def weights(text: str) -> list[float]:
    """The weights that the script printed at its end, in one list."""
    said = next(row for row in reversed(text.splitlines()) if row.startswith("weights "))
    matrix, bias = json.loads(said.removeprefix("weights "))
    return [*matrix[0], *bias]


def undisturbed(line: CommandLine, code: Path) -> list[float]:
    """What one process alone comes to."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "STEP_S": "0"}
    env = {**os.environ, **line.env, **alone}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=code, env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return weights(done.stdout)
