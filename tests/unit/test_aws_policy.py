"""The printed IAM policies: what they allow, under which conditions, and what each call needs of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpucloud.adapters.aws.policy import (
    Document,
    PrintedPolicies,
    actions,
    boundary_arn,
    boundary_policy,
    node_policy,
    user_policy,
)
from gpucloud.adapters.aws.statements import Uses
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import AwsChoices, Resources
from tests.iam.actions import action_of

ACCOUNT = "123456789012"
LIMITS = boundary_arn("aws", ACCOUNT)
USER = user_policy(partition="aws", account=ACCOUNT, regions=("us-east-1",), boundary=LIMITS)
STATEMENTS = [statement for document in USER.values() for statement in document["Statement"]]
NODE = node_policy(
    partition="aws", account=ACCOUNT, regions=("us-east-1",), cluster="gpucloud-digits", bucket="b", prefix="team"
)


def by_sid(name: str, documents: dict[str, Document] = USER) -> dict[str, Any]:
    (found,) = [one for document in documents.values() for one in document["Statement"] if one["Sid"] == name]
    return found


MANY = tuple(f"ap-southeast-{number}" for number in range(17))


@pytest.mark.parametrize("partition", ["aws", "aws-cn", "aws-us-gov"])
@pytest.mark.parametrize(("regions", "most"), [((), 4), (MANY[:1], 4), (MANY[:2], 5), (MANY[:12], 7), (MANY, 8)])
def test_each_document_fits_into_a_managed_policy(partition: str, regions: tuple[str, ...], most: int):
    uses = Uses(
        stores=("a" * 63,), data=("b" * 63,), subnets=("subnet-" + "0" * 17,) * 3, kms_keys=("k" * 36,),
        instance_profile=f"arn:{partition}:iam::{ACCOUNT}:instance-profile/{'p' * 64}",
        instance_role=f"arn:{partition}:iam::{ACCOUNT}:role/{'r' * 64}",
    )  # fmt: skip
    boundary = f"arn:{partition}:iam::{ACCOUNT}:policy/{'b' * 64}"
    who = {"partition": partition, "account": ACCOUNT, "regions": regions}
    documents = user_policy(**who, uses=uses, boundary=boundary)
    sizes = [size(document) for document in [*documents.values(), boundary_policy(**who, uses=uses)]]
    assert max(sizes) <= 6144
    names = ["gpucloud-read", "gpucloud-network", "gpucloud-machines", "gpucloud-account"]
    assert [name for name in documents if name[-1].isalpha()] == names
    assert len(documents) <= most  # of ten that a user can hold
    whole = user_policy(**{**who, "regions": regions[:1]}, uses=uses, boundary=boundary)
    assert sids(documents) == sids(whole)


def test_a_boundary_that_is_too_long_for_aws_is_refused_with_what_makes_it_shorter():
    def printed(count: int) -> PrintedPolicies:
        regions = Resources(regions=tuple(f"ap-southeast-{number}" for number in range(count)))
        known = regions.regions
        return PrintedPolicies(AwsChoices(), regions, without_address=tuple, regions=known, account=ACCOUNT)

    keys = ("k" * 36,)
    assert size(printed(20).boundary(None, keys)) <= 6144
    with pytest.raises(UsageError, match=r"the boundary has 6,\d\d\d characters, and AWS takes 6,144 in one") as no:
        printed(37).boundary(None, keys)
    assert no.value.hint == "fewer `regions:` in the job file, or fewer --kms-key"


def test_a_machines_policy_fits_into_its_role():
    policy = node_policy(
        partition="aws-us-gov", account=ACCOUNT, regions=("us-gov-west-1",), cluster="gpucloud-" + "d" * 40,
        bucket="b" * 63, prefix="p" * 40, data=("s3://" + "s" * 63 + "/imagenet",) * 3, kms_keys=("k" * 36,),
        unattended=True, session_manager=True,
    )  # fmt: skip
    assert size(policy) <= 10240


def sids(documents: dict[str, Document]) -> list[str]:
    return [statement["Sid"] for document in documents.values() for statement in document["Statement"]]


def size(document: Document) -> int:
    return len(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["Sid"])
def test_everything_everywhere_is_reading_in_the_region(statement: dict[str, Any]):
    assert not any("*" in action for action in statement["Action"])
    if statement["Resource"] != ["*"]:
        return
    reading = ("Describe", "Get", "List")
    assert all(action.partition(":")[2].startswith(reading) for action in statement["Action"])
    if statement["Sid"] not in {"ListPrices", "ListRoles", "ReadBill"}:
        assert statement["Condition"] == {"StringEquals": {"aws:RequestedRegion": ["us-east-1"]}}


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["Sid"])
def test_every_resource_is_in_the_account_and_region_or_ours_by_name(statement: dict[str, Any]):
    for resource in set(statement["Resource"]) - {"*"}:
        _, partition, service, region, account, name = resource.split(":", 5)
        assert partition == "aws"
        if service in {"s3", "iam", "budgets", "billing"}:
            assert name.startswith(
                ("gpucloud-", "role/gpucloud-", "instance-profile/gpucloud-", "budget/gpucloud-", "policy/gpucloud-")
            ) or name in {"role/aws-service-role/*", "billingview/*"}
        else:
            assert region == "us-east-1"
            assert account == ACCOUNT or name.startswith(("image/", "snapshot/", "parameter/aws/", "document/AWS-"))


TWO = ("us-east-1", "us-west-2")


def test_what_lies_in_a_region_is_reached_in_each_that_is_named_and_in_no_other():
    who: dict[str, Any] = {"partition": "aws", "account": ACCOUNT, "regions": TWO}
    documents = {
        **user_policy(**who, boundary=LIMITS),
        "boundary": boundary_policy(**who),
        "machine": node_policy(**who, cluster="gpucloud-digits", bucket="b", unattended=True),
    }
    for name, statement in ((name, one) for name, document in documents.items() for one in document["Statement"]):
        here = statement.get("Condition", {}).get("StringEquals", {}).get("aws:RequestedRegion")
        regions = {(arn.split(":") + [""] * 3)[3] for arn in statement["Resource"]}
        assert regions in ({""}, {"*"}, set(TWO)), statement
        looks = statement["Sid"] == "Look" and name != "boundary"
        assert here == (list(TWO) if regions == {"*"} or looks else None), statement


def test_of_several_regions_each_has_a_bucket_and_a_drills_role_and_the_keys_id():
    documents = user_policy(partition="aws", account=ACCOUNT, regions=TWO, uses=Uses(kms_keys=("mrk-1",)))
    assert by_sid("Bucket", documents)["Resource"] == [f"arn:aws:s3:::gpucloud-{ACCOUNT}-{region}" for region in TWO]
    assert by_sid("PassDrill", documents)["Resource"] == [
        f"arn:aws:iam::{ACCOUNT}:role/gpucloud-base.drill-{region}" for region in TWO
    ]
    keys = [f"arn:aws:kms:{region}:{ACCOUNT}:key/mrk-1" for region in TWO]
    assert by_sid("Keys", documents)["Resource"] == keys
    machine = node_policy(
        partition="aws", account=ACCOUNT, regions=TWO, cluster="c", bucket="b", kms_keys=("mrk-1",)
    )  # fmt: skip
    store = by_sid("StoreKey", {"node": machine})
    assert store["Resource"] == keys
    assert store["Condition"]["StringEquals"]["kms:ViaService"] == [f"s3.{region}.amazonaws.com" for region in TWO]


def test_what_is_made_is_tagged_and_only_what_is_tagged_is_changed():
    born = {"StringEquals": {"aws:RequestTag/gpucloud:managed": "true"}}
    ours = {"StringEquals": {"aws:ResourceTag/gpucloud:managed": "true"}}
    for sid in ("Make", "RuleBornOurs", "RunWithTagged", "TagGroupAtBirth", "Drill", "TagDrillAtBirth"):
        assert by_sid(sid)["Condition"] == born
    assert by_sid("MakeGroup")["Condition"].items() >= born.items()
    assert by_sid("SetGroup")["Condition"].items() >= ours.items()
    for sid in ("MakeInside", "Change", "ChangeGroup", "DrillOurs", "RunWithOurs"):
        assert by_sid(sid)["Condition"] == ours
    assert "ec2:TerminateInstances" in by_sid("Change")["Action"]
    assert "autoscaling:SetDesiredCapacity" in by_sid("ChangeGroup")["Action"]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement["Sid"])
def test_what_writes_without_a_condition_does_so_on_what_bears_our_name_or_is_nobodys(statement: dict[str, Any]):
    if "Condition" in statement or statement["Resource"] == ["*"]:
        return
    nobodys = (
        "image/", "snapshot/", "spot-instances-request/", "ec2/", "session/${aws:userid}-", "action/aws:",
        "parameter/aws/", "document/AWS-", "billingview/",
    )  # fmt: skip
    for resource in statement["Resource"]:
        name = resource.split(":", 5)[5]
        assert name.startswith(nobodys) or re.match(r"([a-z-]+/)?gpucloud-", name), resource


def test_machines_start_tagged_and_with_imdsv2_only():
    assert by_sid("RunTagged")["Resource"] == [f"arn:aws:ec2:us-east-1:{ACCOUNT}:instance/*"]
    assert by_sid("RunTagged")["Condition"] == {
        "StringEquals": {"aws:RequestTag/gpucloud:managed": "true", "ec2:MetadataHttpTokens": "required"}
    }


def test_tags_are_set_while_a_thing_is_made_or_on_what_is_ours():
    assert "RunInstances" in by_sid("TagAtBirth")["Condition"]["StringEquals"]["ec2:CreateAction"]
    tagging = [statement["Sid"] for statement in STATEMENTS if "ec2:CreateTags" in statement["Action"]]
    assert tagging == ["TagAtBirth", "Change"]


def test_roles_are_passed_to_machines_and_the_drills_to_its_service():
    assert by_sid("PassRole")["Resource"] == [f"arn:aws:iam::{ACCOUNT}:role/gpucloud-*"]
    assert by_sid("PassRole")["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    assert by_sid("PassDrill")["Resource"] == [f"arn:aws:iam::{ACCOUNT}:role/gpucloud-base.drill-us-east-1"]
    assert by_sid("PassDrill")["Condition"] == {"StringEquals": {"iam:PassedToService": "fis.amazonaws.com"}}


def test_in_china_machines_are_another_service():
    documents = user_policy(partition="aws-cn", account=ACCOUNT, regions=("cn-north-1",))
    assert by_sid("PassRole", documents)["Condition"] == {
        "StringEquals": {"iam:PassedToService": "ec2.amazonaws.com.cn"}
    }
    assert "arn:aws:" not in json.dumps(documents)


def test_roles_are_made_under_the_boundary_only():
    assert by_sid("MakeRole")["Condition"] == {"StringEquals": {"iam:PermissionsBoundary": LIMITS}}
    assert not any("Policy" in action and "CreatePolicy" in action for action in actions(*USER.values()))


def test_without_a_boundary_nothing_of_it_is_asked():
    free = user_policy(partition="aws", account=ACCOUNT, regions=("us-east-1",))
    assert "Condition" not in by_sid("MakeRole", free)
    assert LIMITS not in json.dumps(free)


def test_who_makes_no_roles_passes_the_one_that_he_names():
    role = f"arn:aws:iam::{ACCOUNT}:role/research/nodes"
    uses = Uses(instance_profile=f"arn:aws:iam::{ACCOUNT}:instance-profile/research/nodes", instance_role=role)
    ci = user_policy(
        partition="aws", account=ACCOUNT, regions=("us-east-1",), boundary=LIMITS, uses=uses, makes_roles=False
    )
    assert by_sid("PassRole", ci)["Resource"] == [role]
    assert by_sid("OwnProfile", ci)["Resource"] == [uses.instance_profile]
    changing = {
        action for action in actions(*ci.values()) if action.startswith(("iam:Create", "iam:Put", "iam:Delete"))
    }
    assert changing == {"iam:CreateServiceLinkedRole"}


def test_a_key_of_the_users_own_is_used_through_aws_only():
    documents = user_policy(
        partition="aws", account=ACCOUNT, regions=("us-east-1",), boundary=LIMITS, uses=Uses(kms_keys=("abc",))
    )
    assert by_sid("Keys", documents)["Resource"] == [f"arn:aws:kms:us-east-1:{ACCOUNT}:key/abc"]
    for sid in ("Keys", "KeyGrants"):
        via = by_sid(sid, documents)["Condition"]["StringLike"]["kms:ViaService"]
        assert via == ["ec2.*.amazonaws.com", "s3.*.amazonaws.com"]
    assert by_sid("KeyGrants", documents)["Condition"]["Bool"] == {"kms:GrantIsForAWSResource": "true"}


def test_what_the_boundary_allows_holds_all_that_machines_and_the_drill_need():
    most = actions(boundary_policy(partition="aws", account=ACCOUNT, regions=()))
    driving = node_policy(
        partition="aws", account=ACCOUNT, regions=("us-east-1",), cluster="gpucloud-digits", bucket="b",
        unattended=True, session_manager=True,
    )  # fmt: skip
    assert actions(driving) - most == set()
    assert "ec2:SendSpotInstanceInterruptions" in most
    assert not any(action.startswith("iam:") for action in most)


def test_by_session_manager_a_machine_gets_its_channels_and_reads_no_parameter():
    policy = node_policy(
        partition="aws", account=ACCOUNT, regions=("us-east-1",), cluster="gpucloud-digits", bucket="b", prefix="team",
        session_manager=True,
    )  # fmt: skip
    assert actions(policy) - actions(NODE) == {
        "ssm:UpdateInstanceInformation",
        *(f"ssmmessages:{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data")),
    }


def test_buckets_of_the_users_own_hold_objects_and_are_not_changed():
    documents = user_policy(partition="aws", account=ACCOUNT, regions=("us-east-1",), uses=Uses(stores=("team-data",)))
    assert by_sid("Stores", documents)["Action"] == [
        *("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration", "s3:ListBucket", "s3:ListBucketVersions")
    ]
    assert by_sid("Objects", documents)["Resource"] == [
        f"arn:aws:s3:::gpucloud-{ACCOUNT}-us-east-1/*",
        "arn:aws:s3:::team-data/*",
    ]
    assert by_sid("Bucket", documents)["Resource"] == [f"arn:aws:s3:::gpucloud-{ACCOUNT}-us-east-1"]


def test_a_machine_reaches_its_job_its_host_key_and_its_groups_end():
    assert actions(NODE) == {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "autoscaling:SetDesiredCapacity",
    }
    resources = {statement["Sid"]: statement["Resource"] for statement in NODE["Statement"]}
    group = f"arn:aws:autoscaling:us-east-1:{ACCOUNT}:autoScalingGroup:*:autoScalingGroupName/gpucloud-digits"
    assert resources == {
        "ListJob": ["arn:aws:s3:::b"],
        "ReadJob": ["arn:aws:s3:::b/team/jobs/digits/*"],
        "WriteJob": [f"arn:aws:s3:::b/team/jobs/digits/{name}/*" for name in ("checkpoints", "outputs", "status")],
        "Prune": ["arn:aws:s3:::b/team/jobs/digits/checkpoints/*"],
        "HostKey": ["arn:aws:s3:::b/team/clusters/gpucloud-digits/hosts/${aws:userid}"],
        "Record": [
            "arn:aws:s3:::b/team/clusters/gpucloud-digits/gpucloud-*.zip",
            "arn:aws:s3:::b/team/clusters/gpucloud-digits/node.json",
        ],
        "Level": [group],
    }


def test_a_machine_of_a_job_that_drives_itself_sees_its_group_and_replaces_a_machine_of_it():
    driving = node_policy(
        partition="aws", account=ACCOUNT, regions=("us-east-1",), cluster="gpucloud-digits", bucket="b", prefix="team",
        unattended=True,
    )  # fmt: skip
    assert actions(driving) - actions(NODE) == {
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeScalingActivities",
        "autoscaling:DescribeScheduledActions",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
        "ec2:DescribeInstances",
        "ec2:DescribeSpotPriceHistory",
    }
    common = [one for one in NODE["Statement"] if one["Sid"] != "WriteJob"]
    assert all(one in driving["Statement"] for one in common)
    added = {one["Sid"]: (one["Resource"], one.get("Condition")) for one in driving["Statement"][-4:]}
    group = f"arn:aws:autoscaling:us-east-1:{ACCOUNT}:autoScalingGroup:*:autoScalingGroupName/gpucloud-digits"
    assert added == {
        "FindOrder": (
            ["arn:aws:s3:::b"],
            {"StringEquals": {"s3:prefix": "team/clusters/gpucloud-digits/drive.json"}},
        ),
        "Order": (
            [f"arn:aws:s3:::b/team/clusters/gpucloud-digits/{name}" for name in ("drive.json", "hosts/*")],
            None,
        ),
        "Look": (["*"], {"StringEquals": {"aws:RequestedRegion": ["us-east-1"]}}),
        "Replace": ([group], {"StringEquals": {"aws:ResourceTag/gpucloud:cluster": "gpucloud-digits"}}),
    }


@pytest.mark.parametrize(
    ("service", "operation", "params", "needed"),
    [
        ("sts", "GetCallerIdentity", {}, ()),
        ("ec2", "DescribeInstances", {"Filter.1.Name": "tag:x"}, ("ec2:DescribeInstances",)),
        ("ec2", "CreateVpc", {"TagSpecification.1.Tag.1.Key": "x"}, ("ec2:CreateVpc", "ec2:CreateTags")),
        ("ec2", "CreateTags", {"Tag.1.Key": "x"}, ("ec2:CreateTags",)),
        ("ec2", "CreateRoute", {}, ("ec2:CreateRoute",)),
        (
            "autoscaling",
            "CreateAutoScalingGroup",
            {"Tags.member.1.Key": "x"},
            (
                "autoscaling:CreateAutoScalingGroup",
                "ec2:RunInstances",
                "iam:PassRole",
                "iam:CreateServiceLinkedRole",
                "autoscaling:CreateOrUpdateTags",
            ),
        ),
        ("autoscaling", "UpdateAutoScalingGroup", {"MaxSize": "0"}, ("autoscaling:UpdateAutoScalingGroup",)),
        (
            "autoscaling",
            "UpdateAutoScalingGroup",
            {"MixedInstancesPolicy.LaunchTemplate.Overrides.member.1.InstanceType": "g4dn.xlarge"},
            ("autoscaling:UpdateAutoScalingGroup", "ec2:RunInstances", "iam:PassRole"),
        ),
        ("iam", "CreateRole", {"Tags.member.1.Key": "x"}, ("iam:CreateRole", "iam:TagRole")),
        ("iam", "AddRoleToInstanceProfile", {}, ("iam:AddRoleToInstanceProfile", "iam:PassRole")),
        ("s3", "HeadBucket", {"Bucket": "b"}, ("s3:ListBucket",)),
        ("s3", "HeadObject", {"Bucket": "b"}, ("s3:GetObject",)),
        ("s3", "GetObject", {"versionId": "1"}, ("s3:GetObjectVersion",)),
        ("s3", "DeleteObjects", {}, ("s3:DeleteObject", "s3:DeleteObjectVersion")),
        ("s3", "UploadPart", {}, ("s3:PutObject",)),
        ("s3", "PutBucketEncryption", {}, ("s3:PutEncryptionConfiguration",)),
        ("s3", "GetBucketTagging", {}, ("s3:GetBucketTagging",)),
        (
            "fis",
            "POST /experimentTemplates",
            {"tags": {}},
            ("fis:CreateExperimentTemplate", "iam:PassRole", "fis:TagResource"),
        ),
        ("fis", "GET /experiments/EXP1", {}, ("fis:GetExperiment",)),
        ("budgets", "CreateBudget", {}, ("budgets:ModifyBudget",)),
        ("servicequotas", "GetServiceQuota", {}, ("servicequotas:GetServiceQuota",)),
        ("pricing", "GetProducts", {}, ("pricing:GetProducts",)),
        ("ec2", "DescribeInstanceTypes", {}, ("ec2:DescribeInstanceTypes",)),
        ("ec2", "GetSpotPlacementScores", {}, ("ec2:GetSpotPlacementScores",)),
        ("ce", "GetCostAndUsage", {}, ("ce:GetCostAndUsage",)),
    ],
)
def test_a_call_needs_actions(service: str, operation: str, params: dict[str, Any], needed: tuple[str, ...]):
    assert action_of(service, operation, params) == needed
    assert set(needed) <= actions(*USER.values())


def test_machines_read_the_jobs_data_and_nothing_beside_it():
    policy = node_policy(
        partition="aws-cn", account=ACCOUNT, regions=("cn-north-1",), cluster="c", bucket="b",
        data=("s3://sets/imagenet", "s3://whole"),
    )  # fmt: skip
    data = by_sid("Data", {"node": policy})
    assert data["Action"] == ["s3:GetObject"]
    assert data["Resource"] == [
        "arn:aws-cn:s3:::sets/imagenet", "arn:aws-cn:s3:::sets/imagenet/*", "arn:aws-cn:s3:::whole/*",
    ]  # fmt: skip
    assert "Data" not in [one["Sid"] for one in NODE["Statement"]]


def test_the_caller_lists_the_buckets_of_data_and_reads_nothing_there():
    documents = user_policy(partition="aws", account=ACCOUNT, regions=("us-east-1",), uses=Uses(data=("sets", "sets")))
    assert by_sid("ListData", documents)["Resource"] == ["arn:aws:s3:::sets"]
    assert by_sid("ListData", documents)["Action"] == ["s3:ListBucket"]
    assert not any("sets" in resource for resource in by_sid("Objects", documents)["Resource"])
