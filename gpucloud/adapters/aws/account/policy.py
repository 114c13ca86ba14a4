"""The least that IAM must allow: the caller's policies and a machine's, as documents to attach.

What is made must carry gpucloud's tag from birth, and only what carries it may be changed or deleted. Policies are
split because one managed policy holds 6,144 characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
_TAG = "gpucloud:managed"
_BORN_OURS = {"StringEquals": {f"aws:RequestTag/{_TAG}": "true"}}
_OURS = {"StringEquals": {f"aws:ResourceTag/{_TAG}": "true"}}

READS = {
    "ec2": (
        "DescribeAddresses DescribeAddressesAttribute DescribeAvailabilityZones"
        " DescribeImages DescribeInstanceTypeOfferings DescribeInstanceTypes"
        " DescribeInstances DescribeInternetGateways DescribeKeyPairs DescribeLaunchTemplateVersions"
        " DescribeLaunchTemplates DescribeNatGateways DescribeNetworkAcls DescribeNetworkInterfaces"
        " DescribePlacementGroups DescribePrefixLists DescribeRouteTables DescribeSecurityGroupRules"
        " DescribeSecurityGroups DescribeSpotPriceHistory DescribeSubnets DescribeVolumes DescribeVpcAttribute"
        " DescribeVpcEndpoints DescribeVpcs GetSpotPlacementScores"
    ),
    "autoscaling": "DescribeAutoScalingGroups DescribeScalingActivities DescribeScheduledActions",
    "servicequotas": (
        "GetAWSDefaultServiceQuota GetServiceQuota ListRequestedServiceQuotaChangeHistory"
        " ListRequestedServiceQuotaChangeHistoryByQuota"
    ),
}
_CREATES = (
    "AllocateAddress CreateInternetGateway CreateLaunchTemplate CreateNatGateway CreatePlacementGroup CreateRouteTable"
    " CreateSecurityGroup CreateSubnet CreateVpc CreateVpcEndpoint ImportKeyPair"
)
_CREATED = (
    "elastic-ip internet-gateway launch-template natgateway placement-group route-table security-group"
    " security-group-rule subnet vpc vpc-endpoint key-pair"
)
# What a creation stands in or on, which must be ours too.
_PARENTS = "elastic-ip route-table subnet vpc"
_INSIDE = "CreateNatGateway CreateRouteTable CreateSubnet CreateVpcEndpoint"
_CHANGES = (
    "AssociateRouteTable AttachInternetGateway AuthorizeSecurityGroupEgress AuthorizeSecurityGroupIngress CreateRoute"
    " CreateLaunchTemplateVersion CreateTags"
    " DeleteInternetGateway DeleteKeyPair DeleteLaunchTemplate DeleteNatGateway DeleteNetworkInterface"
    " DeletePlacementGroup DeleteRoute DeleteRouteTable DeleteSecurityGroup DeleteSubnet DeleteTags DeleteVolume"
    " DeleteVpc DeleteVpcEndpoints DetachInternetGateway DisassociateAddress DisassociateRouteTable GetConsoleOutput"
    " ModifyLaunchTemplate"
    " ModifySecurityGroupRules ReleaseAddress RevokeSecurityGroupEgress RevokeSecurityGroupIngress TerminateInstances"
)
_GROUP_CHANGES = (
    "CreateOrUpdateTags DeleteAutoScalingGroup DeleteScheduledAction DetachInstances LaunchInstances"
    " PutScheduledUpdateGroupAction ResumeProcesses SetDesiredCapacity SuspendProcesses"
    " TerminateInstanceInAutoScalingGroup UpdateAutoScalingGroup"
)
_ROLE_READS = "GetRole GetRolePolicy ListAttachedRolePolicies ListInstanceProfilesForRole ListRolePolicies"
_ROLE_CHANGES = "DeleteRole DeleteRolePolicy DetachRolePolicy TagRole UntagRole"
_PROFILES = (
    "AddRoleToInstanceProfile CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile"
    " RemoveRoleFromInstanceProfile TagInstanceProfile UntagInstanceProfile"
)
_BUCKET = (
    "CreateBucket DeleteBucket GetBucketTagging ListBucket ListBucketMultipartUploads ListBucketVersions"
    " PutBucketOwnershipControls PutBucketPolicy PutBucketPublicAccessBlock PutBucketTagging PutBucketVersioning"
    " PutEncryptionConfiguration PutLifecycleConfiguration"
)
_OBJECTS = "AbortMultipartUpload DeleteObject DeleteObjectVersion GetObject GetObjectVersion PutObject"


def user_policy(
    *,
    partition: str,
    account: str,
    region: str | None,
    stores: tuple[str, ...] = (),
    data: tuple[str, ...] = (),
    permissions_boundary: str | None = None,
) -> dict[str, Document]:
    """Return what whoever runs gpucloud needs, a document by name; `region` None: in every region.

    `stores` are buckets of the user's own, `data` those that data sets are in. With
    `permissions_boundary` (an ARN) roles can be made under it only.
    """
    names = _Names(partition=partition, account=account, region=region or "*")
    return {
        "gpucloud-read": _document(_reads(names, region)),
        "gpucloud-machines": _document(_machines(names)),
        "gpucloud-account": _document(
            [*_roles(names, permissions_boundary), *_buckets(names, stores), *_data(names, data), *_drills(names)]
        ),
    }


def node_policy(  # noqa: PLR0913  each by its name
    *,
    partition: str,
    account: str,
    region: str,
    cluster: str,
    bucket: str,
    prefix: str = "",
    data: tuple[str, ...] = (),
    unattended: bool = False,
) -> Document:
    """Return what a machine of the cluster needs: its job's objects and data, its own host key, its own group's end.

    `data` are `s3://bucket/prefix`: each may be read, as one object or a folder of them. Of an `unattended` job, which
    drives itself, a machine also sees its own group and replaces a machine of it; never more of them, nor for longer.
    It is what `terraform/aws/cluster` gives the role that it makes; for who brings an instance profile of their own.
    """
    store = f"arn:{partition}:s3:::{bucket}"
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    jobs = f"{below}jobs/{cluster.removeprefix('gpucloud-')}/*"
    names = _Names(partition=partition, account=account, region=region)
    group = names.of("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{cluster}")
    ours = {"aws:ResourceTag/gpucloud:cluster": cluster}
    paths = [source.removeprefix("s3://").rstrip("/") for source in data]
    read = [
        f"arn:{partition}:s3:::{name}" for path in paths for name in (*([path] if "/" in path else []), f"{path}/*")
    ]
    return _document(
        [
            _allow("ListJob", "s3", "ListBucket", [store], {"StringLike": {"s3:prefix": jobs}}),
            _allow("Job", "s3", "AbortMultipartUpload DeleteObject GetObject PutObject", [f"{store}/{jobs}"]),
            # <role id>:<instance id>: no machine can write another one's key.
            _allow("HostKey", "s3", "PutObject", [f"{store}/{below}clusters/{cluster}/hosts/${{aws:userid}}"]),
            # What it must know and run to make itself fit; it cannot change what others read there.
            _allow(
                "Record", "s3", "GetObject",
                [f"{store}/{below}clusters/{cluster}/{name}" for name in ("gpucloud-*.zip", "node.json")],
            ),
            *([_allow("Data", "s3", "GetObject", read)] if read else []),
            _allow("Level", "autoscaling", "SetDesiredCapacity", [group], {"StringEquals": ours}),
            _allow(
                "End", "autoscaling", "UpdateAutoScalingGroup", [group],
                {"StringEquals": ours, "NumericLessThanEquals": {"autoscaling:MaxSize": "0"}},
            ),
            *(_drive(names, f"{store}/{below}clusters/{cluster}", group, ours) if unattended else []),
        ]
    )  # fmt: skip


def actions(*documents: Document) -> frozenset[str]:
    """Return every action that the documents allow, as `service:Action`."""
    return frozenset(action for document in documents for one in document["Statement"] for action in one["Action"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    partition: str
    account: str
    region: str

    def of(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    def ec2(self, kinds: str) -> list[str]:
        return [self.of("ec2", f"{kind}/*") for kind in kinds.split()]

    def iam(self, resource: str) -> str:
        return f"arn:{self.partition}:iam::{self.account}:{resource}"

    @property
    def suffix(self) -> str:
        return "amazonaws.com.cn" if self.partition == "aws-cn" else "amazonaws.com"


def _reads(names: _Names, region: str | None) -> list[Document]:
    here: Document = {"StringEquals": {"aws:RequestedRegion": region}} if region else {}
    reads = [f"{service}:{action}" for service, list_ in READS.items() for action in list_.split()]
    parameters = f"arn:{names.partition}:ssm:{names.region}::parameter/aws/service/*"
    budget = f"arn:{names.partition}:budgets::{names.account}:budget/gpucloud-*"
    return [
        _statement("Look", reads, ["*"], here),
        # Answered in a few regions only, whatever region is asked about.
        _allow("ListPrices", "pricing", "GetProducts", ["*"]),
        _allow("ReadBill", "ce", "GetCostAndUsage", ["*"]),
        # IAM is of no region; `gpucloud gc` finds a role that is all that is left of a cluster.
        _allow("ListRoles", "iam", "ListInstanceProfiles ListRoles", ["*"]),
        _allow("PublicImages", "ssm", "GetParameter", [parameters]),
        _allow("AskForQuota", "servicequotas", "RequestServiceQuotaIncrease", [names.of("servicequotas", "ec2/*")]),
        _allow("Alert", "budgets", "ListTagsForResource ModifyBudget TagResource UntagResource ViewBudget", [budget]),
    ]


def _drive(names: _Names, place: str, group: str, ours: Document) -> list[Document]:
    """What a job that drives itself needs beside; AWS lets nobody list a part of a region."""
    looks = [f"autoscaling:{name}" for name in READS["autoscaling"].split()]
    here = {"StringEquals": {"aws:RequestedRegion": names.region}}
    return [
        _allow("Order", "s3", "GetObject", [f"{place}/{name}" for name in ("drive.json", "hosts/*")]),
        _statement("Look", [*looks, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], here),
        _allow("Replace", "autoscaling", "TerminateInstanceInAutoScalingGroup", [group], {"StringEquals": ours}),
    ]


def _machines(names: _Names) -> list[Document]:
    group = [names.of("autoscaling", "autoScalingGroup:*:autoScalingGroupName/gpucloud-*")]
    v2_only = {"StringEquals": {f"aws:RequestTag/{_TAG}": "true", "ec2:MetadataHttpTokens": "required"}}
    public = [f"arn:{names.partition}:ec2:{names.region}::{kind}/*" for kind in ("image", "snapshot")]
    used = "capacity-reservation key-pair launch-template placement-group security-group subnet"
    tagged_at_birth = f"{_CREATES} RunInstances".split()
    return [
        _allow("Make", "ec2", _CREATES, names.ec2(_CREATED), _BORN_OURS),
        _allow("MakeInside", "ec2", _INSIDE, names.ec2(_PARENTS), _OURS),
        # In a network of the user's own, too: the group itself must be tagged.
        _allow("MakeGroupInside", "ec2", "CreateSecurityGroup", names.ec2("vpc")),
        _allow(
            "TagAtBirth", "ec2", "CreateTags", [names.of("ec2", "*")],
            {"StringEquals": {"ec2:CreateAction": tagged_at_birth}},
        ),
        # A network's default group is born by AWS, untagged, and Terraform locks it.
        _allow("TagDefaultGroup", "ec2", "CreateTags", names.ec2("security-group"), _BORN_OURS),
        _allow("Change", "ec2", _CHANGES, [names.of("ec2", "*")], _OURS),
        # Auto Scaling checks that whoever sets a launch template could use it.
        _allow("RunTagged", "ec2", "RunInstances", names.ec2("instance"), v2_only),
        _allow("RunWithTagged", "ec2", "RunInstances", names.ec2("volume network-interface"), _BORN_OURS),
        _allow("RunFrom", "ec2", "RunInstances", [*names.ec2(used), *public]),
        # LaunchInstances starts machines through a fleet, as its caller (Auto Scaling user guide).
        _allow("LaunchThroughFleet", "ec2", "CreateFleet", [names.of("ec2", "*"), *public]),
        _allow("MakeGroup", "autoscaling", "CreateAutoScalingGroup CreateOrUpdateTags", group, _BORN_OURS),
        _allow("ChangeGroup", "autoscaling", _GROUP_CHANGES, group, _OURS),
    ]  # fmt: skip


def _roles(names: _Names, boundary: str | None) -> list[Document]:
    role, profile = names.iam("role/gpucloud-*"), names.iam("instance-profile/gpucloud-*")
    bounded: Document = {"StringEquals": {"iam:PermissionsBoundary": boundary}} if boundary else {}
    managed = f"arn:{names.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
    attached = {**bounded, "ArnEquals": {"iam:PolicyARN": managed}}
    services = [f"ec2.{names.suffix}", "fis.amazonaws.com", "autoscaling.amazonaws.com"]
    linked = ["autoscaling.amazonaws.com", "spot.amazonaws.com", "fis.amazonaws.com"]
    return [
        _allow("MakeRole", "iam", "CreateRole PutRolePolicy", [role], bounded),
        _allow("SessionManagerRole", "iam", "AttachRolePolicy", [role], attached),
        _allow("Role", "iam", f"{_ROLE_READS} {_ROLE_CHANGES}", [role]),
        _allow("Profile", "iam", _PROFILES, [profile]),
        _allow("PassRole", "iam", "PassRole", [role], {"StringEquals": {"iam:PassedToService": services}}),
        _allow(
            "AwssOwnRoles", "iam", "CreateServiceLinkedRole", [names.iam("role/aws-service-role/*")],
            {"StringEquals": {"iam:AWSServiceName": linked}},
        ),
    ]  # fmt: skip


def _buckets(names: _Names, stores: tuple[str, ...]) -> list[Document]:
    own = f"arn:{names.partition}:s3:::gpucloud-{names.account}-{names.region}"
    buckets = [own, *(f"arn:{names.partition}:s3:::{store}" for store in stores)]
    return [
        _allow("Bucket", "s3", _BUCKET, [own]),
        *([_allow("Stores", "s3", "ListBucket ListBucketVersions", buckets[1:])] if stores else []),
        _allow("Objects", "s3", _OBJECTS, [f"{bucket}/*" for bucket in buckets]),
    ]


def _data(names: _Names, data: tuple[str, ...]) -> list[Document]:
    buckets = [f"arn:{names.partition}:s3:::{bucket}" for bucket in dict.fromkeys(data)]
    return [_allow("ListData", "s3", "ListBucket", buckets)] if buckets else []


def _drills(names: _Names) -> list[Document]:
    template, experiment = names.of("fis", "experiment-template/*"), names.of("fis", "experiment/*")
    action = f"arn:{names.partition}:fis:{names.region}:{names.account}:action/aws:ec2:send-spot-instance-interruptions"
    instance = names.of("ec2", "instance/*")
    tagged = {"StringEquals": {f"ssm:resourceTag/{_TAG}": "true"}}
    document = f"arn:{names.partition}:ssm:{names.region}::document/AWS-StartSSHSession"
    return [
        _allow(
            "Drill", "fis", "CreateExperimentTemplate StartExperiment TagResource", [template, experiment], _BORN_OURS
        ),
        _allow("DrillAction", "fis", "CreateExperimentTemplate", [action]),
        _allow(
            "DrillOurs", "fis", "DeleteExperimentTemplate GetExperiment StartExperiment", [template, experiment], _OURS
        ),
        _allow("Session", "ssm", "StartSession", [instance], tagged),
        _allow("SessionBySsh", "ssm", "StartSession", [document]),
    ]


def _allow(sid: str, service: str, names: str, resources: list[str], condition: Document | None = None) -> Document:
    return _statement(sid, [f"{service}:{name}" for name in names.split()], resources, condition or {})


def _statement(sid: str, allowed: Iterable[str], resources: list[str], condition: Document) -> Document:
    statement: Document = {"Sid": sid, "Effect": "Allow", "Action": sorted(allowed), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def _document(statements: list[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": statements}
