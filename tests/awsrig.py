"""The AWS provisioner over the lab: real Terraform, real modules, an emulated AWS; and what it has made there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.aws.bucket import ensure_bucket
from gpucloud.adapters.aws.provision import AwsProvisioner, Sources
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job.spec import AwsChoices, Market
from gpucloud.ports import ClusterSpec
from tests.lab.aws import Lab

REGION = "us-east-1"
GROUP = "us-east-1/gpucloud-digits"
STORE = "s3://gpucloud-123456789012-us-east-1"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILRhZ2dlZCBhbmQgZ29uZSBhcyBhIGtleSBmb3IgbGFi"
SPEC = ClusterSpec(
    name="gpucloud-digits",
    region=REGION,
    zones=("us-east-1a", "us-east-1b"),
    node_type="g4dn.xlarge",
    market=Market.SPOT,
    tags=(("gpucloud:job", "digits"), ("project", "vision")),
    public_key=KEY,
    store=STORE,
    image="ami-0123456789abcdef0",
)
ALERT = AwsChoices(alert_email="who@example.com", alert_usd=Decimal(250))
INSTALL = "install Terraform 1.10 or newer: https://developer.hashicorp.com/terraform/install"

BASE = {"vpc": 1, "subnet": 6, "gateway": 1, "table": 1, "endpoint": 1, "firewall": 1, "role": 1}
WHOLE = {**BASE, "firewall": 2, "template": 1, "key": 1, "group": 1, "role": 2, "profile": 1}

_CHANGES = (
    *("Create", "Put", "Modify", "Update", "Delete", "Authorize", "Revoke", "Attach", "Detach", "Associate"),
    *("Add", "Import", "Set"),
)


def first_boot(*, store_url: str, cluster: str, region: str) -> str:
    """A first-boot script that does nothing."""
    return f"#!/bin/sh\n# {store_url} {cluster} {region}\n"


def provisioner(
    home: Path,
    choices: AwsChoices | None = None,
    *,
    store: str = STORE,
    env: Mapping[str, str] | None = None,
    tools: Callable[[], None] = lambda: None,
) -> AwsProvisioner:
    """The adapter in this process's AWS environment; `home` is one machine's folder."""
    aws = Aws()
    return AwsProvisioner(
        aws,
        home=home,
        choices=choices or AwsChoices(),
        store_url=store,
        sources=Sources(
            bucket=lambda region: ensure_bucket(aws, region),
            user_data=first_boot,
            image=lambda region: "ami-0123456789abcdef0",
            root_device=lambda image, region: "/dev/xvda",
            ssh_cidr=lambda: "203.0.113.7/32",
            session_tools=tools,
        ),
        env=env,
    )


def quiet(line: str) -> None:
    """A story that nobody listens to."""


def ids(lab: Lab) -> dict[str, list[str]]:
    """What stands in the region, by kind, each by the id that AWS gave it; the default network is left out."""
    ec2, mine = lab.client("ec2"), [{"Name": "tag:gpucloud:managed", "Values": ["true"]}]
    groups = lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    iam = lab.client("iam")
    found = {
        "vpc": [one["VpcId"] for one in ec2.describe_vpcs(Filters=mine)["Vpcs"]],
        "subnet": [one["SubnetId"] for one in ec2.describe_subnets(Filters=mine)["Subnets"]],
        "gateway": [
            one["InternetGatewayId"] for one in ec2.describe_internet_gateways(Filters=mine)["InternetGateways"]
        ],
        "table": [one["RouteTableId"] for one in ec2.describe_route_tables(Filters=mine)["RouteTables"]],
        "endpoint": [
            one["VpcEndpointId"]
            for one in ec2.describe_vpc_endpoints(Filters=mine)["VpcEndpoints"]
            if one["State"] != "deleted"
        ],
        "firewall": [one["GroupId"] for one in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]],
        "template": [one["LaunchTemplateId"] for one in ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"]],
        "key": [one["KeyName"] for one in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]],
        "group": [one["AutoScalingGroupARN"] for one in groups],
        "role": [one["RoleId"] for one in iam.list_roles()["Roles"] if one["RoleName"].endswith(f"-{REGION}")],
        "profile": [
            one["InstanceProfileId"]
            for one in iam.list_instance_profiles()["InstanceProfiles"]
            if one["InstanceProfileName"].endswith(f"-{REGION}")
        ],
    }
    return {kind: sorted(found[kind]) for kind in found}


def counts(standing: dict[str, list[str]]) -> dict[str, int]:
    """How many there are of each kind that there is any of."""
    return {kind: len(standing[kind]) for kind in standing if standing[kind]}


def instances(lab: Lab) -> list[str]:
    """Every instance that there ever was."""
    reservations = lab.client("ec2").describe_instances()["Reservations"]
    return [one["InstanceId"] for reservation in reservations for one in reservation["Instances"]]


def actions(lab: Lab, since: int) -> list[str]:
    """What was asked of AWS after its first `since` calls."""
    return [call.action for call in lab.calls[since:]]


def changing(lab: Lab, since: int) -> list[str]:
    """The calls among them that change something."""
    return [action for action in actions(lab, since) if action.startswith(_CHANGES)]


def end_everything_of(home: Path) -> None:
    """SIGKILL every process that works in this home: Terraform, its providers and its keeper."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").readlink().is_relative_to(home):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
