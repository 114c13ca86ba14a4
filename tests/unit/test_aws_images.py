"""Which image a job is pinned to, over botocore's own stub."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.stub import Stubber

from gpucloud.adapters.aws.machine import resolve, root_device
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import AwsChoices

AMI = "ami-0123456789abcdef0"
CANONICAL = "099720109477"
IMAGE = {
    "ImageId": AMI,
    "OwnerId": "898082745236",
    "ImageOwnerAlias": "amazon",
    "Architecture": "x86_64",
    "State": "available",
    "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 65}}, {"DeviceName": "/dev/sdb"}],
}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Aws(region="us-east-1")


def resolved(aws: Aws, choices: AwsChoices, *images: dict[str, Any], parameter: str | None = None) -> str:
    ssm, ec2 = Stubber(aws.client("ssm", "us-east-1")), Stubber(aws.client("ec2", "us-east-1"))
    sts = Stubber(aws.client("sts", "us-east-1", quick=True))
    if parameter:
        ssm.add_response("get_parameter", {"Parameter": {"Value": AMI}}, {"Name": parameter})
    ec2.add_response("describe_images", {"Images": list(images)}, {"ImageIds": [AMI]})
    sts.add_response("get_caller_identity", {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/a"})
    with ssm, ec2, sts:
        return resolve(aws, choices, "us-east-1")


@pytest.mark.parametrize(
    ("choice", "parameter"),
    [
        (
            "deep-learning",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
        ),
        ("ubuntu", "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"),
        ("ssm:/team/images/training", "/team/images/training"),
    ],
)
def test_a_choice_is_read_from_its_public_parameter(aws: Aws, choice: str, parameter: str):
    assert resolved(aws, AwsChoices(image=choice), IMAGE, parameter=parameter) == AMI


def test_an_id_is_taken_as_it_is(aws: Aws):
    assert resolved(aws, AwsChoices(image=AMI), IMAGE) == AMI


@pytest.mark.parametrize(
    ("owner", "choices"),
    [
        (CANONICAL, AwsChoices(image=AMI)),
        ("123456789012", AwsChoices(image=AMI)),  # the caller's own
        ("210987654321", AwsChoices(image=AMI, image_owners=("210987654321",))),
    ],
)
def test_images_of_trusted_owners_are_taken(aws: Aws, owner: str, choices: AwsChoices):
    image = {key: value for key, value in IMAGE.items() if key != "ImageOwnerAlias"}
    assert resolved(aws, choices, {**image, "OwnerId": owner}) == AMI


def test_an_image_of_anybody_else_is_refused_with_the_edit_that_allows_it(aws: Aws):
    image = {**IMAGE, "OwnerId": "210987654321", "ImageOwnerAlias": "aws-marketplace"}
    with pytest.raises(ProvisionError, match="belongs to account 210987654321, which is not trusted") as caught:
        resolved(aws, AwsChoices(image=AMI), image)
    assert caught.value.hint == "aws: {image_owners: ['210987654321']} if you know whose that is"


def test_in_china_canonical_has_another_account(monkeypatch: pytest.MonkeyPatch, aws: Aws):
    monkeypatch.setattr(Aws, "partition", "aws-cn")
    image = {key: value for key, value in IMAGE.items() if key != "ImageOwnerAlias"}
    assert resolved(aws, AwsChoices(image=AMI), {**image, "OwnerId": "837727238323"}) == AMI
    with pytest.raises(ProvisionError, match="belongs to account 099720109477"):
        resolved(aws, AwsChoices(image=AMI), {**image, "OwnerId": CANONICAL})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Architecture": "arm64"}, "is for arm64 machines"),
        ({"State": "pending"}, "is pending, not available"),
    ],
)
def test_an_image_that_cannot_start_is_refused(aws: Aws, change: dict[str, str], message: str):
    with pytest.raises(ProvisionError, match=message):
        resolved(aws, AwsChoices(image=AMI), {**IMAGE, **change})


def test_a_disk_smaller_than_the_image_is_refused_with_the_size_it_needs(aws: Aws):
    with pytest.raises(ProvisionError, match="needs a disk of 65 GiB, not 40") as caught:
        resolved(aws, AwsChoices(image=AMI, disk_gib=40), IMAGE)
    assert caught.value.hint == "aws: {disk_gib: 65}"


def root_of(aws: Aws, *images: dict[str, Any]) -> str:
    ec2 = Stubber(aws.client("ec2", "us-east-1"))
    ec2.add_response("describe_images", {"Images": list(images)}, {"ImageIds": [AMI]})
    with ec2:
        return root_device(aws, AMI, "us-east-1")


@pytest.mark.parametrize("name", ["/dev/sda1", "/dev/xvda"])
def test_the_root_disk_is_called_as_the_image_calls_it(aws: Aws, name: str):
    assert root_of(aws, {**IMAGE, "RootDeviceType": "ebs", "RootDeviceName": name}) == name


@pytest.mark.parametrize("root", [{"RootDeviceType": "instance-store", "RootDeviceName": "/dev/sda1"}, {}])
def test_an_image_without_a_root_disk_is_refused(aws: Aws, root: dict[str, str]):
    with pytest.raises(ProvisionError, match=f"the image {AMI} has no root disk"):
        root_of(aws, {**IMAGE, **root})


def test_an_image_that_is_gone_is_said(aws: Aws):
    with pytest.raises(ProvisionError, match=f"there is no image {AMI} in us-east-1"):
        resolved(aws, AwsChoices(image=AMI))


def test_a_word_that_is_no_image_is_said(aws: Aws):
    with pytest.raises(ProvisionError, match="'windows' is no image"):
        resolve(aws, AwsChoices(image="windows"), "us-east-1")


def test_a_parameter_that_is_gone_is_said(aws: Aws):
    ssm = Stubber(aws.client("ssm", "us-east-1"))
    ssm.add_client_error("get_parameter", "ParameterNotFound", "x")
    with ssm, pytest.raises(ProvisionError, match="there is no such public parameter in this region"):
        resolve(aws, AwsChoices(), "us-east-1")
