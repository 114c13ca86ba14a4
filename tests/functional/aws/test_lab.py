"""The emulated AWS itself: its faults, its call log, what it puts right in moto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import botocore.exceptions
import pytest

from tests.lab.aws import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "lab") as made:
        yield made


def test_every_call_is_written_down_with_its_service_action_and_status(lab: Lab) -> None:
    lab.client("s3").create_bucket(Bucket="gpucloud-x")
    lab.client("ec2").describe_vpcs()
    assert [(call.service, call.action, call.status) for call in lab.calls] == [
        ("s3", "CreateBucket", 200),
        ("ec2", "DescribeVpcs", 200),
    ]
    assert len((lab.folder / "calls.jsonl").read_text().splitlines()) == 2


def test_a_call_refused_before_is_not_applied(lab: Lab) -> None:
    lab.faults.add("CreateBucket", code="SlowDown")
    with pytest.raises(botocore.exceptions.ClientError, match="SlowDown"):
        lab.client("s3").create_bucket(Bucket="gpucloud-x")
    assert lab.client("s3").list_buckets()["Buckets"] == []


def test_a_lost_reply_leaves_what_the_call_did(lab: Lab) -> None:
    lab.faults.add("CreateBucket", when="after")
    with pytest.raises(botocore.exceptions.ConnectionClosedError):
        lab.client("s3").create_bucket(Bucket="gpucloud-x")
    assert [bucket["Name"] for bucket in lab.client("s3").list_buckets()["Buckets"]] == ["gpucloud-x"]


@pytest.mark.parametrize(
    ("service", "operation", "code"),
    [
        ("ec2", "describe_vpcs", "RequestExpired"),
        ("s3", "list_buckets", "ExpiredToken"),
        ("autoscaling", "describe_auto_scaling_groups", "ExpiredToken"),
        ("sts", "get_caller_identity", "ExpiredToken"),
        ("ssm", "describe_parameters", "ExpiredTokenException"),
        ("service-quotas", "list_services", "ExpiredTokenException"),
    ],
)
def test_expired_credentials_are_refused_by_every_service_in_its_own_words(
    lab: Lab, service: str, operation: str, code: str
) -> None:
    lab.faults.expire_credentials()
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        getattr(lab.client(service), operation)()
    assert caught.value.response["Error"]["Code"] == code


def test_placement_groups_are_made_found_by_tag_and_deleted(lab: Lab) -> None:
    ec2 = lab.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "gpucloud:managed", "Value": "true"}]}]
    ec2.create_placement_group(GroupName="p", Strategy="cluster", TagSpecifications=tags)
    ec2.create_placement_group(GroupName="q", Strategy="cluster")
    wanted = [{"Name": "tag:gpucloud:managed", "Values": ["true"]}]
    assert [g["GroupName"] for g in ec2.describe_placement_groups(Filters=wanted)["PlacementGroups"]] == ["p"]
    ec2.delete_placement_group(GroupName="p")
    assert [g["GroupName"] for g in ec2.describe_placement_groups()["PlacementGroups"]] == ["q"]


def test_two_labs_after_each_other_share_nothing(tmp_path: Path) -> None:
    for turn in ("one", "two"):
        with Lab(tmp_path / turn) as lab:
            assert lab.client("s3").list_buckets()["Buckets"] == []
            lab.client("s3").create_bucket(Bucket="gpucloud-x")


def test_a_rule_for_all_protocols_is_changed_without_ports(lab: Lab) -> None:
    ec2 = lab.client("ec2")
    group = ec2.create_security_group(GroupName="nodes", Description="nodes")["GroupId"]
    own = [{"Name": "group-id", "Values": [group]}]
    (born,) = ec2.describe_security_group_rules(Filters=own)["SecurityGroupRules"]
    changed = {"IpProtocol": "-1", "CidrIpv4": "0.0.0.0/0", "Description": "the way out"}
    ec2.modify_security_group_rules(
        GroupId=group,
        SecurityGroupRules=[{"SecurityGroupRuleId": born["SecurityGroupRuleId"], "SecurityGroupRule": changed}],
    )
    (now,) = ec2.describe_security_group_rules(Filters=own)["SecurityGroupRules"]
    assert now == born | {"Description": "the way out"}
