"""The AWS provisioner over the lab: real Terraform, real modules, an emulated AWS."""

from __future__ import annotations

from pathlib import Path

from gpucloud.adapters.aws.bucket import ensure_bucket
from gpucloud.adapters.aws.provision import AwsProvisioner, Sources
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job import AwsChoices, Market
from gpucloud.ports import ClusterSpec

REGION = "us-east-1"
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


def first_boot(*, store_url: str, cluster: str, region: str) -> str:
    """A first-boot script that does nothing."""
    return f"#!/bin/sh\n# {store_url} {cluster} {region}\n"


def provisioner(home: Path, choices: AwsChoices | None = None, *, store: str = STORE) -> AwsProvisioner:
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
        ),
    )
