"""The least that IAM must allow: the caller's policies, the boundary of the roles it makes, and a machine's policy.

What is made must carry gpucloud's tag from birth, and only what carries it may be changed or deleted. Roles are made
under a boundary only: whoever may make a role without one may make himself an administrator. Policies are split
because one managed policy holds 6,144 characters.
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
        " ListRequestedServiceQuotaChangeHistoryByQuota ListServiceQuotas"
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
_INSIDE = "CreateNatGateway CreateRouteTable CreateSecurityGroup CreateSubnet CreateVpcEndpoint"
_RULES = "AuthorizeSecurityGroupEgress AuthorizeSecurityGroupIngress"
# What a machine is started with, all of it ours.
_USED = "key-pair launch-template placement-group security-group subnet"
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
    "CreateOrUpdateTags DeleteAutoScalingGroup DeleteScheduledAction DeleteTags LaunchInstances"
    " PutScheduledUpdateGroupAction ResumeProcesses SetDesiredCapacity SetInstanceProtection SuspendProcesses"
    " TerminateInstanceInAutoScalingGroup"
)
# By its number only: `$Latest` and `$Default` start by versions whose rights nobody was asked about (Auto Scaling user
# guide, launch template permissions).
_PINNED = {"autoscaling:LaunchTemplateVersionSpecified": "true"}
# Machines in somebody's target group would answer for somebody's service.
_BEHIND_NOTHING = {f"autoscaling:{key}": "true" for key in ("LoadBalancerNames", "TargetGroupARNs")}
# IAM's word for the character. While a thing is being made, AWS judges an ARN with a star where its id will be, so that
# this is a thing at its birth and never one that stands: where a service says nothing like `ec2:CreateAction`.
_UNBORN = "${*}"
_ROLE_READS = "GetRole GetRolePolicy ListAttachedRolePolicies ListInstanceProfilesForRole ListRolePolicies"
_ROLE_CHANGES = "DeleteRole DeleteRolePolicy TagRole UntagRole"
_PROFILES = (
    "AddRoleToInstanceProfile CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile"
    " RemoveRoleFromInstanceProfile TagInstanceProfile UntagInstanceProfile"
)
# Below a job's prefix: what its machines write, and what they write besides while the job drives itself.
_WRITTEN = ("checkpoints/*", "outputs/*", "status/*")
_WRITTEN_DRIVING = (
    "events/*",
    "launches/*",
    "ledger/*",
    "logs/*",
    "metrics/*",
    "profiles/*",
    "state.json",
)
_KEY_USES = "Decrypt DescribeKey GenerateDataKey GenerateDataKeyWithoutPlaintext ReEncryptFrom ReEncryptTo"
_BUCKET = (
    "CreateBucket DeleteBucket GetBucketTagging ListBucket ListBucketMultipartUploads ListBucketVersions"
    " PutBucketOwnershipControls PutBucketPolicy PutBucketPublicAccessBlock PutBucketTagging PutBucketVersioning"
    " PutEncryptionConfiguration PutLifecycleConfiguration"
)
_OBJECTS = "AbortMultipartUpload DeleteObject DeleteObjectVersion GetObject GetObjectVersion PutObject"


BOUNDARY = "gpucloud-boundary"
"""The boundary's name, which gpucloud looks for in an account whose job file names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What of the user's own a job uses, and the printed policies therefore name."""

    stores: tuple[str, ...] = ()  # buckets
    data: tuple[str, ...] = ()  # buckets with data sets
    subnets: tuple[str, ...] = ()
    capacity: tuple[str, ...] = ()  # capacity reservations and Capacity Blocks, by id
    kms_keys: tuple[str, ...] = ()  # ids or ARNs
    instance_profile: str | None = None  # its ARN
    instance_role: str | None = None  # the ARN of its role


def boundary_arn(partition: str, account: str) -> str:
    """Return the ARN of the account's boundary for roles that gpucloud makes."""
    return f"arn:{partition}:iam::{account}:policy/{BOUNDARY}"


def user_policy(
    *,
    partition: str,
    account: str,
    region: str | None,
    uses: Uses | None = None,
    boundary: str | None = None,
    makes_roles: bool = True,
) -> dict[str, Document]:
    """Return what whoever runs gpucloud needs, a document by name; `region` None: in every region.

    Roles can be made under the `boundary` (an ARN) only; with None under none, which makes the holder an
    administrator. Not `makes_roles`: machines then have an instance profile of the user's own.
    """
    names, uses = _Names(partition=partition, account=account, region=region or "*"), uses or Uses()
    own_role = [uses.instance_role] if uses.instance_role else []
    return {
        "gpucloud-read": _document([*_reads(names, region), *_reads_of_roles(uses, boundary)]),
        "gpucloud-network": _document(_network(names, uses)),
        "gpucloud-machines": _document(_machines(names, uses)),
        "gpucloud-account": _document(
            [
                *(_roles(names, boundary) if makes_roles else _seen_roles(names)),
                *_passed(names, own_role, makes_roles=makes_roles),
                *_buckets(names, uses.stores),
                *_data(names, uses.data),
                *_keys(names, uses.kms_keys),
                *_drills(names),
            ]
        ),
    }


def boundary_policy(*, partition: str, account: str, region: str | None, uses: Uses | None = None) -> Document:
    """Return the most that any role of gpucloud's making can do, whatever its policy says; `region` None: in any.

    It is as much as machines of all jobs, and the role for drills, need; and no more than who makes such roles may
    himself, but for reading data sets and sending a machine of gpucloud its interruption.
    """
    names, uses = _Names(partition=partition, account=account, region=region or "*"), uses or Uses()
    own = f"arn:{partition}:s3:::gpucloud-{account}-{names.region}"
    buckets = [own, *(f"arn:{partition}:s3:::{store}" for store in uses.stores)]
    sets = [f"arn:{partition}:s3:::{bucket}/*" for bucket in dict.fromkeys(uses.data)]
    written = [f"*jobs/*/{name}" for name in (*_WRITTEN, *_WRITTEN_DRIVING)]
    drives = [f"autoscaling:{name}" for name in READS["autoscaling"].split()]
    group = [names.of("autoscaling", "autoScalingGroup:*:autoScalingGroupName/gpucloud-*")]
    return _document(
        [
            _allow("List", "s3", "ListBucket", buckets),
            _allow("Read", "s3", "GetObject", [*(f"{bucket}/*" for bucket in buckets), *sets]),
            # Never what the user's side alone says: `control/`, and what clusters are told.
            _allow(
                "Write", "s3", "AbortMultipartUpload DeleteObject PutObject",
                [f"{bucket}/{path}" for bucket in buckets for path in (*written, "*clusters/*/hosts/*")],
            ),
            # A pattern's star passes slashes: `jobs/*/ledger/*` would be `jobs/x/control/ledger/*` too.
            {
                **_allow(
                    "NotOrders",
                    "s3",
                    "AbortMultipartUpload DeleteObject PutObject",
                    [f"{bucket}/*jobs/*/control/ledger/*" for bucket in buckets],
                ),
                "Effect": "Deny",
            },
            _allow("Group", "autoscaling", "SetDesiredCapacity TerminateInstanceInAutoScalingGroup", group, _OURS),
            _statement("Look", [*drives, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], {}),
            _allow("Interrupt", "ec2", "SendSpotInstanceInterruptions", names.ec2("instance"), _OURS),
            *_sessions(),
            *_keys(names, uses.kms_keys, grants=False),
        ]
    )  # fmt: skip


def node_policy(  # noqa: PLR0913  each by its name
    *,
    partition: str,
    account: str,
    region: str,
    cluster: str,
    bucket: str,
    prefix: str = "",
    data: tuple[str, ...] = (),
    kms_keys: tuple[str, ...] = (),
    unattended: bool = False,
    session_manager: bool = False,
) -> Document:
    """Return what a machine of the cluster needs: its job's objects and data, its own host key, its own group's level.

    `data` are `s3://bucket/prefix`: each may be read, as one object or a folder of them. It reads all of its job, and
    writes checkpoints, outputs and its status. Of an `unattended` job, which drives itself, a machine also writes the
    job's state and its records, sees its own group and replaces a machine of it; never more of them, nor for longer,
    and never what the user's side alone says (`control/`). `session_manager`: it is reached through AWS's agent.
    It is what `terraform/aws/cluster` gives the role that it makes; for who brings an instance profile of their own.
    """
    store = f"arn:{partition}:s3:::{bucket}"
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    job = f"{below}jobs/{cluster.removeprefix('gpucloud-')}"
    place = f"{store}/{below}clusters/{cluster}"
    names = _Names(partition=partition, account=account, region=region)
    group = names.of("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{cluster}")
    ours = {"StringEquals": {"aws:ResourceTag/gpucloud:cluster": cluster}}
    written = [*_WRITTEN, *(_WRITTEN_DRIVING if unattended else ())]
    paths = [source.removeprefix("s3://").rstrip("/") for source in data]
    read = [
        f"arn:{partition}:s3:::{name}" for path in paths for name in (*([path] if "/" in path else []), f"{path}/*")
    ]
    return _document(
        [
            _allow("ListJob", "s3", "ListBucket", [store], {"StringLike": {"s3:prefix": f"{job}/*"}}),
            _allow("ReadJob", "s3", "GetObject", [f"{store}/{job}/*"]),
            _allow("WriteJob", "s3", "AbortMultipartUpload PutObject", [f"{store}/{job}/{name}" for name in written]),
            # What newer checkpoints stand for.
            _allow("Prune", "s3", "DeleteObject", [f"{store}/{job}/checkpoints/*"]),
            # <role id>:<instance id>: no machine can write another one's key.
            _allow("HostKey", "s3", "PutObject", [f"{place}/hosts/${{aws:userid}}"]),
            # What it must know and run to make itself fit; it cannot change what others read there.
            _allow("Record", "s3", "GetObject", [f"{place}/{name}" for name in ("gpucloud-*.zip", "node.json")]),
            *([_allow("Data", "s3", "GetObject", read)] if read else []),
            *([_store_keys(names, kms_keys)] if kms_keys else []),
            _allow("Level", "autoscaling", "SetDesiredCapacity", [group], ours),
            *(_drive(names, place, group, ours) if unattended else []),
            *(_sessions() if session_manager else []),
        ]
    )


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
        # ViewBudget depends on it (Service Authorization Reference).
        _allow(
            "BillingView",
            "billing",
            "GetBillingViewData",
            [f"arn:{names.partition}:billing::{names.account}:billingview/*"],
        ),
    ]


def _reads_of_roles(uses: Uses, boundary: str | None) -> list[Document]:
    profiles = [uses.instance_profile] if uses.instance_profile else []
    return [
        *([_allow("Boundary", "iam", "GetPolicy", [boundary])] if boundary else []),
        *([_allow("OwnProfile", "iam", "GetInstanceProfile", profiles)] if profiles else []),
    ]


def _drive(names: _Names, place: str, group: str, ours: Document) -> list[Document]:
    """What a job that drives itself needs beside; AWS lets nobody list a part of a region."""
    looks = [f"autoscaling:{name}" for name in READS["autoscaling"].split()]
    here = {"StringEquals": {"aws:RequestedRegion": names.region}}
    return [
        # A missing order is 404 only to who may list; a driver must tell that from an order that it may not read.
        _allow(
            "FindOrder", "s3", "ListBucket", [place.partition("/")[0]],
            {"StringEquals": {"s3:prefix": f"{place.partition('/')[2]}/drive.json"}},
        ),
        _allow("Order", "s3", "GetObject", [f"{place}/{name}" for name in ("drive.json", "hosts/*")]),
        _statement("Look", [*looks, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], here),
        _allow("Replace", "autoscaling", "TerminateInstanceInAutoScalingGroup", [group], ours),
    ]  # fmt: skip


def _sessions() -> list[Document]:
    """What AWS's agent needs to be reached: its channels. The managed policy for it reads every parameter besides."""
    channels = " ".join(f"{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data"))
    return [
        _allow("Channels", "ssmmessages", channels, ["*"]),
        _allow("Agent", "ssm", "UpdateInstanceInformation", ["*"]),
    ]


def _network(names: _Names, uses: Uses) -> list[Document]:
    tagged_at_birth = [*_CREATES.split(), *_RULES.split(), "CreateFleet", "RunInstances"]
    own = [names.of("ec2", "vpc/*")] if uses.subnets else []
    return [
        _allow("Make", "ec2", _CREATES, names.ec2(_CREATED), _BORN_OURS),
        _allow("MakeInside", "ec2", _INSIDE, names.ec2(_PARENTS), _OURS),
        # In a network of the user's own the group itself must be tagged.
        *([_allow("MakeGroupInside", "ec2", "CreateSecurityGroup", own)] if own else []),
        # A rule being born has no tags yet: it is judged by those that are asked for.
        _allow("RuleBornOurs", "ec2", _RULES, names.ec2("security-group-rule"), _BORN_OURS),
        _allow(
            "TagAtBirth", "ec2", "CreateTags", [names.of("ec2", "*")],
            {"StringEquals": {"ec2:CreateAction": tagged_at_birth}},
        ),
        _allow("Change", "ec2", _CHANGES, [names.of("ec2", "*")], _OURS),
    ]  # fmt: skip


def _machines(names: _Names, uses: Uses) -> list[Document]:
    group = [names.of("autoscaling", "autoScalingGroup:*:autoScalingGroupName/gpucloud-*")]
    unborn = [names.of("autoscaling", f"autoScalingGroup:{_UNBORN}:autoScalingGroupName/gpucloud-*")]
    v2_only = {"StringEquals": {f"aws:RequestTag/{_TAG}": "true", "ec2:MetadataHttpTokens": "required"}}
    public = [f"arn:{names.partition}:ec2:{names.region}::{kind}/*" for kind in ("image", "snapshot")]
    own = [names.of("ec2", f"subnet/{one}") for one in uses.subnets]
    paid = [names.of("ec2", f"capacity-reservation/{one}") for one in uses.capacity]
    # LaunchInstances starts machines through a fleet, as its caller (Auto Scaling user guide), of a template of ours.
    # Whether the template's tags come with the fleet's own call AWS does not say; RunInstances is judged by them.
    if_said = {"StringEqualsIfExists": {f"aws:RequestTag/{_TAG}": "true"}}
    return [
        # Auto Scaling checks that whoever sets a launch template could use it.
        _allow("RunTagged", "ec2", "RunInstances", names.ec2("instance"), v2_only),
        _allow("RunWithTagged", "ec2", "RunInstances", names.ec2("volume network-interface"), _BORN_OURS),
        _allow("RunWithOurs", "ec2", "CreateFleet RunInstances", names.ec2(_USED), _OURS),
        _allow(
            "RunFrom", "ec2", "RunInstances", [*public, *own, *paid, *names.ec2("spot-instances-request")]
        ),
        _allow("LaunchThroughFleet", "ec2", "CreateFleet", names.ec2("fleet instance volume"), if_said),
        _allow("LaunchFrom", "ec2", "CreateFleet", [*public, *own]),
        _allow(
            "MakeGroup", "autoscaling", "CreateAutoScalingGroup", group,
            {**_BORN_OURS, "Bool": _PINNED, "Null": _BEHIND_NOTHING},
        ),
        _allow("TagGroupAtBirth", "autoscaling", "CreateOrUpdateTags", unborn, _BORN_OURS),
        _allow("ChangeGroup", "autoscaling", _GROUP_CHANGES, group, _OURS),
        # A change of sizes names no template; a launch configuration is started from with the rights of its maker.
        _allow(
            "SetGroup", "autoscaling", "UpdateAutoScalingGroup", group,
            {**_OURS, "BoolIfExists": _PINNED, "Null": {"autoscaling:LaunchConfigurationName": "true"}},
        ),
    ]  # fmt: skip


def _roles(names: _Names, boundary: str | None) -> list[Document]:
    role, profile = names.iam("role/gpucloud-*"), names.iam("instance-profile/gpucloud-*")
    bounded: Document = {"StringEquals": {"iam:PermissionsBoundary": boundary}} if boundary else {}
    binding = "CreateRole PutRolePermissionsBoundary PutRolePolicy" if boundary else "CreateRole PutRolePolicy"
    return [
        _allow("MakeRole", "iam", binding, [role], bounded),
        _allow("Role", "iam", f"{_ROLE_READS} {_ROLE_CHANGES}", [role]),
        _allow("Profile", "iam", _PROFILES, [profile]),
    ]


def _seen_roles(names: _Names) -> list[Document]:
    """What who makes no roles reads of those that others have made: a base may have one for drills, a job one more."""
    return [
        _allow("SeeRoles", "iam", _ROLE_READS, [names.iam("role/gpucloud-*")]),
        _allow("SeeProfiles", "iam", "GetInstanceProfile", [names.iam("instance-profile/gpucloud-*")]),
    ]


def _passed(names: _Names, own_role: list[str], *, makes_roles: bool) -> list[Document]:
    """Which roles are handed to whom, and those of AWS's own services."""
    drill = names.iam(f"role/gpucloud-base.drill-{names.region}")
    to_machines = [*([names.iam("role/gpucloud-*")] if makes_roles else []), *own_role]
    linked = ["autoscaling", "fis", "servicequotas", "spot"]
    return [
        *(
            [_allow("PassRole", "iam", "PassRole", to_machines, _to(f"ec2.{names.suffix}"))] if to_machines else []
        ),
        _allow("PassDrill", "iam", "PassRole", [drill], _to("fis.amazonaws.com")),
        _allow(
            "AwssOwnRoles", "iam", "CreateServiceLinkedRole", [names.iam("role/aws-service-role/*")],
            {"StringEquals": {"iam:AWSServiceName": [f"{name}.amazonaws.com" for name in linked]}},
        ),
    ]  # fmt: skip


def _to(service: str) -> Document:
    return {"StringEquals": {"iam:PassedToService": service}}


def _keys(names: _Names, keys: tuple[str, ...], *, grants: bool = True) -> list[Document]:
    """What disks and stores under keys of the user's own take; EC2 and S3 use the key, nobody else does."""
    if not keys:
        return []
    arns = [_key_arn(names, key) for key in keys]
    via = {"StringLike": {"kms:ViaService": [f"{one}.*.{names.suffix}" for one in ("ec2", "s3")]}}
    uses = _allow("Keys", "kms", _KEY_USES, arns, via)
    for_aws = {**via, "Bool": {"kms:GrantIsForAWSResource": "true"}}
    return [uses, _allow("KeyGrants", "kms", "CreateGrant", arns, for_aws)] if grants else [uses]


def _key_arn(names: _Names, key: str) -> str:
    return key if key.startswith("arn:") else names.of("kms", f"key/{key}")


def _store_keys(names: _Names, keys: tuple[str, ...]) -> Document:
    via = {"StringEquals": {"kms:ViaService": f"s3.{names.region}.{names.suffix}"}}
    return _allow("StoreKey", "kms", "Decrypt GenerateDataKey", [_key_arn(names, key) for key in keys], via)


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
    unborn = [names.of("fis", f"{kind}/{_UNBORN}") for kind in ("experiment-template", "experiment")]
    action = f"arn:{names.partition}:fis:{names.region}:{names.account}:action/aws:ec2:send-spot-instance-interruptions"
    instance = names.of("ec2", "instance/*")
    tagged = {"StringEquals": {f"ssm:resourceTag/{_TAG}": "true"}}
    document = f"arn:{names.partition}:ssm:{names.region}::document/AWS-StartSSHSession"
    session = [names.of("ssm", "session/${aws:userid}-*")]
    return [
        _allow("Drill", "fis", "CreateExperimentTemplate", [template], _BORN_OURS),
        _allow("TagDrillAtBirth", "fis", "TagResource", unborn, _BORN_OURS),
        _allow("DrillStarts", "fis", "StartExperiment", [experiment], _BORN_OURS),
        _allow("DrillAction", "fis", "CreateExperimentTemplate", [action]),
        _allow(
            "DrillOurs", "fis", "DeleteExperimentTemplate GetExperiment StartExperiment TagResource",
            [template, experiment], _OURS,
        ),
        _allow("Session", "ssm", "StartSession", [instance], tagged),
        _allow("SessionBySsh", "ssm", "StartSession", [document]),
        _allow("OwnSession", "ssm", "ResumeSession TerminateSession", session),
        # As AWS's sample policies have it since 2026; the reference names no resource of it yet.
        _allow("OwnChannel", "ssmmessages", "OpenDataChannel", session),
    ]  # fmt: skip


def _allow(sid: str, service: str, names: str, resources: list[str], condition: Document | None = None) -> Document:
    return _statement(sid, [f"{service}:{name}" for name in names.split()], resources, condition or {})


def _statement(sid: str, allowed: Iterable[str], resources: list[str], condition: Document) -> Document:
    statement: Document = {"Sid": sid, "Effect": "Allow", "Action": sorted(allowed), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def _document(statements: list[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": statements}
