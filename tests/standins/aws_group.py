"""A cluster on the emulated AWS as `terraform/aws/cluster` makes it, by plain calls; and its node group."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.adapters.aws.nodes.listing import drill_role
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job.spec import Access, Market
from gpucloud.domain.node.node import GroupView, NodeState
from gpucloud.domain.offer import EfaLayout, Pool
from tests.lab.aws import Lab

GROUP = "us-east-1/gpucloud-digits"
CLUSTER = "gpucloud-digits"
SPOT = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
ON_DEMAND = Pool(instance_type="g5.xlarge", zone="us-east-1b", market=Market.ON_DEMAND)
ZONES = ("us-east-1a", "us-east-1b")

_FOR_DRILLS = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"},
        ],
    }
)


def make_cluster(lab: Lab, name: str = CLUSTER, *, region: str = "us-east-1") -> None:
    """Make network, launch template and an empty group."""
    ec2, scaling = lab.client("ec2", region), lab.client("autoscaling", region)
    lab.client("iam").create_role(RoleName=drill_role(region), AssumeRolePolicyDocument=_FOR_DRILLS)
    vpc = ec2.create_vpc(CidrBlock="10.42.0.0/16")["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.42.{number}.0/24", AvailabilityZone=zone)["Subnet"][
            "SubnetId"
        ]
        for number, zone in enumerate(ZONES)
    }
    tags = [{"Key": "gpucloud:managed", "Value": "true"}, {"Key": "gpucloud:cluster", "Value": name}]
    made = ec2.create_launch_template(
        LaunchTemplateName=f"{name}-efa0",
        LaunchTemplateData={
            "ImageId": "ami-12c6146b",
            "InstanceType": "g4dn.xlarge",
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
        },
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
    )
    specification = {"LaunchTemplateId": made["LaunchTemplate"]["LaunchTemplateId"], "Version": "1"}
    listed = ",".join(f"{zone}={subnet}" for zone, subnet in subnets.items())
    scaling.create_auto_scaling_group(
        AutoScalingGroupName=name,
        MinSize=0,
        MaxSize=0,
        DesiredCapacity=0,
        VPCZoneIdentifier=",".join(subnets.values()),
        LaunchTemplate=specification,
        TerminationPolicies=["NewestInstance"],
        Tags=[{**tag, "PropagateAtLaunch": False} for tag in [*tags, {"Key": "gpucloud:subnets", "Value": listed}]],
    )
    scaling.suspend_processes(AutoScalingGroupName=name, ScalingProcesses=["AZRebalance"])


@contextlib.contextmanager
def rented(folder: Path, **choices: Any) -> Iterator[Lab]:
    """Give an emulated AWS with one empty cluster in it, met by whatever boto3 opens in this process."""
    with Lab(folder, **choices) as lab, pytest.MonkeyPatch.context() as patch:
        for name, value in lab.settings.items():
            patch.setenv(name, value)
        make_cluster(lab)
        yield lab


def key_of(_region: str, _cluster: str, instance_id: str) -> str:
    """Return a host key, known at once."""
    return f"ssh-ed25519 AAAA{instance_id}"


@dataclass
class Rig:
    """The adapter over the lab, believing a view for no longer than `interval_s`."""

    lab: Lab
    aws: Aws = field(default_factory=Aws)
    interval_s: float = 0.0
    settle_s: float = 0.02
    access: Access = Access.PUBLIC
    host_key: Callable[[str, str, str], str | None] = key_of

    def group(self) -> AwsNodeGroup:
        """Return the adapter as a new process has it."""
        return AwsNodeGroup(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Return what the adapter is made with."""
        return {
            "aws": self.aws,
            "user": "ubuntu",
            "access": self.access,
            "host_key": self.host_key,
            "efa_of": lambda _type: EfaLayout(),
            "interval_s": self.interval_s,
            "settle_s": self.settle_s,
        }


def refusals(view: GroupView) -> list[tuple[str, str]]:
    """Return (fault, code) of every refusal."""
    return [(refusal.fault.value, refusal.code) for refusal in view.refusals]


def until(nodes: AwsNodeGroup, wanted: Callable[[GroupView], bool], limit_s: float = 15.0) -> GroupView:
    """Return the group once it is as wanted."""
    deadline = time.monotonic() + limit_s
    while not wanted(view := nodes.describe(GROUP)):
        assert time.monotonic() < deadline, f"never so; last seen: {view}"
        time.sleep(0.02)
    return view


def runs(count: int) -> Callable[[GroupView], bool]:
    """Return whether so many machines run."""
    return lambda view: sum(node.state is NodeState.RUNNING for node in view.nodes) == count
