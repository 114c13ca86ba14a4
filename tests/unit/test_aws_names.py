"""Names that AWS keeps apart by nothing else: what the base has never bears the name of a cluster's part."""

from __future__ import annotations

import re

import pytest

from gpucloud.adapters.aws.nodes.listing import drill_role
from gpucloud.adapters.home import bundled
from gpucloud.adapters.jobfile.values import NAME

REGIONS = ("us-east-1", "ap-southeast-2", "us-gov-west-1", "cn-north-1")
LOCALS = {"local.name": "gpucloud-${var.region}", "local.role": "${var.name}-${var.region}"}


def named(module: str) -> set[tuple[str, str]]:
    """Every resource type of the module with the name that it gives, as Terraform has it written."""
    text = "\n".join(path.read_text() for path in sorted(bundled("terraform", "aws", module).glob("*.tf")))
    found = set()
    for kind, block in re.findall(r'^resource "(\w+)" "\w+" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL):
        for written in re.findall(r'^  (?:name|key_name) += (?:"([^"]*)"|((?:local|var)\.\w+))', block, re.MULTILINE):
            name = written[0] or f"${{{written[1]}}}"
            for local, meaning in LOCALS.items():
                name = name.replace(f"${{{local}}}", meaning)
            found.add((kind, name))
    return found


def as_pattern(written: str, region: str) -> str:
    known = re.escape(written).replace(r"\$\{var\.region\}", region).replace(r"\$\{each\.key\}", "[0-9]+")
    return known.replace(r"\$\{var\.name\}", f"gpucloud-({NAME})")


@pytest.mark.parametrize("region", REGIONS)
def test_no_job_can_be_called_so_that_its_cluster_has_the_name_of_a_part_of_the_base(region: str) -> None:
    of_base, of_cluster = named("base"), named("cluster")
    assert {kind for kind, _ in of_base} >= {"aws_iam_role", "aws_security_group", "aws_budgets_budget"}
    assert {kind for kind, _ in of_cluster} >= {"aws_iam_role", "aws_security_group", "aws_autoscaling_group"}
    clashes = [
        (kind, name, own)
        for kind, name in of_base
        for other, own in of_cluster
        if kind == other and re.fullmatch(as_pattern(own, region), name.replace("${var.region}", region))
    ]
    assert clashes == []


def test_the_drills_role_is_the_one_that_terraform_makes() -> None:
    (written,) = [name for kind, name in named("base") if kind == "aws_iam_role"]
    assert written.replace("${var.region}", "us-east-1") == drill_role("us-east-1") == "gpucloud-base.drill-us-east-1"


def test_a_job_called_drill_would_have_met_the_role_without_its_dot() -> None:
    """What the first test is for: the check finds the clash that there was."""
    (own,) = [name for kind, name in named("cluster") if kind == "aws_iam_role"]
    assert re.fullmatch(as_pattern(own, "us-east-1"), "gpucloud-drill-us-east-1")
    assert re.fullmatch(as_pattern(own, "us-east-1"), drill_role("us-east-1")) is None
