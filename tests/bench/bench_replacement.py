"""Measures how long a replacement node needs: `python -m tests.bench.bench_replacement`. Needs PyPI, or pip's mirror.

The job's `setup` installs two real small wheels. Once the replaced node finds the layer that the first nodes made
(nodes of the embedded fleet share it), once nodes make another layer from a warm cache.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.bench.bench_main_job import newest
from tests.bench.figures import figure
from tests.commandline import CommandLine, command_line, until

LIMIT_S = 20.0
SETUP = "setup: pip install six iniconfig{}\n"


def main() -> int:
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    # What pip knows of mirrors; the nodes of the fleet get nothing else of the caller's environment.
    known = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    env = "env: {" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in known.items()) + "}\n"
    with tempfile.TemporaryDirectory() as name, command_line(Path(name)) as line:
        good = replaced(line, "replacement", SETUP.format("") + env)
        good &= warm(line, "replacement_new_layer", SETUP.format(" && true") + env)
    return 0 if good else 1


def replaced(line: CommandLine, name: str, extra: str) -> bool:
    """From the launch of a node in a lost one's place, before its first SSH, to torchrun started."""
    train = line.start("train", line.job(steps=80, step_s=0.05, extra=extra), "--json")
    job = until(lambda: newest(line), "a running job")
    until(lambda: line.step(job) >= 12, "step 12")
    line.group.interrupt(f"gpucloud-{job}", line.nodes(job)[-1], notice=False)
    assert train.wait(timeout=150) == 0, (line.folder / "err").read_text()
    state = line.state(job)
    attempt = state["attempts"][1]
    launched = max(launched_at(state, member["node_id"]) for member in attempt["members"])
    phases(line, job, 2)
    return figure(f"{name}_launch_to_torchrun_s", span(launched, attempt["started_at"]), LIMIT_S)


def warm(line: CommandLine, name: str, extra: str) -> bool:
    """The same for the first nodes of a job whose layer is new, from a warm cache."""
    started = time.monotonic()
    answer = line.run("train", line.job("other", steps=3, extra=extra), "--json")
    assert answer.code == 0, answer.stderr
    figure(f"{name}_whole_job_s", time.monotonic() - started)
    state = line.state("other")
    attempt = state["attempts"][0]
    launched = max(launched_at(state, member["node_id"]) for member in attempt["members"])
    phases(line, "other", 1)
    return figure(f"{name}_launch_to_torchrun_s", span(launched, attempt["started_at"]), LIMIT_S)


def phases(line: CommandLine, job: str, attempt: int) -> None:
    """Print the seconds of each phase, as the attempt's lock record holds them."""
    found = next(line.folder.glob(f"**/jobs/{job}/attempts/{attempt:04d}/lock.json"))
    for node, took in json.loads(found.read_text())["seconds"].items():
        print(node, took)


def launched_at(state: dict, node_id: str) -> str:
    return next(interval["launched_at"] for interval in state["nodes"] if interval["node_id"] == node_id)


def span(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


if __name__ == "__main__":
    sys.exit(main())
