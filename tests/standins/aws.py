"""The whole command line on the emulated AWS, its machines real SSH servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.commandline import CommandLine
from tests.lab.aws import Lab
from tests.lab.aws.machines import Machines

# An emulated cloud may be asked more often; a notice runs in seconds.
QUICK = {"GPUCLOUD_AWS_POLL_S": "0.3"}
BUDGET = "20 USD"


@dataclass
class Account:
    """An AWS account of its own, and the command line of somebody who may use it."""

    lab: Lab
    line: CommandLine

    @property
    def running(self) -> list[str]:
        """The ids of instances that cost money."""
        reply = self.lab.client("ec2").describe_instances()
        return [
            instance["InstanceId"]
            for reservation in reply["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] in ("pending", "running")
        ]

    def job(self, **changes: object) -> str:
        """Write a small job for AWS and return its file."""
        return self.line.job(**{"budget": BUDGET, "extra": "cloud: aws\n", **changes})


@contextlib.contextmanager
def account(folder: Path, *, notice_s: float = 6.0, real: bool = True) -> Iterator[Account]:
    """Give an account with nothing in it; `real` machines, else instances that run by themselves."""
    machines = (lambda place, url: Machines(place, endpoint_url=url, region="us-east-1")) if real else None
    with Lab(folder / "aws", machines=machines, notice_s=notice_s) as lab:
        line = CommandLine(folder, **{**lab.settings, **QUICK})
        line.home = Path(lab.settings["GPUCLOUD_HOME"])
        try:
            yield Account(lab, line)
        finally:
            line.close()


def when(holds: Callable[[], object], then: Callable[[], None], *, stop: threading.Event) -> threading.Thread:
    """Start a thread that does `then` once it `holds`."""

    def watch() -> None:
        while not stop.wait(0.1):
            if holds():
                then()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
