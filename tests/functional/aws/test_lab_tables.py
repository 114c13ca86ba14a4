"""What the emulated AWS knows of itself and holds callers to: prices, quotas, images, bucket policies, owner tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest

from tests.lab.aws import Lab

GPU = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
UBUNTU = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


def _history(lab: Lab, **asked: Any) -> list[dict[str, Any]]:
    pages = lab.client("ec2").get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=["g4dn.xlarge"], ProductDescriptions=["Linux/UNIX"], **asked
    )  # fmt: skip
    return [row for page in pages for row in page["SpotPriceHistory"]]


def test_the_price_now_is_the_one_in_force_in_each_zone(lab: Lab) -> None:
    now = datetime.now(timezone.utc)
    rows = _history(lab, StartTime=now, EndTime=now)
    assert sorted(row["AvailabilityZone"][-1] for row in rows) == ["a", "b", "c", "d", "f"]
    assert all(Decimal("0.15") < Decimal(row["SpotPrice"]) < Decimal("0.30") for row in rows)
    assert all(row["Timestamp"] <= now for row in rows)


def test_the_price_of_a_day_comes_in_pages_newest_first_and_changes(lab: Lab) -> None:
    now = datetime.now(timezone.utc)
    filters = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    rows = _history(
        lab, StartTime=now - timedelta(days=1), EndTime=now, Filters=filters, PaginationConfig={"PageSize": 2}
    )
    times = [row["Timestamp"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert 4 <= len({row["SpotPrice"] for row in rows}) <= 6


def test_prices_of_a_test_come_before_the_labs_own(lab: Lab) -> None:
    since = datetime(2026, 1, 1, tzinfo=timezone.utc)
    lab.prices["g4dn.xlarge/us-east-1a"] = [(since, "0.111100")]
    now = datetime.now(timezone.utc)
    rows = _history(lab, StartTime=now, EndTime=now, AvailabilityZone="us-east-1a")
    assert [(row["SpotPrice"], row["Timestamp"]) for row in rows] == [("0.111100", since)]


@pytest.mark.parametrize(("parameter", "owner"), [(GPU, "amazon"), (UBUNTU, "099720109477")])
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_a_public_parameter_names_an_image_of_its_owner(lab: Lab, parameter: str, owner: str, region: str) -> None:
    image = lab.client("ssm", region).get_parameter(Name=parameter)["Parameter"]["Value"]
    found = lab.client("ec2", region).describe_images(ImageIds=[image], Owners=[owner])["Images"]
    assert [(one["ImageId"], one["Architecture"], one["State"]) for one in found] == [(image, "x86_64", "available")]


def test_a_quota_is_read_and_more_is_asked_for_once(lab: Lab) -> None:
    quotas = lab.client("service-quotas")
    lab.quotas["L-3819A6DF"] = 0
    said = quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-3819A6DF")["Quota"]
    assert (said["Value"], said["QuotaName"]) == (0.0, "All G and VT Spot Instance Requests")
    asked = {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF", "DesiredValue": 8}
    assert quotas.request_service_quota_increase(**asked)["RequestedQuota"]["Status"] == "PENDING"
    with pytest.raises(botocore.exceptions.ClientError, match="ResourceAlreadyExistsException"):
        quotas.request_service_quota_increase(**asked)
    history = quotas.list_requested_service_quota_change_history_by_quota(ServiceCode="ec2", QuotaCode="L-3819A6DF")
    assert [one["DesiredValue"] for one in history["RequestedQuotas"]] == [8.0]
    assert len(quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]) == 7


def test_a_bucket_policy_denies_what_it_says_and_nothing_else(lab: Lab) -> None:
    s3 = lab.client("s3")
    s3.create_bucket(Bucket="gpucloud-policy")
    deny = {"Effect": "Deny", "Principal": "*"}
    arn = "arn:aws:s3:::gpucloud-policy"
    tls = {"Bool": {"aws:SecureTransport": "false"}}
    conditional = {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}}
    statements = [
        {**deny, "Action": "s3:*", "Resource": [arn, f"{arn}/*"], "Condition": tls},
        {**deny, "Action": "s3:PutObject", "Resource": f"{arn}/jobs/*/state.json", "Condition": conditional},
    ]
    s3.put_bucket_policy(
        Bucket="gpucloud-policy", Policy=json.dumps({"Version": "2012-10-17", "Statement": statements})
    )
    s3.put_object(Bucket="gpucloud-policy", Key="jobs/a/other.json", Body=b"1")
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        s3.put_object(Bucket="gpucloud-policy", Key="jobs/a/state.json", Body=b"1")
    assert caught.value.response["Error"]["Code"] == "AccessDenied"
    s3.put_object(Bucket="gpucloud-policy", Key="jobs/a/state.json", Body=b"1", IfNoneMatch="*")
    assert s3.get_object(Bucket="gpucloud-policy", Key="jobs/a/state.json")["Body"].read() == b"1"


def test_what_is_born_without_an_owner_tag_is_named(lab: Lab) -> None:
    lab.client("ec2").create_vpc(CidrBlock="10.9.0.0/16")
    lab.client("iam").create_role(
        RoleName="mine", AssumeRolePolicyDocument="{}", Tags=[{"Key": "gpucloud:managed", "Value": "true"}]
    )
    assert lab.untagged == ["CreateVpc 10.9.0.0/16"]
    assert "role mine" in lab.inventory()


def test_a_repeated_client_token_with_other_parameters_is_refused(lab: Lab) -> None:
    ec2 = lab.client("ec2")
    made = ec2.create_volume(AvailabilityZone="us-east-1a", Size=1, ClientToken="t")
    assert ec2.create_volume(AvailabilityZone="us-east-1a", Size=1, ClientToken="t")["VolumeId"] == made["VolumeId"]
    with pytest.raises(botocore.exceptions.ClientError, match="IdempotentParameterMismatch"):
        ec2.create_volume(AvailabilityZone="us-east-1a", Size=2, ClientToken="t")


def test_awss_own_policy_for_session_manager_can_be_attached(lab: Lab) -> None:
    iam = lab.client("iam")
    iam.create_role(RoleName="ssm", AssumeRolePolicyDocument="{}")
    iam.attach_role_policy(RoleName="ssm", PolicyArn="arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore")
    assert not [line for line in lab.inventory() if line.startswith("policy ")]


def _as_a_machine(lab: Lab, role: str, instance: str, service: str) -> Any:
    keys = lab.client("sts").assume_role(RoleArn=f"arn:aws:iam::123456789012:role/{role}", RoleSessionName=instance)
    given = keys["Credentials"]
    return boto3.client(
        service, region_name="us-east-1", endpoint_url=lab.url, aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"], aws_session_token=given["SessionToken"],
        config=botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )  # fmt: skip


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def test_a_machine_may_do_what_its_role_says_and_no_more(lab: Lab) -> None:
    iam, s3 = lab.client("iam"), lab.client("s3")
    role = iam.create_role(RoleName="machine", AssumeRolePolicyDocument="{}")["Role"]["RoleId"]
    arn = "arn:aws:s3:::gpucloud-machines"
    listing = {"StringLike": {"s3:prefix": ["jobs/digits/*"]}}
    statements = [
        {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject"], "Resource": [f"{arn}/jobs/digits/*"]},
        {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": arn, "Condition": listing},
        {"Effect": "Allow", "Action": "s3:PutObject", "Resource": f"{arn}/clusters/c/hosts/${{aws:userid}}"},
    ]
    policy = {"Version": "2012-10-17", "Statement": statements}
    iam.put_role_policy(RoleName="machine", PolicyName="p", PolicyDocument=json.dumps(policy))
    s3.create_bucket(Bucket="gpucloud-machines")
    own = _as_a_machine(lab, "machine", "i-0aaa", "s3")
    in_bucket = {"Bucket": "gpucloud-machines"}
    own.put_object(**in_bucket, Key="jobs/digits/state.json", Body=b"1")
    own.put_object(**in_bucket, Key=f"clusters/c/hosts/{role}:i-0aaa", Body=b"key")
    own.list_objects_v2(**in_bucket, Prefix="jobs/digits/checkpoints/")
    assert _code(lambda: own.get_object(**in_bucket, Key="jobs/digits/absent")) == "NoSuchKey"
    assert _code(lambda: own.head_object(**in_bucket, Key="jobs/others/absent")) == "403"
    assert _code(lambda: own.get_object(**in_bucket, Key="jobs/others/absent")) == "AccessDenied"
    assert _code(lambda: own.put_object(**in_bucket, Key=f"clusters/c/hosts/{role}:i-0bbb", Body=b"")) == "AccessDenied"
    assert _code(lambda: own.list_objects_v2(**in_bucket)) == "AccessDenied"
    assert _code(lambda: own.delete_object(**in_bucket, Key="jobs/digits/state.json")) == "AccessDenied"
    assert _code(_as_a_machine(lab, "machine", "i-0aaa", "ec2").describe_instances) == "UnauthorizedOperation"
    assert _as_a_machine(lab, "machine", "i-0aaa", "sts").get_caller_identity()["UserId"] == f"{role}:i-0aaa"
