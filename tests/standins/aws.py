"""The whole command line on the emulated AWS, its machines real SSH servers."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.statements import Uses
from tests.commandline import CommandLine
from tests.iam.printed import let_as_printed
from tests.lab.aws import Lab
from tests.lab.aws.machines import Machines
from tests.lab.aws.world import ACCESS_KEY

# An emulated cloud may be asked more often; a notice runs in seconds.
QUICK = {"GPUCLOUD_AWS_POLL_S": "0.3"}
BUDGET = "20 USD"
_THROTTLED = {
    "ec2": ("RequestLimitExceeded", 503),
    "autoscaling": ("Throttling", 400),
    "s3": ("SlowDown", 503),
    "iam": ("Throttling", 400),
    "sts": ("Throttling", 400),
    "ssm": ("ThrottlingException", 400),
    "servicequotas": ("TooManyRequestsException", 400),
}
_IMPATIENT = """
from dataclasses import replace
from datetime import timedelta
import gpucloud.wiring.aws as aws
from gpucloud.__main__ import main
aws._LIMITS = replace(aws._LIMITS, **{name: timedelta(seconds=s) for name, s in GIVEN.items()})
main()
"""


class Line(CommandLine):
    """The command line, with other limits than a real cloud's where a test names some: seconds by name."""

    limits: dict[str, float] | None = None

    def argv(self, *arguments: str) -> list[str]:
        if not self.limits:
            return super().argv(*arguments)
        return [sys.executable, "-c", _IMPATIENT.replace("GIVEN", repr(self.limits)), *arguments]


@dataclass
class Account:
    """An AWS account of its own, and the command line of somebody who may use it."""

    lab: Lab
    line: Line
    before: tuple[str, ...]
    bucket = "gpucloud-123456789012-us-east-1"

    @property
    def running(self) -> list[str]:
        """The ids of instances that cost money."""
        return [one.id for one in self._listed() if one.state in ("pending", "running")]

    @property
    def story(self) -> str:
        """What the command that was started last has said on stderr so far."""
        return (self.line.folder / "err").read_text()

    @property
    def left(self) -> set[str]:
        """The kinds of things that were made and stand."""
        return {line.split()[0] for line in set(self.lab.inventory()) - set(self.before)}

    def job(self, name: str = "small", *, wishes: str = "", **changes: object) -> str:
        """Write a small job for AWS and return its file; `wishes` are more of its `resources`."""
        gpus = f"1, {wishes}" if wishes else 1
        return self.line.job(name, **{"budget": BUDGET, "extra": "cloud: aws\n", "gpus": gpus, **changes})

    def ever(self, job: str) -> list[str]:
        """The ids of every instance that the job ever had, ended ones too."""
        return [one.id for one in self.instances(job)]

    def instances(self, job: str) -> list[Any]:
        """The lab's instances of the job, ended ones too."""
        return [one for one in self._listed() if _cluster(one) == f"gpucloud-{job}"]

    def alive(self, job: str) -> list[str]:
        """The ids of the job's instances that cost money."""
        return [one for one in self.ever(job) if one in self.running]

    def state(self, job: str) -> dict[str, Any]:
        """The job's stored state; empty while there is none."""
        s3 = self.lab.client("s3")
        try:
            body = s3.get_object(Bucket=self.bucket, Key=f"jobs/{job}/state.json")["Body"]
        except (s3.exceptions.NoSuchBucket, s3.exceptions.NoSuchKey):
            return {}
        with body:
            return dict(json.loads(body.read()))

    def step(self, job: str) -> int:
        """The last step that the stored state knows of the newest attempt; 0 before the first."""
        attempts = self.state(job).get("attempts") or [{}]
        return int(attempts[-1].get("last_step") or 0)

    def asked(self) -> int:
        """How many calls were made with the user's own key."""
        return sum(call.key == ACCESS_KEY for call in self.lab.calls)

    def has_asked(self, action: str) -> bool:
        """Whether a call was answered."""
        return any(call.action == action and call.status == 200 for call in self.lab.calls)

    def commits(self, job: str) -> int:
        """How many checkpoints were committed."""
        place = f"jobs/{job}/checkpoints/commit/"
        puts = (c for c in self.lab.calls if c.action == "PutObject" and c.status == 200)
        return sum(str(call.params["Key"]).startswith(place) for call in puts)

    def throttle(self, *, share: float, seconds: float) -> None:
        """Have AWS refuse a share of all calls, each service in its own words, for a time."""
        for service, (code, status) in _THROTTLED.items():
            self.lab.faults.add(service=service, code=code, status=status, share=share, seconds=seconds)

    def passes(self, job: str) -> int:
        """How often the job's supervisor has listed its machines since the last one was started."""
        cluster = f"gpucloud-{job}"
        count = 0
        for call in self.lab.calls:
            said = call.params.values()
            if call.action in ("LaunchInstances", "SetDesiredCapacity") and cluster in said:
                count = 0
            count += call.action == "DescribeInstances" and cluster in said
        return count

    def life(self, instance_id: str) -> tuple[float, float]:
        """When an instance was started and when it ended, in seconds since the epoch; now while it runs."""
        with self.lab.world.lock:  # a list that is told as of earlier takes newer ones out meanwhile
            life = self.lab.world.instance(instance_id).lab
        return life.born.timestamp(), life.died.timestamp() if life.died else time.time()

    def zone_of(self, instance_id: str) -> str:
        """Where an instance is, or was."""
        with self.lab.world.lock:
            return str(self.lab.world.instance(instance_id).placement.zone)

    def interrupt(self, process: subprocess.Popen[str]) -> int:
        """End a command as a pipeline would and return its exit code."""
        process.send_signal(signal.SIGTERM)
        return process.wait(60)

    def recover(self) -> None:
        """End what was started and lift every fault and limit."""
        for process in self.line.started:
            process.kill()
            process.wait()
        self.line.started.clear()
        self.lab.faults.clear()
        for switches in (self.lab.capacity, self.lab.quotas, self.lab.deaths):
            switches.clear()
        self.lab.delays.clear()
        self.lab.has_launch_instances, self.lab.stale_s = True, 0.0
        self.line.limits = None

    def _listed(self) -> list[Any]:
        with self.lab.world.lock:
            return list(self.lab.world.instances())


@contextlib.contextmanager
def account(
    folder: Path, *, notice_s: float = 6.0, real: bool = True, uses: Uses | None = None, makes_roles: bool = True
) -> Iterator[Account]:
    """Give an account with nothing in it but what `gpucloud iam policy` prints, which judges every call.

    `real` machines, else instances that run by themselves. `uses` is what of the user's own the policies name; who
    does not make roles (`makes_roles`) has a profile of his own among it.
    """
    machines = (lambda place, url: Machines(place, endpoint_url=url, region="us-east-1")) if real else None
    with Lab(folder / "aws", machines=machines, notice_s=notice_s) as lab:
        line = Line(folder, **{**lab.settings, **QUICK})
        line.home = Path(lab.settings["GPUCLOUD_HOME"])
        let_as_printed(lab, uses=uses, makes_roles=makes_roles)
        try:
            yield Account(lab, line, lab.inventory())
        finally:
            line.close()


def _cluster(instance: Any) -> str:
    return next((str(tag["value"]) for tag in instance.get_tags() if tag["key"] == "gpucloud:cluster"), "")


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
