"""Measures `up` on an emulated AWS, 1 to 64 machines, beside Terraform's floor: `python -m tests.bench.bench_aws_up`.

A standing base and bucket; from the cluster to the machines that run, in seconds and in calls of AWS. The machines run
by themselves and take no time to start: what is measured is gpucloud and Terraform. Quiet cores matter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from unittest import mock

from gpucloud.adapters.home import Home
from gpucloud.adapters.terraform import find_terraform
from gpucloud.domain.job.spec import AwsChoices, Market, Resources
from gpucloud.domain.node.node import GroupView, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import ClusterSpec
from gpucloud.store import open_store
from gpucloud.wiring.aws import AwsCloud
from tests.awsrig import KEY
from tests.bench.figures import figure
from tests.lab.aws import Call, Lab
from tests.lab.aws.lab import OWN_AGENT

SIZES = (1, 4, 16, 64)
POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
ROUND_TRIP_S = 0.02  # to a region that is not far, for every call
TRAFFIC_S = 12.0
PERIOD_S, POLL_S = 0.5, 3.0  # how often a supervisor looks, and how often AWS is asked then
LIMIT_64_TO_1 = 1.5
LIMIT_AGAIN_TO_FLOOR = 1.1
LIMIT_PER_MINUTE = 66.0  # group, machines and shut-off, every three seconds


@dataclass
class Caller:
    """gpucloud on one machine that has done nothing yet, but for what its home remembers."""

    lab: Lab
    home: Path
    poll_s: float = 0.1
    cloud: AwsCloud = field(init=False)

    def __post_init__(self) -> None:
        self.cloud = AwsCloud(Home(self.home), AwsChoices(), Resources())
        os.environ["GPUCLOUD_AWS_POLL_S"] = str(self.poll_s)
        self.store = open_store(self.cloud.default_store())
        self.group = self.cloud.group(self.store)

    def provision(self, cluster: str) -> str:
        provisioner = self.cloud.provisioner(self.store)
        spec = ClusterSpec(
            name=cluster,
            region=POOL.region,
            zones=(POOL.zone,),
            node_type=POOL.instance_type,
            market=POOL.market,
            tags=(("gpucloud:job", cluster.removeprefix("gpucloud-")),),
            public_key=KEY,
            store=self.store.url,
            image=self.image,
        )
        return provisioner.ensure(spec, story=lambda _line: None)

    def start(self, name: str, nodes: int) -> None:
        """Arm, set the level, and wait until all of it runs."""
        self.group.arm(name, datetime.now(timezone.utc) + timedelta(minutes=30))
        self.group.resize(name, nodes, POOL)
        self.wait(name, lambda view: len([n for n in view.nodes if n.state is NodeState.RUNNING]) == nodes)

    def wait(self, name: str, enough: Callable[[GroupView], bool]) -> None:
        until = time.monotonic() + 60
        while not enough(self.group.describe(name)):
            assert time.monotonic() < until, self.group.describe(name)
            time.sleep(0.05)

    def publish_keys(self, name: str) -> None:
        """Do what the first boot of every machine does."""
        cluster = name.partition("/")[2]
        for node in self.group.describe(name).nodes:
            self.store.put(f"clusters/{cluster}/hosts/AROABENCH:{node.id}", f"{KEY}\n".encode())

    @cached_property
    def image(self) -> str:
        """The machine image, as the job's state pins it."""
        return self.cloud.provisioner(self.store).image(POOL.region)


@dataclass
class Measured:
    """How long something took, and what it asked of AWS."""

    seconds: float = 0.0
    calls: tuple[Call, ...] = ()

    @property
    def of_terraform(self) -> int:
        """How many calls were Terraform's."""
        return sum("Terraform" in call.agent for call in self.calls)


@contextlib.contextmanager
def measured(lab: Lab) -> Iterator[Measured]:
    found, before, started = Measured(), len(lab.calls), time.monotonic()
    yield found
    found.seconds = time.monotonic() - started
    found.calls = tuple(call for call in lab.calls[before:] if OWN_AGENT not in call.agent)


def main() -> int:
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    assert find_terraform() is not None, (
        "install Terraform 1.10 or newer: https://developer.hashicorp.com/terraform/install"
    )
    with tempfile.TemporaryDirectory() as name, Lab(Path(name) / "lab") as lab:
        lab.world.boot_s = 0.0
        lab.delays["*"] = ROUND_TRIP_S
        with mock.patch.dict(os.environ, {**lab.settings}):
            os.environ.pop("AWS_PROFILE", None)
            return 0 if all([*results(lab, Path(name) / "home")]) else 1


def results(lab: Lab, home: Path) -> Iterator[bool]:
    with measured(lab) as base:
        caller = Caller(lab, home)
        caller.cloud.make_store()
        caller.provision("gpucloud-first")
    figure("aws_first_up_base_and_cluster_s", base.seconds)
    ups = {nodes: up(lab, home, nodes) for nodes in SIZES}
    yield figure("aws_up_64_to_1_seconds_ratio", ups[64].seconds / ups[1].seconds, LIMIT_64_TO_1)
    yield figure("aws_up_64_to_1_calls_ratio", len(ups[64].calls) / len(ups[1].calls), LIMIT_64_TO_1)
    floor = terraform_floor(lab, home)
    figure("aws_up_1_to_terraform_floor_ratio", ups[1].seconds / floor[0])
    yield from again(lab, home, floor[1])
    yield traffic(lab, home)


def up(lab: Lab, home: Path, nodes: int) -> Measured:
    """From nothing but the base to machines that run; then how their keys are found."""
    caller = Caller(lab, home)
    with measured(lab) as whole:
        with measured(lab) as made:
            name = caller.provision(f"gpucloud-bench{nodes}")
        with measured(lab) as level:
            caller.start(name, nodes)
    figure(f"aws_up_{nodes}_s", whole.seconds)
    figure(f"aws_up_{nodes}_calls", len(whole.calls))
    figure(f"aws_up_{nodes}_terraform_calls", made.of_terraform)
    figure(f"aws_up_{nodes}_level_s", level.seconds)
    figure(f"aws_up_{nodes}_level_calls", len(level.calls))
    keys(lab, caller, name, nodes)
    return whole


def keys(lab: Lab, caller: Caller, name: str, nodes: int) -> None:
    """Machines that have not told their keys yet cost little; those that have are known at once."""
    caller.group.describe(name)
    time.sleep(1.1)
    with measured(lab) as looked:
        caller.group.describe(name)
    caller.publish_keys(name)
    time.sleep(1.1)
    with measured(lab) as found:
        caller.wait(name, lambda view: all(node.host_key for node in view.nodes))
    figure(f"aws_look_at_{nodes}_without_keys_s", looked.seconds)
    figure(f"aws_look_at_{nodes}_without_keys_calls", len(looked.calls))
    figure(f"aws_keys_of_{nodes}_s", found.seconds)
    figure(f"aws_keys_of_{nodes}_calls", len(found.calls))


def terraform_floor(lab: Lab, home: Path) -> tuple[float, float]:
    """Seconds of Terraform alone for the same cluster, state on the disk: made, and found unchanged."""
    folder = home.parent / "floor"
    folder.mkdir()
    for path in sorted((home / "terraform" / "gpucloud-bench1-us-east-1").glob("*.tf*")):
        if path.is_file() and path.name != "backend.tf.json":
            (folder / path.name).write_text(path.read_text().replace("gpucloud-bench1", "gpucloud-floor"))
    first, unchanged = (terraform_alone(lab, folder) for _ in range(2))
    figure("terraform_floor_s", first.seconds)
    figure("terraform_floor_calls", len(first.calls))
    figure("terraform_floor_unchanged_s", unchanged.seconds)
    figure("terraform_floor_unchanged_calls", len(unchanged.calls))
    return first.seconds, unchanged.seconds


def terraform_alone(lab: Lab, folder: Path) -> Measured:
    plugins = lab.settings.get("GPUCLOUD_TF_PLUGIN_DIR")
    init = ["init", "-input=false", *([f"-plugin-dir={plugins}"] if plugins else [])]
    with measured(lab) as found:
        for words in (init, ["apply", "-input=false", "-auto-approve"]):
            subprocess.run(["terraform", *words], cwd=folder, env=lab.env, check=True, stdout=subprocess.DEVNULL)
    return found


def again(lab: Lab, home: Path, floor_s: float) -> Iterator[bool]:
    """`up` where base and cluster stand unchanged and the machines run."""
    caller = Caller(lab, home)
    with measured(lab) as same:
        caller.start(caller.provision("gpucloud-bench4"), 4)
    figure("aws_up_again_s", same.seconds)
    figure("aws_up_again_calls", len(same.calls))
    yield figure("aws_up_again_to_terraform_unchanged_ratio", same.seconds / floor_s, LIMIT_AGAIN_TO_FLOOR)
    yield figure("aws_up_again_terraform_calls", same.of_terraform, 0)


def traffic(lab: Lab, home: Path) -> bool:
    """How often AWS is asked about 64 machines that run, while a supervisor looks twice a second."""
    caller = Caller(lab, home, poll_s=POLL_S)
    name = f"{POOL.region}/gpucloud-bench64"
    caller.group.describe(name)
    with measured(lab) as found:
        until = time.monotonic() + TRAFFIC_S
        while time.monotonic() < until:
            caller.group.describe(name)
            time.sleep(PERIOD_S)
    return figure("aws_describe_64_calls_per_minute", len(found.calls) / found.seconds * 60, LIMIT_PER_MINUTE)


if __name__ == "__main__":
    sys.exit(main())
