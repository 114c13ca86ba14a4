"""A notice is seen within 3 s, and the ranks are asked to save."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from gpucloud.adapters.packaging import package_zip
from tests.commandline import CommandLine, command_line, until, weights
from tests.prove.goal import Figure, Form, Goal
from tests.standins.agent_node import AgentNode, wait_until
from tests.standins.metadata_service import MetadataService

_AGENTS = {Form.SHORT: 2, Form.LONG: 20}
_RUNS = 5
_NOTICED_S = 3.0
_NOTICE = '{"action": "terminate", "time": "2026-11-20T12:02:00Z"}'


def run(form: Form) -> Iterator[Figure]:
    seen = [_noticed_after(seed) for seed in range(_AGENTS[form])]
    yield Figure(name="notice", value=sum(seconds is None for seconds in seen), limit=0)
    if form is Form.LONG:
        worst = max(seconds for seconds in seen if seconds is not None)
        yield Figure(name="notice.by-the-agent-worst-s", value=worst, limit=_NOTICED_S)
        yield from _measured()


def _noticed_after(seed: int) -> float | None:
    """Seconds from the notice to the wish to save in the attempt's folder; None when it is not there in the end."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, MetadataService() as service:
        package = Path(name) / "gpucloud.zip"
        package.write_bytes(package_zip()[0])
        node = AgentNode(Path(name), package)
        node.env.pop("AWS_EC2_METADATA_DISABLED")
        node.env["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = service.endpoint
        try:
            node.start()
            node.want(node.launch(1, "/bin/sh", "-c", "exec sleep 600"))
            node.wait_running(1)
            time.sleep(dice.uniform(0.0, 1.0))  # anywhere between two looks
            service.action, posted = _NOTICE, time.monotonic()
            wish = node.folder(1) / "stop.json"
            wait_until(wish.exists, "the wish to save", 60.0)
            return time.monotonic() - posted if json.loads(wish.read_text())["reason"] == "notice" else None
        except AssertionError as error:
            sys.stderr.write(f"notice: seed {seed}: {error}\n")
            return None
        finally:
            node.destroy()


def _measured() -> Iterator[Figure]:
    noticed, lost, ends = [], 0, set()
    with tempfile.TemporaryDirectory() as name, command_line(Path(name)) as line:
        for number in range(_RUNS):
            seconds, steps, end = _take(line, f"taken-{number}")
            noticed.append(seconds)
            lost += steps
            ends.add(end)
    yield Figure(name="notice.noticed-worst-s", value=max(noticed), limit=_NOTICED_S)
    yield Figure(name="notice.lost-steps", value=lost, limit=0)
    yield Figure(name="notice.bits-differ", value=len(ends) - 1, limit=0)


def _take(line: CommandLine, job: str) -> tuple[float, int, str]:
    """Return the seconds from the notice to its being written down, the steps that were done twice, and the end."""
    train = line.start("train", line.job(job, steps=60, step_s=0.05))
    until(lambda: line.step(job) >= 12, "step 12")
    victim, posted = line.nodes(job)[-1], datetime.now().astimezone()
    line.group.interrupt(f"gpucloud-{job}", victim, notice=True)
    assert train.wait(timeout=150) == 0, (line.folder / "err").read_text()
    (taken,) = line.state(job)["interruptions"]
    first, second = line.state(job)["attempts"]
    seconds = (datetime.fromisoformat(taken["noticed_at"]) - posted).total_seconds()
    return seconds, first["last_step"] + 1 - second["first_step"], weights(line, job)


GOAL = Goal(
    promise="a notice is seen within 3 s, and every rank saves and leaves: no step is lost",
    real="the agent, IMDSv2 over HTTP; long form: SSH nodes, torchrun, checkpoints, a node taken after its notice",
    simulated="the metadata service and the cloud that takes the node, 4 s after its notice in place of 120 s",
    run=run,
)
