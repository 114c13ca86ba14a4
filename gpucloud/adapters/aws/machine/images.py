"""Machine images: which one a job is pinned to, only from owners that are trusted; how its root disk is called."""

from __future__ import annotations

from typing import Any

from gpucloud.adapters.aws.account.identity import account_of
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job import AwsChoices

# AWS's and Canonical's public parameters: always the newest image, the same name in every region.
_PARAMETERS = {
    "deep-learning": "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
    "ubuntu": "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
}
_CANONICAL = {"aws": "099720109477", "aws-cn": "837727238323", "aws-us-gov": "513442679011"}


def resolve(aws: Aws, choices: AwsChoices, region: str) -> str:
    """Return the id of the image that the job file's choice is now (`ami-…`).

    ProvisionError when there is none, its owner is not trusted, or no GPU machine of ours can start from it.
    """
    image = _described(aws, _image_id(aws, choices.image, region), region)
    _check_owner(aws, choices, image)
    _check_use(choices, image)
    return str(image["ImageId"])


def root_device(aws: Aws, image_id: str, region: str) -> str:
    """Return what the image calls its root disk (`/dev/sda1`): under another name a second disk would be added.

    ProvisionError when there is no such image, or its root is no disk.
    """
    image = _described(aws, image_id, region)
    if image.get("RootDeviceType", "ebs") != "ebs" or not image.get("RootDeviceName"):
        raise ProvisionError(f"the image {image_id} has no root disk", hint="name one with an EBS root")
    return str(image["RootDeviceName"])


def _described(aws: Aws, image_id: str, region: str) -> dict[str, Any]:
    with aws.calling("ec2", f"read the image {image_id}", region) as ec2:
        found = ec2.describe_images(ImageIds=[image_id])["Images"]
    if not found:
        raise ProvisionError(
            f"there is no image {image_id} in {region}", hint="correct `aws: {image: …}`, or leave it out"
        )
    image: dict[str, Any] = found[0]
    return image


def _image_id(aws: Aws, choice: str, region: str) -> str:
    if choice.startswith("ami-"):
        return choice
    name = choice.removeprefix("ssm:") if choice.startswith("ssm:") else _PARAMETERS.get(choice)
    if name is None:
        raise ProvisionError(
            f"{choice!r} is no image", hint="aws: {image: deep-learning}, ubuntu, ami-… or ssm:/parameter/path"
        )
    with aws.calling("ssm", f"find the image {choice} in {region} ({name})", region) as ssm:
        return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])


def _check_owner(aws: Aws, choices: AwsChoices, image: dict[str, Any]) -> None:
    owner, alias = str(image.get("OwnerId", "")), str(image.get("ImageOwnerAlias", ""))
    # "amazon" is given by AWS to its own images and to those of verified publishers, and cannot be chosen.
    trusted = {_CANONICAL.get(aws.partition, ""), *choices.image_owners}
    if alias == "amazon" or {owner, alias} & trusted or owner == account_of(aws):
        return
    raise ProvisionError(
        f"the image {image['ImageId']} belongs to account {owner}, which is not trusted",
        hint=f"aws: {{image_owners: ['{owner}']}} if you know whose that is",
    )


def _check_use(choices: AwsChoices, image: dict[str, Any]) -> None:
    image_id = image["ImageId"]
    if image.get("Architecture") != "x86_64":
        raise ProvisionError(
            f"the image {image_id} is for {image.get('Architecture')} machines", hint="name one for x86_64"
        )
    if image.get("State") != "available":
        raise ProvisionError(
            f"the image {image_id} is {image.get('State')}, not available", hint="name another, or wait until it is"
        )
    least = max(
        (int(disk.get("Ebs", {}).get("VolumeSize", 0)) for disk in image.get("BlockDeviceMappings", ())), default=0
    )
    if least > choices.disk_gib:
        raise ProvisionError(
            f"the image {image_id} needs a disk of {least} GiB, not {choices.disk_gib}",
            hint=f"aws: {{disk_gib: {least}}}",
        )
