"""After `down` nothing of a job is left, of any kind; and `down` that leaves something says so."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.commandline import CommandLine, command_line, until
from tests.prove.goal import Figure, Form, Goal
from tests.standins.aws import account


def run(form: Form) -> Iterator[Figure]:
    """Yield what `down` left: of a job on the embedded fleet, and in the long form of one on the emulated AWS."""
    left, downs = list(_embedded()), 1
    if form is Form.LONG:
        left += _aws()
        downs += 1
    for line in left:
        print(f"inventory: left over: {line}", file=sys.stderr)
    yield Figure(name="inventory", value=len(left), limit=0)
    yield Figure(name="inventory.downs", value=downs, limit=2 if form is Form.LONG else 1, least=True)


def _embedded() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, command_line(Path(folder)) as line:
        _down_in_mid_run(line, lambda: line.step() >= 1)
        yield from line.nodes()
        if line.group.describe("gpucloud-small").exists:
            yield "the node group"
        for part in ("cloud/groups", "terraform"):  # of Terraform, an empty lock file stays: nothing of the cloud's
            yield from (str(path) for path in (line.home / part).glob("gpucloud-small*") if path.suffix != ".lock")
        yield from _processes(line)


def _processes(line: CommandLine) -> Iterator[str]:
    try:
        until(lambda: not line.processes(), "processes are gone", 30)
    except AssertionError:
        yield from (f"process {pid}" for pid in line.processes())


def _aws() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, account(Path(folder)) as aws:
        file = aws.job(steps=2000, step_s=0.05)
        base = {"vpc", "subnet", "internet-gateway", "route-table", "vpc-endpoint", "security-group", "role", "bucket"}
        train = aws.line.start("train", file)
        until(lambda: aws.step("small") >= 1, "step 1", 300)
        yield from _down(aws.line)
        train.wait(timeout=120)
        yield from (
            line
            for line in sorted(set(aws.lab.inventory()) - set(aws.before))
            if "small" in line or line.split()[0] not in base
        )


def _down_in_mid_run(line: CommandLine, runs: Callable[[], bool]) -> None:
    train = line.start("train", line.job(steps=2000, step_s=0.05))
    until(runs, "the job runs")
    for complaint in _down(line):
        raise AssertionError(complaint)
    train.wait(timeout=120)


def _down(line: CommandLine) -> Iterator[str]:
    answer = line.run("down", "small", "--json", limit_s=300)
    if answer.code != 0 or answer.json["left_over"] != []:
        yield f"down ended with {answer.code}: {answer.stdout} {answer.stderr}"


GOAL = Goal(
    promise="after down nothing of a job is left, of any kind, on the embedded fleet and on the emulated AWS",
    real="the command line, Terraform, nodes and their processes; what lists the rest is not what removed it",
    simulated="AWS (long form only): the lab; its own inventory is compared with that before the job",
    run=run,
)
