"""Measures how often a supervisor that has nothing to do asks AWS: `python -m tests.bench.bench_aws_traffic`.

A whole job on an emulated AWS, two real machines, AWS's list looked at every three seconds as it is outside of tests.
Calls are told apart by who signs them: the machines have keys of their own.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.bench.figures import figure
from tests.commandline import until
from tests.lab.aws import Call
from tests.lab.aws.lab import ACCESS_KEY, OWN_AGENT
from tests.standins.aws import Account, account

WINDOW_S = 40.0
STEPS = 20_000
LIMIT_CLOUD_PER_MINUTE = 66.0  # group, machines and shut-off, every three seconds


def main() -> int:
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name, account(Path(name)) as aws:
        del aws.line.env["GPUCLOUD_AWS_POLL_S"]
        train = aws.line.start("train", aws.job(steps=STEPS, step_s=0.1, every="30 s"))
        until(lambda: trains(aws) or train.poll() is not None, "a job that trains")
        assert train.poll() is None, (Path(name) / "err").read_text()
        before = len(aws.lab.calls)
        time.sleep(WINDOW_S)
        calls = aws.lab.calls[before:]
        good = tell(calls)
        train.kill()
        aws.line.run("down", "small")
    return 0 if good else 1


def trains(aws: Account) -> bool:
    """Whether the job has begun to train: its machines have written a checkpoint."""
    return any(call.action == "PutObject" and "/checkpoints/" in call.params["Key"] for call in aws.lab.calls)


def tell(calls: list[Call]) -> bool:
    """Print calls per minute, by who is asked."""
    ours = [call for call in calls if call.key == ACCESS_KEY and OWN_AGENT not in call.agent]
    cloud = [call for call in ours if call.service != "s3"]
    store = [call for call in ours if call.service == "s3"]
    for name, number in sorted(Counter(map(kind, ours)).items()):
        figure(f"aws_supervisor_{name}_per_minute", per_minute(number))
    figure("aws_machines_calls_per_minute", per_minute(len([call for call in calls if call.key != ACCESS_KEY])))
    figure("aws_supervisor_store_calls_per_minute", per_minute(len(store)))
    return figure("aws_supervisor_cloud_calls_per_minute", per_minute(len(cloud)), LIMIT_CLOUD_PER_MINUTE)


def kind(call: Call) -> str:
    """Return the action, of an object with its place in the job's folder: `PutObject_logs`."""
    parts = str(call.params.get("Key", "")).split("/")
    return f"{call.action}_{parts[2].partition('.')[0]}" if call.service == "s3" and len(parts) > 2 else call.action


def per_minute(number: int) -> float:
    return number * 60 / WINDOW_S


if __name__ == "__main__":
    sys.exit(main())
