"""What a job file asks of its machines' system software, and which driver a CUDA needs."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.domain.job.spec import Cloud, Job, MachineChoices, Mirrors, Resources
from gpucloud.domain.node.machine.facts import MachineWanted, digest, machine_wanted
from gpucloud.domain.node.machine.packages import upstream


def job(cloud, **changes) -> Job:
    paths = {"source": Path("/j.yaml"), "code": Path("/")}
    return Job(name="j", run="t.py", budget_usd=Decimal(1), cloud=cloud, **paths, **changes)


def test_the_embedded_fleet_wants_nothing():
    assert machine_wanted(job(Cloud.LOCAL, image="x", machine=MachineChoices(driver="580"))) is None


def test_a_rented_machine_is_given_what_the_newest_wheels_need():
    assert machine_wanted(job(Cloud.AWS, mirrors=Mirrors(apt="https://m/ubuntu"))) == MachineWanted(
        install=True, branch="", least_driver="580.65.06", gpus=1, asked=False, efa=True, apt_mirror="https://m/ubuntu"
    )


@pytest.mark.parametrize(
    ("cloud", "driver", "install", "branch", "least"),
    [
        (Cloud.AWS, "keep", False, "", "450.80.02"),
        (Cloud.AWS, "570", True, "570", ""),
        (Cloud.SSH, "auto", False, "", "450.80.02"),
        (Cloud.SSH, "keep", False, "", "450.80.02"),
        (Cloud.SSH, "580", True, "580", ""),
    ],
)
def test_ones_own_hosts_are_changed_only_where_a_branch_is_named(cloud, driver, install, branch, least):
    wanted = machine_wanted(job(cloud, resources=Resources(gpu=("A100",)), machine=MachineChoices(driver=driver)))
    assert (wanted.install, wanted.branch, wanted.least_driver) == (install, branch, least)


def test_a_job_without_gpus_on_ones_own_hosts_wants_nothing_or_its_image_only():
    assert machine_wanted(job(Cloud.SSH)) is None
    image = machine_wanted(job(Cloud.SSH, image="x"))
    assert (image.gpus, image.runtime) == (0, "auto")
    assert machine_wanted(job(Cloud.SSH, machine=MachineChoices(exporter=True))).exporter


def test_the_version_that_another_node_got_does_not_make_another_wish():
    one = MachineWanted(install=True, branch="", least_driver="", gpus=1)
    assert digest(one) == digest(MachineWanted(install=True, branch="", least_driver="", gpus=1, version="580.1.1"))
    assert digest(one) != digest(MachineWanted(install=True, branch="580", least_driver="", gpus=1))


def test_a_drivers_version_is_found_in_its_packages():
    assert upstream("580.178.04-0ubuntu0.24.04.1") == "580.178.04"
    assert upstream("1:4.7.0-1") == "4.7.0"
