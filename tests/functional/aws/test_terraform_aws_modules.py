"""The AWS modules: what they say (against a mocked provider), and what they do (against an emulated AWS)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.home import bundled
from tests.lab.aws import Lab
from tests.lab.aws.plugins import plugin_folder, standing_provider

ROOT = Path(__file__).resolve().parents[3]
GROUP = "gpucloud-digits"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIF9sYWJsYWJsYWJsYWJsYWJsYWJsYWJsYWJsYWJsYWJs lab"

INSTALL_TERRAFORM = "terraform is not installed: https://developer.hashicorp.com/terraform/install"


class Stack:
    """A copy of one module in a folder of its own, with local state."""

    def __init__(self, folder: Path, module: str, providers: Path, env: dict[str, str]) -> None:
        self.folder = folder / module
        self.env = env
        shutil.copytree(bundled("terraform", "aws", module), self.folder)
        shutil.copytree(providers, self.folder, dirs_exist_ok=True, symlinks=True)

    def set(self, variables: dict[str, Any]) -> None:
        (self.folder / "terraform.tfvars.json").write_text(json.dumps(variables))

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["terraform", *argv, "-no-color"],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def apply(self) -> dict[str, Any]:
        """Apply and return the outputs."""
        done = self.run("apply", "-auto-approve")
        assert done.returncode == 0, done.stdout + done.stderr
        return {name: output["value"] for name, output in json.loads(self.run("output", "-json").stdout).items()}

    def changes(self) -> str:
        """What a plan would change; empty when nothing."""
        done = self.run("plan", "-detailed-exitcode")
        assert done.returncode in {0, 2}, done.stdout + done.stderr
        return done.stdout if done.returncode else ""

    def destroy(self) -> None:
        done = self.run("destroy", "-auto-approve")
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Both stacks as they were applied: `made` is what base returned, `outputs` what the cluster did."""

    base: Stack
    cluster: Stack
    made: dict[str, Any]
    variables: dict[str, Any]
    outputs: dict[str, Any]


@pytest.fixture(scope="session")
def providers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `terraform init` made: both modules need the same provider."""
    if shutil.which("terraform") is None:
        pytest.fail(INSTALL_TERRAFORM)
    folder = tmp_path_factory.mktemp("providers")
    module = tmp_path_factory.mktemp("module")
    shutil.copy(bundled("terraform", "aws", "base", "versions.tf"), module)
    (module / "variables.tf").write_text('variable "region" {\n  type = string\n}\n')
    plugins = plugin_folder()
    done = subprocess.run(
        ["terraform", "init", "-input=false", "-no-color", *([f"-plugin-dir={plugins}"] if plugins else [])],
        cwd=module,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.move(module / ".terraform", folder / ".terraform")
    shutil.move(module / ".terraform.lock.hcl", folder / ".terraform.lock.hcl")
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def attached(lab: Lab) -> Iterator[dict[str, str]]:
    with standing_provider(lab.env) as attached:
        yield attached


@pytest.fixture(scope="module")
def standing(lab: Lab, attached: dict[str, str], providers: Path, tmp_path_factory: pytest.TempPathFactory) -> Standing:
    """Both stacks of us-east-1: a public network, and a cluster for types with no EFA interface and with one."""
    folder, env = tmp_path_factory.mktemp("standing"), lab.env | attached
    base, cluster = Stack(folder, "base", providers, env), Stack(folder, "cluster", providers, env)
    base.set(base_variables("us-east-1"))
    made = base.apply()
    variables = cluster_variables(lab, "us-east-1", network_of(made), efa=[{"interfaces": 0}, {"interfaces": 1}])
    cluster.set(variables)
    return Standing(base=base, cluster=cluster, made=made, variables=variables, outputs=cluster.apply())


def clean_environment() -> dict[str, str]:
    """This process's environment without what would reach an account or change what a command means."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))} | {"CHECKPOINT_DISABLE": "1"}


def base_variables(region: str, **more: Any) -> dict[str, Any]:
    return {"region": region, "zones": [f"{region}a", f"{region}b"], "tags": {"team": "vision"}} | more


def cluster_variables(lab: Lab, region: str, network: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": GROUP,
        "region": region,
        "zones": [f"{region}a", f"{region}b"],
        "node_type": "g4dn.xlarge",
        "market": "spot",
        "tags": {"team": "vision"},
        "access": {"public_key": KEY, "cidr": "203.0.113.7/32"},
        "store": "s3://gpucloud-123456789012-us-east-1",
        "image": images(lab, region)[0],
        "user_data": "#!/bin/sh\ntrue\n",
        "network": network,
    } | more


def network_of(base: dict[str, Any]) -> dict[str, Any]:
    groups = [base["security_group_id"]]
    return {"vpc_id": base["vpc_id"], "subnets": base["subnets"], "security_group_ids": groups}


def images(lab: Lab, region: str) -> list[str]:
    return [image["ImageId"] for image in lab.client("ec2", region).describe_images(Owners=["amazon"])["Images"]]


@pytest.mark.parametrize("module", ["base", "cluster"])
def test_what_the_module_says_is_what_was_decided(
    module: str, attached: dict[str, str], providers: Path, tmp_path: Path
) -> None:
    stack = Stack(tmp_path, module, providers, clean_environment() | attached)

    done = stack.run("test")

    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


def test_a_second_plan_changes_nothing(standing: Standing, lab: Lab) -> None:
    assert standing.base.changes() == ""
    assert standing.cluster.changes() == ""
    assert standing.made["monthly_costs"] == []
    assert standing.outputs["group_name"] == "us-east-1/gpucloud-digits"
    assert standing.outputs["store"] == "s3://gpucloud-123456789012-us-east-1"
    assert sorted(standing.outputs["launch_templates"]) == ["0", "1"]
    assert len(lab.client("iam").get_role(RoleName="gpucloud-digits-us-east-1")["Role"]["RoleId"]) > 0


def test_what_the_adapter_changes_is_no_change_to_terraform(standing: Standing, lab: Lab) -> None:
    template = standing.outputs["launch_templates"]["1"]

    use_group(lab, subnet=standing.made["subnets"]["us-east-1b"], template=template)

    assert standing.cluster.changes() == ""
    assert group(lab)["DesiredCapacity"] == 1
    assert group(lab)["VPCZoneIdentifier"] == standing.made["subnets"]["us-east-1b"]


def test_a_new_image_makes_a_new_version_that_is_the_default(standing: Standing, lab: Lab) -> None:
    image = images(lab, "us-east-1")[1]

    standing.cluster.set(standing.variables | {"image": image})
    outputs = standing.cluster.apply()

    asked = {"LaunchTemplateId": outputs["launch_templates"]["0"], "Versions": ["$Default"]}
    version = lab.client("ec2").describe_launch_template_versions(**asked)["LaunchTemplateVersions"][0]
    assert outputs["launch_templates"] == standing.outputs["launch_templates"]
    assert version["LaunchTemplateData"]["ImageId"] == image


@pytest.mark.slow
def test_everything_is_tagged_at_birth_and_destroy_leaves_nothing(lab: Lab, providers: Path, tmp_path: Path) -> None:
    """In another region, of the same name: neither stack may meet the other region's.

    What the whole job of test_aws_job.py cannot show: a private network, several EFA interfaces, no change in a plan.
    """
    before = standing_things(lab)
    base, cluster = Stack(tmp_path, "base", providers, lab.env), Stack(tmp_path, "cluster", providers, lab.env)
    base.set(base_variables("us-west-2", private=True, alert={"email": "who@example.com", "monthly_usd": 250}))
    made = base.apply()
    network = {"vpc_id": made["vpc_id"], "subnets": made["private_subnets"], "public_address": False}
    cluster.set(
        cluster_variables(
            lab,
            "us-west-2",
            network,
            efa=[{"interfaces": 4, "cards": 4}, {"interfaces": 16, "cards": 17}],
            ssh="private",
        )
    )
    outputs = cluster.apply()

    assert base.changes() == ""
    assert cluster.changes() == ""
    assert [cost["usd"] for cost in made["monthly_costs"]] == ["32.85", "3.65"]
    assert sorted(outputs["launch_templates"]) == ["16of17", "4"]
    assert lab.untagged == []

    cluster.destroy()
    base.destroy()
    assert standing_things(lab) == before


@pytest.mark.slow
@pytest.mark.engine(name="checkov")
def test_checkov_finds_nothing() -> None:
    """An auditor's eyes; not in the dev extra, since it brings 290 MB."""
    command = ["checkov", "--config-file", ".checkov.yaml", "--compact", "--quiet"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def standing_things(lab: Lab) -> list[str]:
    """What there is; but moto leaves a NAT gateway's interface behind, which AWS removes with the gateway."""
    return [line for line in lab.inventory() if not line.startswith("network-interface ")]


def use_group(lab: Lab, *, subnet: str, template: str) -> None:
    """Change all that belongs to the adapter: shut-off, zone, type, market, template, processes, limit, level."""
    scaling = lab.client("autoscaling")
    name = {"AutoScalingGroupName": GROUP}
    level = {"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0}
    scaling.put_scheduled_update_group_action(
        **name, ScheduledActionName="gpucloud-auto-shutdown", StartTime="2099-01-01T00:00:00Z", **level
    )
    pinned = {"LaunchTemplateId": template, "Version": "1"}
    scaling.suspend_processes(**name, ScalingProcesses=["Launch"])
    scaling.update_auto_scaling_group(**name, MaxSize=3, VPCZoneIdentifier=subnet, LaunchTemplate=pinned)
    scaling.set_desired_capacity(**name, DesiredCapacity=1)


def group(lab: Lab) -> dict[str, Any]:
    (found,) = lab.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])[
        "AutoScalingGroups"
    ]
    return dict(found)
