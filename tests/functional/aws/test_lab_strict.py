"""Where the emulated AWS is as strict as AWS, and moto is not."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import pytest

from gpucloud.adapters.aws.policy import node_policy
from tests.iam.printed import let_as_printed
from tests.lab.aws import Call, Lab
from tests.lab.aws.faults import Bucket

BUCKET = {"Bucket": "gpucloud-x"}
TAGS = [{"Key": "gpucloud:managed", "Value": "true"}, {"Key": "gpucloud:cluster", "Value": "gpucloud-digits"}]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "lab") as made:
        made.client("s3").create_bucket(**BUCKET)
        yield made


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def plain(lab: Lab) -> Any:
    """A client that adds no sum of its own."""
    given = lab.client("s3")
    settings = botocore.config.Config(
        request_checksum_calculation="when_required", s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}
    )
    keys = given._request_signer._credentials
    return boto3.client(
        "s3", region_name="us-east-1", endpoint_url=lab.url, config=settings,
        aws_access_key_id=keys.access_key, aws_secret_access_key=keys.secret_key,
    )  # fmt: skip


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("named", "right", "wrong"),
    [
        ("ContentMD5", hashlib.md5(b"body").digest(), hashlib.md5(b"bodY").digest()),
        ("ChecksumSHA256", hashlib.sha256(b"body").digest(), hashlib.sha256(b"bodY").digest()),
        ("ChecksumSHA1", hashlib.sha1(b"body").digest(), hashlib.sha1(b"bodY").digest()),
        ("ChecksumCRC32", bytes.fromhex("dba80bb2"), bytes.fromhex("00000000")),
    ],
    ids=["md5", "sha256", "sha1", "crc32"],
)
def test_bytes_that_their_sum_does_not_fit_are_refused(lab: Lab, named: str, right: bytes, wrong: bytes) -> None:
    s3 = plain(lab)
    assert code_of(lambda: s3.put_object(**BUCKET, Key="k", Body=b"body", **{named: base64_of(wrong)})) == "BadDigest"
    assert "Contents" not in s3.list_objects_v2(**BUCKET)
    s3.put_object(**BUCKET, Key="k", Body=b"body", **{named: base64_of(right)})
    assert s3.get_object(**BUCKET, Key="k")["Body"].read() == b"body"


def test_a_sum_that_is_none_is_refused(lab: Lab) -> None:
    s3 = plain(lab)
    assert code_of(lambda: s3.put_object(**BUCKET, Key="k", Body=b"b", ContentMD5="no sum")) == "InvalidDigest"


def test_a_part_with_a_wrong_sum_is_refused(lab: Lab) -> None:
    s3 = plain(lab)
    upload = s3.create_multipart_upload(**BUCKET, Key="k")["UploadId"]
    wrong = base64_of(hashlib.sha256(b"other").digest())
    part = {**BUCKET, "Key": "k", "UploadId": upload, "PartNumber": 1, "Body": b"part", "ChecksumSHA256": wrong}
    assert code_of(lambda: s3.upload_part(**part)) == "BadDigest"


def _in_parts(s3: Any, body: bytes, **condition: str) -> str:
    upload = s3.create_multipart_upload(**BUCKET, Key="k")["UploadId"]
    part = s3.upload_part(**BUCKET, Key="k", UploadId=upload, PartNumber=1, Body=body)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    whole = s3.complete_multipart_upload(**BUCKET, Key="k", UploadId=upload, MultipartUpload=parts, **condition)
    return str(whole["ETag"])


def test_conditions_hold_for_an_object_in_parts_too(lab: Lab) -> None:
    s3 = lab.client("s3")
    assert code_of(lambda: _in_parts(s3, b"1", IfMatch='"0"')) == "NoSuchKey"
    first = _in_parts(s3, b"1", IfNoneMatch="*")
    assert code_of(lambda: _in_parts(s3, b"2", IfNoneMatch="*")) == "PreconditionFailed"
    _in_parts(s3, b"2", IfMatch=first)
    assert code_of(lambda: _in_parts(s3, b"3", IfMatch=first)) == "PreconditionFailed"
    assert s3.get_object(**BUCKET, Key="k")["Body"].read() == b"2"


def test_of_writers_at_the_same_instant_one_wins(lab: Lab) -> None:
    s3, writers = lab.client("s3"), 6
    together, interval = threading.Barrier(writers), sys.getswitchinterval()

    def write(turn: int) -> bool:
        together.wait()
        try:
            s3.put_object(**BUCKET, Key=f"race/{turn}", Body=b"mine", IfNoneMatch="*")
        except botocore.exceptions.ClientError:
            return False
        return True

    try:
        sys.setswitchinterval(1e-6)  # as in a busy server: moto looks and writes in two steps
        with ThreadPoolExecutor(writers) as pool:
            for turn in range(12):
                assert sum(pool.map(write, [turn] * writers)) == 1
    finally:
        sys.setswitchinterval(interval)


def test_writers_collide_at_times_and_nothing_is_written_then(lab: Lab) -> None:
    lab.collide(0.3, seed=1)
    s3, codes = lab.client("s3"), []
    for number in range(20):
        try:
            s3.put_object(**BUCKET, Key=f"k/{number:02d}", Body=b"x", IfNoneMatch="*")
        except botocore.exceptions.ClientError as error:
            codes.append(error.response["Error"]["Code"])
        s3.put_object(**BUCKET, Key="unconditional", Body=b"x")
    assert codes == ["ConditionalRequestConflict"] * 7
    assert s3.list_objects_v2(**BUCKET, Prefix="k/")["KeyCount"] == 13


def test_names_are_given_once(lab: Lab) -> None:
    ec2, iam, scaling = lab.client("ec2"), lab.client("iam"), lab.client("autoscaling")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    template = {"LaunchTemplateName": "nodes", "LaunchTemplateData": {"ImageId": image, "InstanceType": "g4dn.xlarge"}}
    group = {
        "AutoScalingGroupName": "g", "MinSize": 0, "MaxSize": 0, "VPCZoneIdentifier": subnet,
        "LaunchTemplate": {"LaunchTemplateName": "nodes"},
    }  # fmt: skip
    budget = {
        "AccountId": "123456789012",
        "Budget": {
            "BudgetName": "gpucloud-b", "BudgetType": "COST", "TimeUnit": "MONTHLY",
            "BudgetLimit": {"Amount": "1", "Unit": "USD"},
        },
    }  # fmt: skip
    budgets = lab.client("budgets")
    makes: list[tuple[Callable[[], object], str]] = [
        (lambda: ec2.create_key_pair(KeyName="k"), "InvalidKeyPair.Duplicate"),
        (lambda: ec2.create_security_group(GroupName="s", Description="s", VpcId=vpc), "InvalidGroup.Duplicate"),
        (lambda: ec2.create_launch_template(**template), "InvalidLaunchTemplateName.AlreadyExistsException"),
        (lambda: ec2.create_placement_group(GroupName="p", Strategy="cluster"), "InvalidPlacementGroup.Duplicate"),
        (lambda: scaling.create_auto_scaling_group(**group), "AlreadyExists"),
        (lambda: iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}"), "EntityAlreadyExists"),
        (lambda: iam.create_instance_profile(InstanceProfileName="i"), "EntityAlreadyExists"),
        (lambda: budgets.create_budget(**budget), "DuplicateRecordException"),
    ]
    for make, code in makes:
        make()
        assert code_of(make) == code


def test_listings_lag_each_by_a_time_of_its_own(lab: Lab) -> None:
    ec2 = lab.client("ec2")
    ec2.run_instances(ImageId=ec2.describe_images()["Images"][0]["ImageId"], MinCount=1, MaxCount=1)
    launched = time.time()
    time.sleep(0.5)
    lab.lag_by_chance(1.0, seed=3)
    seen = set()
    for _ in range(12):
        lab.stale_s = 2 * (time.time() - launched)  # as likely seen as not, however long a call takes
        seen.add(len(ec2.describe_instances()["Reservations"]))
    assert seen == {0, 1}
    lab.lag_by_chance(0)
    assert len(ec2.describe_instances()["Reservations"]) == 1


def test_more_calls_than_the_limit_are_refused(lab: Lab) -> None:
    limit = {"burst": 3.0, "per_second": 0.001}
    lab.faults.limit("DescribeVpcs", service="ec2", code="RequestLimitExceeded", status=503, **limit)
    ec2 = lab.client("ec2")
    for _ in range(3):
        ec2.describe_vpcs()
    assert code_of(ec2.describe_vpcs) == "RequestLimitExceeded"
    ec2.describe_subnets()


def test_a_limit_lets_calls_through_again_as_time_passes() -> None:
    limit = Bucket(action="DescribeVpcs", service="ec2", burst=2.0, per_second=0.5)
    refused = [limit.strikes(_call(at), b"") for at in (0.0, 0.0, 0.0, 1.0, 2.0, 2.5, 60.0, 60.0, 60.0)]
    assert refused == [False, False, True, True, False, True, False, False, True]


def _call(at: float) -> Call:
    return Call(at=at, service="ec2", action="DescribeVpcs", params={}, region="us-east-1", key="", agent="")


def test_what_a_schedule_ended_is_told_by_the_groups_story(lab: Lab) -> None:
    from tests.standins.aws_group import CLUSTER, make_cluster  # noqa: PLC0415

    make_cluster(lab)
    scaling = lab.client("autoscaling")
    scaling.update_auto_scaling_group(AutoScalingGroupName=CLUSTER, MaxSize=1, DesiredCapacity=1)
    _until(lambda: scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]["Instances"])
    soon = time.time() + 1.5
    scaling.put_scheduled_update_group_action(
        AutoScalingGroupName=CLUSTER, ScheduledActionName="off", StartTime=soon, MinSize=0, MaxSize=0, DesiredCapacity=0
    )

    def causes() -> list[str]:
        found = scaling.describe_scaling_activities(AutoScalingGroupName=CLUSTER)["Activities"]
        return [one["Cause"] for one in found if one["Description"].startswith("Terminating")]

    (cause,) = _until(causes)
    assert "a scheduled action update of AutoScalingGroup constraints to min: 0, max: 0, desired: 0" in cause
    assert "an instance was taken out of service" in cause


def _until(is_so: Callable[[], Any], seconds: float = 15.0) -> Any:
    end = time.monotonic() + seconds
    while not (said := is_so()):
        assert time.monotonic() < end, "never so"
        time.sleep(0.05)
    return said


def test_a_role_ends_machines_of_the_group_that_its_policy_names_and_no_others(lab: Lab) -> None:
    from tests.standins.aws_group import make_cluster  # noqa: PLC0415

    make_cluster(lab)
    scaling = lab.client("autoscaling")
    scaling.update_auto_scaling_group(AutoScalingGroupName="gpucloud-digits", MaxSize=1, DesiredCapacity=1)
    (member,) = _until(lambda: scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]["Instances"])

    def answered(cluster: str, region: str) -> tuple[str, str]:
        own = _as_role(lab, cluster, region)
        ends = {"InstanceId": member["InstanceId"], "ShouldDecrementDesiredCapacity": False}
        return (
            _said(lambda: own.terminate_instance_in_auto_scaling_group(**ends)),
            _said(own.describe_auto_scaling_groups),
        )

    assert answered("gpucloud-other", "us-east-1") == ("AccessDenied", "")
    assert answered("gpucloud-digits", "eu-west-1") == ("", "AccessDenied")


def _as_role(lab: Lab, cluster: str, region: str) -> Any:
    name = f"{cluster}-{region}"
    tagged = {"StringEquals": {"aws:ResourceTag/gpucloud:cluster": [cluster]}}
    here = {"StringEquals": {"aws:RequestedRegion": [region]}}
    ends, looks = "autoscaling:TerminateInstanceInAutoScalingGroup", "autoscaling:DescribeAutoScalingGroups"
    statements = [
        {"Effect": "Allow", "Action": ends, "Resource": "*", "Condition": tagged},
        {"Effect": "Allow", "Action": looks, "Resource": "*", "Condition": here},
    ]
    iam, policy = lab.client("iam"), {"Version": "2012-10-17", "Statement": statements}
    iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}", Tags=TAGS)
    iam.put_role_policy(RoleName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
    arn = f"arn:aws:iam::123456789012:role/{name}"
    keys = lab.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-0")["Credentials"]
    return boto3.client(
        "autoscaling", region_name="us-east-1", endpoint_url=lab.url, aws_access_key_id=keys["AccessKeyId"],
        aws_secret_access_key=keys["SecretAccessKey"], aws_session_token=keys["SessionToken"],
        config=botocore.config.Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip


def test_a_request_whose_sender_dies_half_way_is_none(lab: Lab) -> None:
    address = urlsplit(lab.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80)) as line:
        line.sendall(b"PUT /gpucloud-x/half HTTP/1.1\r\nHost: s3\r\nContent-Length: 10\r\n\r\n12345")
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b""
    assert "Contents" not in lab.client("s3").list_objects_v2(**BUCKET)


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except botocore.exceptions.ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def test_a_session_stands_only_where_the_rights_of_its_caller_and_of_the_machine_suffice(lab: Lab) -> None:
    ec2, iam, ssm = lab.client("ec2"), lab.client("iam"), as_the_caller(lab, "ssm")
    iam.create_role(RoleName="nodes", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="nodes")
    iam.add_role_to_instance_profile(InstanceProfileName="nodes", RoleName="nodes")
    machine = ec2.run_instances(
        ImageId=ec2.describe_images()["Images"][0]["ImageId"], InstanceType="t3.micro", MinCount=1, MaxCount=1,
        IamInstanceProfile={"Name": "nodes"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": TAGS}],
    )["Instances"][0]["InstanceId"]  # fmt: skip
    _until(lambda: lab.world.instance(machine).state == "running")

    def start() -> dict[str, Any]:
        asked = {"DocumentName": "AWS-StartSSHSession", "Parameters": {"portNumber": ["22"]}}
        return dict(ssm.start_session(Target=machine, **asked))

    let_as_printed(lab)
    let_machine(lab, session_manager=False)
    assert code_of(start) == "TargetNotConnected"
    let_machine(lab, session_manager=True)
    session = start()
    assert session["SessionId"].startswith("AIDALAB-")
    ssm.terminate_session(SessionId=session["SessionId"])
    assert {one.by for one in lab.judged if one.refused is not None} == {"nodes"}
    ec2.delete_tags(Resources=[machine], Tags=TAGS)
    assert code_of(start) == "AccessDenied"


def let_machine(lab: Lab, *, session_manager: bool) -> None:
    policy = node_policy(
        partition="aws", account="123456789012", regions=("us-east-1",), cluster="gpucloud-digits", bucket="gpucloud-x",
        session_manager=session_manager,
    )  # fmt: skip
    lab.client("iam").put_role_policy(RoleName="nodes", PolicyName="printed", PolicyDocument=json.dumps(policy))


def as_the_caller(lab: Lab, service: str) -> Any:
    """A client whose calls are judged: not the test's own."""
    settings = botocore.config.Config(retries={"total_max_attempts": 1})
    keys = {
        "aws_access_key_id": lab.settings["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": lab.settings["AWS_SECRET_ACCESS_KEY"],
    }
    return boto3.client(service, region_name="us-east-1", endpoint_url=lab.url, config=settings, **keys)
