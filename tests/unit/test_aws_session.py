"""The door to boto3: where gpucloud rents at all, and what time it is there."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from botocore.awsrequest import AWSResponse

from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import UsageError


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Aws(region="us-east-1")


@pytest.mark.parametrize(
    ("region", "partition"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("eusc-de-east-1", "aws-eusc")]
)
def test_a_region_of_another_partition_is_one_clear_error_before_anything_is_asked(aws, region, partition):
    with pytest.raises(
        UsageError, match=f"{region} is in {partition}; gpucloud rents in AWS's commercial regions only"
    ):
        aws.client("ec2", region)


def answer(aws: Aws, date: str | None) -> None:
    """Have one call answered with such a date."""
    client = aws.client("sts")
    body = b"<GetCallerIdentityResponse><GetCallerIdentityResult/></GetCallerIdentityResponse>"

    class Raw:
        def stream(self):
            yield body

    headers = {} if date is None else {"date": date}
    reply = AWSResponse("http://sts", 200, headers, Raw())
    client.meta.events.register("before-send", lambda **_: reply)
    client.get_caller_identity()


@pytest.mark.parametrize("ahead", [timedelta(minutes=4), timedelta(minutes=-4)])
def test_a_wrong_clock_here_is_put_right_by_awss_own(aws, ahead):
    answer(aws, format_datetime(datetime.now(timezone.utc) - ahead, usegmt=True))
    assert abs(datetime.now(timezone.utc) - ahead - aws.now()) < timedelta(minutes=1)


@pytest.mark.parametrize("date", [None, "yesterday", ""])
def test_an_answer_without_a_time_changes_nothing(aws, date):
    answer(aws, date)
    assert abs(datetime.now(timezone.utc) - aws.now()) < timedelta(seconds=1)
