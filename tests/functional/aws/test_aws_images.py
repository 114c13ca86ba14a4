"""Images as the emulated AWS publishes them."""

from __future__ import annotations

import pytest

from gpucloud.adapters.aws.machine import resolve
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import AwsChoices
from tests.lab.aws import Lab


@pytest.mark.parametrize("choice", ["deep-learning", "ubuntu"])
def test_the_public_images_are_found_in_two_calls(lab: Lab, choice: str):
    before = len(lab.calls)
    image = resolve(Aws(region="us-east-1"), AwsChoices(image=choice), "us-east-1")
    assert image.startswith("ami-")
    assert [call.action for call in lab.calls[before:]] == ["GetParameter", "DescribeImages"]
    assert resolve(Aws(region="us-east-1"), AwsChoices(image=image), "us-east-1") == image


def test_an_image_of_the_callers_own_is_taken(lab: Lab):
    public = resolve(Aws(region="us-east-1"), AwsChoices(image="ubuntu"), "us-east-1")
    own = lab.client("ec2").copy_image(SourceRegion="us-east-1", SourceImageId=public, Name="mine")["ImageId"]
    assert resolve(Aws(region="us-east-1"), AwsChoices(image=own), "us-east-1") == own


def test_an_image_that_is_not_there_is_said(lab: Lab):
    with pytest.raises(ProvisionError, match="the machine image is gone, or is not in this region") as caught:
        resolve(Aws(region="us-east-1"), AwsChoices(image="ami-0123456789abcdef0"), "us-east-1")
    assert caught.value.hint == "correct the `aws:` section of the job file"
