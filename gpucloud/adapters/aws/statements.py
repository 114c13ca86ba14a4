"""The statements that policies are made of: who may do what on which of gpucloud's own, by topic.

What is made must carry gpucloud's tag from birth, and only what carries it may be changed or deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
MOST = 6144  # characters of a managed policy
_TAG = "gpucloud:managed"
_BORN_OURS = {"StringEquals": {f"aws:RequestTag/{_TAG}": "true"}}
OURS = {"StringEquals": {f"aws:ResourceTag/{_TAG}": "true"}}

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
WRITTEN = ("checkpoints/*", "outputs/*", "status/*")
WRITTEN_DRIVING = (
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
_STORE = "GetBucketVersioning GetLifecycleConfiguration ListBucket ListBucketVersions"
_OBJECTS = "AbortMultipartUpload DeleteObject DeleteObjectVersion GetObject GetObjectVersion PutObject"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How AWS names what is meant: ARNs in one partition and account, in some regions or, of none, in every one."""

    partition: str
    account: str
    regions: tuple[str, ...]

    @property
    def region(self) -> str:
        """What stands in ARNs for the region; of several a star, and `document` limits the statement to them."""
        return self.regions[0] if len(self.regions) == 1 else "*"

    @property
    def each(self) -> tuple[str, ...]:
        """What stands for the regions in names that IAM knows no region of."""
        return self.regions or ("*",)

    @property
    def here(self) -> Document:
        """The condition that a call is made in these regions."""
        return {"StringEquals": {"aws:RequestedRegion": list(self.regions)}} if self.regions else {}

    def of(self, service: str, resource: str) -> str:
        """Return the ARN of a service's resource."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    def in_each(self, service: str, resource: str) -> list[str]:
        """Return the resource's ARNs one by one, where a condition would say too much or too little."""
        return [f"arn:{self.partition}:{service}:{region}:{self.account}:{resource}" for region in self.each]

    def ec2(self, kinds: str) -> list[str]:
        """Return the ARNs of every one of these kinds."""
        return [self.of("ec2", f"{kind}/*") for kind in kinds.split()]

    def iam(self, resource: str) -> str:
        """Return the ARN of something of IAM, which has no region."""
        return f"arn:{self.partition}:iam::{self.account}:{resource}"

    @property
    def suffix(self) -> str:
        """What the names of services end in."""
        return "amazonaws.com.cn" if self.partition == "aws-cn" else "amazonaws.com"


def reads(names: Names) -> list[Document]:
    """What may be looked at."""
    reads = [f"{service}:{action}" for service, list_ in READS.items() for action in list_.split()]
    parameters = f"arn:{names.partition}:ssm:{names.region}::parameter/aws/service/*"
    budget = f"arn:{names.partition}:budgets::{names.account}:budget/gpucloud-*"
    return [
        statement("Look", reads, ["*"], names.here),
        # Answered in a few regions only, whatever region is asked about.
        allow("ListPrices", "pricing", "GetProducts", ["*"]),
        allow("ReadBill", "ce", "GetCostAndUsage", ["*"]),
        # IAM is of no region; `gpucloud gc` finds a role that is all that is left of a cluster.
        allow("ListRoles", "iam", "ListInstanceProfiles ListRoles", ["*"]),
        allow("PublicImages", "ssm", "GetParameter", [parameters]),
        allow("AskForQuota", "servicequotas", "RequestServiceQuotaIncrease", [names.of("servicequotas", "ec2/*")]),
        allow("Alert", "budgets", "ListTagsForResource ModifyBudget TagResource UntagResource ViewBudget", [budget]),
        # ViewBudget depends on it (Service Authorization Reference).
        allow(
            "BillingView",
            "billing",
            "GetBillingViewData",
            [f"arn:{names.partition}:billing::{names.account}:billingview/*"],
        ),
    ]


def reads_of_roles(uses: Uses, boundary: str | None) -> list[Document]:
    """Looking at the boundary, and at the user's own profile and role."""
    profiles = [uses.instance_profile] if uses.instance_profile else []
    return [
        *([allow("Boundary", "iam", "GetPolicy", [boundary])] if boundary else []),
        *([allow("OwnProfile", "iam", "GetInstanceProfile", profiles)] if profiles else []),
    ]


def drive(names: Names, place: str, group: str, ours: Document) -> list[Document]:
    """What a job that drives itself needs beside; AWS lets nobody list a part of a region."""
    looks = [f"autoscaling:{name}" for name in READS["autoscaling"].split()]
    return [
        # A missing order is 404 only to who may list; a driver must tell that from an order that it may not read.
        allow(
            "FindOrder", "s3", "ListBucket", [place.partition("/")[0]],
            {"StringEquals": {"s3:prefix": f"{place.partition('/')[2]}/drive.json"}},
        ),
        allow("Order", "s3", "GetObject", [f"{place}/{name}" for name in ("drive.json", "hosts/*")]),
        statement("Look", [*looks, "ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"], ["*"], names.here),
        allow("Replace", "autoscaling", "TerminateInstanceInAutoScalingGroup", [group], ours),
    ]  # fmt: skip


def sessions() -> list[Document]:
    """What AWS's agent needs to be reached: its channels. The managed policy for it reads every parameter besides."""
    channels = " ".join(f"{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data"))
    return [
        allow("Channels", "ssmmessages", channels, ["*"]),
        allow("Agent", "ssm", "UpdateInstanceInformation", ["*"]),
    ]


def network(names: Names, uses: Uses) -> list[Document]:
    """The network that machines are plugged into: made with our tag, changed and deleted where it bears it."""
    tagged_at_birth = [*_CREATES.split(), *_RULES.split(), "CreateFleet", "RunInstances"]
    own = [names.of("ec2", "vpc/*")] if uses.subnets else []
    return [
        allow("Make", "ec2", _CREATES, names.ec2(_CREATED), _BORN_OURS),
        allow("MakeInside", "ec2", _INSIDE, names.ec2(_PARENTS), OURS),
        # In a network of the user's own the group itself must be tagged.
        *([allow("MakeGroupInside", "ec2", "CreateSecurityGroup", own)] if own else []),
        # A rule being born has no tags yet: it is judged by those that are asked for.
        allow("RuleBornOurs", "ec2", _RULES, names.ec2("security-group-rule"), _BORN_OURS),
        allow(
            "TagAtBirth", "ec2", "CreateTags", [names.of("ec2", "*")],
            {"StringEquals": {"ec2:CreateAction": tagged_at_birth}},
        ),
        allow("Change", "ec2", _CHANGES, [names.of("ec2", "*")], OURS),
    ]  # fmt: skip


def machines(names: Names, uses: Uses) -> list[Document]:
    """Machines, their templates and groups: started from what is ours alone, by a pinned version."""
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
        allow("RunTagged", "ec2", "RunInstances", names.ec2("instance"), v2_only),
        allow("RunWithTagged", "ec2", "RunInstances", names.ec2("volume network-interface"), _BORN_OURS),
        allow("RunWithOurs", "ec2", "CreateFleet RunInstances", names.ec2(_USED), OURS),
        allow(
            "RunFrom", "ec2", "RunInstances", [*public, *own, *paid, *names.ec2("spot-instances-request")]
        ),
        allow("LaunchThroughFleet", "ec2", "CreateFleet", names.ec2("fleet instance volume"), if_said),
        allow("LaunchFrom", "ec2", "CreateFleet", [*public, *own]),
        allow(
            "MakeGroup", "autoscaling", "CreateAutoScalingGroup", group,
            {**_BORN_OURS, "Bool": _PINNED, "Null": _BEHIND_NOTHING},
        ),
        allow("TagGroupAtBirth", "autoscaling", "CreateOrUpdateTags", unborn, _BORN_OURS),
        allow("ChangeGroup", "autoscaling", _GROUP_CHANGES, group, OURS),
        # A change of sizes names no template; a launch configuration is started from with the rights of its maker.
        allow(
            "SetGroup", "autoscaling", "UpdateAutoScalingGroup", group,
            {**OURS, "BoolIfExists": _PINNED, "Null": {"autoscaling:LaunchConfigurationName": "true"}},
        ),
    ]  # fmt: skip


def roles(names: Names, boundary: str | None) -> list[Document]:
    """Roles and profiles of machines, made under the boundary alone where there is one."""
    role, profile = names.iam("role/gpucloud-*"), names.iam("instance-profile/gpucloud-*")
    bounded: Document = {"StringEquals": {"iam:PermissionsBoundary": boundary}} if boundary else {}
    binding = "CreateRole PutRolePermissionsBoundary PutRolePolicy" if boundary else "CreateRole PutRolePolicy"
    return [
        allow("MakeRole", "iam", binding, [role], bounded),
        allow("Role", "iam", f"{_ROLE_READS} {_ROLE_CHANGES}", [role]),
        allow("Profile", "iam", _PROFILES, [profile]),
    ]


def seen_roles(names: Names) -> list[Document]:
    """What who makes no roles reads of those that others have made: a base may have one for drills, a job one more."""
    return [
        allow("SeeRoles", "iam", _ROLE_READS, [names.iam("role/gpucloud-*")]),
        allow("SeeProfiles", "iam", "GetInstanceProfile", [names.iam("instance-profile/gpucloud-*")]),
    ]


def passed(names: Names, own_role: list[str], *, makes_roles: bool) -> list[Document]:
    """Which roles are handed to whom, and those of AWS's own services."""
    drills = [names.iam(f"role/gpucloud-base.drill-{region}") for region in names.each]
    to_machines = [*([names.iam("role/gpucloud-*")] if makes_roles else []), *own_role]
    linked = ["autoscaling", "fis", "servicequotas", "spot"]
    return [
        *(
            [allow("PassRole", "iam", "PassRole", to_machines, _to(f"ec2.{names.suffix}"))] if to_machines else []
        ),
        allow("PassDrill", "iam", "PassRole", drills, _to("fis.amazonaws.com")),
        allow(
            "AwssOwnRoles", "iam", "CreateServiceLinkedRole", [names.iam("role/aws-service-role/*")],
            {"StringEquals": {"iam:AWSServiceName": [f"{name}.amazonaws.com" for name in linked]}},
        ),
    ]  # fmt: skip


def _to(service: str) -> Document:
    return {"StringEquals": {"iam:PassedToService": service}}


def keys(names: Names, keys: tuple[str, ...], *, grants: bool = True) -> list[Document]:
    """What disks and stores under keys of the user's own take; EC2 and S3 use the key, nobody else does."""
    if not keys:
        return []
    arns = _key_arns(names, keys)
    via = {"StringLike": {"kms:ViaService": [f"{one}.*.{names.suffix}" for one in ("ec2", "s3")]}}
    uses = allow("Keys", "kms", _KEY_USES, arns, via)
    for_aws = {**via, "Bool": {"kms:GrantIsForAWSResource": "true"}}
    return [uses, allow("KeyGrants", "kms", "CreateGrant", arns, for_aws)] if grants else [uses]


def _key_arns(names: Names, keys: tuple[str, ...]) -> list[str]:
    """Return the keys' ARNs; one that is named by its own may lie in another region, with a bucket."""
    named = [[key] if key.startswith("arn:") else names.in_each("kms", f"key/{key}") for key in keys]
    return [arn for arns in named for arn in arns]


def store_keys(names: Names, keys: tuple[str, ...]) -> Document:
    """Keys of a store, used by S3 alone."""
    via = {"StringEquals": {"kms:ViaService": [f"s3.{region}.{names.suffix}" for region in names.each]}}
    return allow("StoreKey", "kms", "Decrypt GenerateDataKey", _key_arns(names, keys), via)


def buckets(names: Names, stores: tuple[str, ...]) -> list[Document]:
    """Our buckets, one a region, and those that jobs name as their store."""
    ours = [f"arn:{names.partition}:s3:::gpucloud-{names.account}-{region}" for region in names.each]
    theirs = [f"arn:{names.partition}:s3:::{store}" for store in stores]
    return [
        allow("Bucket", "s3", _BUCKET, ours),
        *([allow("Stores", "s3", _STORE, theirs)] if theirs else []),
        allow("Objects", "s3", _OBJECTS, [f"{bucket}/*" for bucket in (*ours, *theirs)]),
    ]


def data(names: Names, data: tuple[str, ...]) -> list[Document]:
    """Buckets with data sets: listed, no more."""
    buckets = [f"arn:{names.partition}:s3:::{bucket}" for bucket in dict.fromkeys(data)]
    return [allow("ListData", "s3", "ListBucket", buckets)] if buckets else []


def drills(names: Names) -> list[Document]:
    """Drills of FIS that send one of our machines its interruption."""
    template, experiment = names.of("fis", "experiment-template/*"), names.of("fis", "experiment/*")
    unborn = [names.of("fis", f"{kind}/{_UNBORN}") for kind in ("experiment-template", "experiment")]
    action = f"arn:{names.partition}:fis:{names.region}:{names.account}:action/aws:ec2:send-spot-instance-interruptions"
    instance = names.of("ec2", "instance/*")
    tagged = {"StringEquals": {f"ssm:resourceTag/{_TAG}": "true"}}
    document = f"arn:{names.partition}:ssm:{names.region}::document/AWS-StartSSHSession"
    session = names.in_each("ssm", "session/${aws:userid}-*")
    return [
        allow("Drill", "fis", "CreateExperimentTemplate", [template], _BORN_OURS),
        allow("TagDrillAtBirth", "fis", "TagResource", unborn, _BORN_OURS),
        allow("DrillStarts", "fis", "StartExperiment", [experiment], _BORN_OURS),
        allow("DrillAction", "fis", "CreateExperimentTemplate", [action]),
        allow(
            "DrillOurs", "fis", "DeleteExperimentTemplate GetExperiment StartExperiment TagResource",
            [template, experiment], OURS,
        ),
        allow("Session", "ssm", "StartSession", [instance], tagged),
        allow("SessionBySsh", "ssm", "StartSession", [document]),
        allow("OwnSession", "ssm", "ResumeSession TerminateSession", session),
        # As AWS's sample policies have it since 2026; the reference names no resource of it yet.
        allow("OwnChannel", "ssmmessages", "OpenDataChannel", session),
    ]  # fmt: skip


def allow(sid: str, service: str, names: str, resources: list[str], condition: Document | None = None) -> Document:
    """Return a statement that allows a service's actions on resources."""
    return statement(sid, [f"{service}:{name}" for name in names.split()], resources, condition or {})


def statement(sid: str, allowed: Iterable[str], resources: list[str], condition: Document) -> Document:
    """Return a statement that allows actions, each as `service:Action`."""
    statement: Document = {"Sid": sid, "Effect": "Allow", "Action": sorted(allowed), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def document(names: Names, statements: list[Document]) -> Document:
    """Return the policy of these statements, in the regions of the names alone."""
    return {"Version": "2012-10-17", "Statement": [_limited(names, one) for one in statements]}


def _limited(names: Names, one: Document) -> Document:
    """Return a statement whose ARNs are of every region with the condition that the call is made in one of these."""
    if not any(arn.split(":")[3:4] == ["*"] for arn in one["Resource"]):
        return one
    condition = one.get("Condition", {})
    equals = {name: {**condition.get(name, {}), **keys} for name, keys in names.here.items()}
    return {**one, "Condition": {**condition, **equals}} if equals else one


def pieces(name: str, whole: Document) -> dict[str, Document]:
    """Return a policy in as many as managed policies can hold it, by name: it grows with the regions."""
    parts: list[list[Document]] = [[]]
    for one in whole["Statement"]:
        if parts[-1] and size({**whole, "Statement": [*parts[-1], one]}) > MOST:
            parts.append([])
        parts[-1].append(one)
    return {
        f"{name}-{number}" if number > 1 else name: {**whole, "Statement": part} for number, part in enumerate(parts, 1)
    }


def size(policy: Document) -> int:
    """Return how many characters IAM counts, which leaves out the blanks."""
    return len(json.dumps(policy, separators=(",", ":")))
