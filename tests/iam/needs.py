"""What IAM asks about a call: each action that it takes, on each resource, with the context that AWS has then."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from tests.iam import reference
from tests.iam.actions import action_of
from tests.iam.judge import Need

Params = Mapping[str, Any]
Tags = Mapping[str, str]

_BY_PARAMETER = {
    "AllocationId": "elastic-ip",
    "AssociationId": "",  # of an address or a route table: the facts know
    "GroupId": "security-group",
    "GatewayId": "internet-gateway",
    "InstanceId": "instance",
    "InternetGatewayId": "internet-gateway",
    "KeyName": "key-pair",
    "KeyPairId": "key-pair",
    "LaunchTemplateId": "launch-template",
    "LaunchTemplateName": "launch-template",
    "NatGatewayId": "natgateway",
    "NetworkInterfaceId": "network-interface",
    "ResourceId": "",
    "RouteTableId": "route-table",
    "SecurityGroupRuleId": "security-group-rule",
    "SubnetId": "subnet",
    "VolumeId": "volume",
    "VpcEndpointId": "vpc-endpoint",
    "VpcId": "vpc",
}
_BIRTH = re.compile(r"(Create|Allocate|Import)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """What stands: its ARN, the reference's resource type, its tags."""

    arn: str
    kind: str
    tags: Tags = field(default_factory=dict)


class Facts(Protocol):
    """What AWS knows when it judges a call."""

    def ec2(self, region: str, kind: str, name: str) -> Thing: ...  # kind empty: told by the name
    def group(self, region: str, params: Params) -> Thing: ...
    def template(self, region: str, named: Params) -> tuple[str, Mapping[str, Any]]: ...  # its name or id, its data
    def boundary(self, role: str) -> str | None: ...
    def profile(self, name: str) -> str: ...  # its ARN
    def role_of_profile(self, profile: str) -> str: ...  # the role's path and name
    def key_of(self, bucket: str) -> str | None: ...  # the ARN of the KMS key that its objects are under
    def fis(self, region: str, kind: str, name: str) -> Thing: ...
    def stands(self, bucket: str, key: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call as IAM meets it."""

    service: str
    action: str
    params: Params
    region: str
    account: str
    keys: tuple[str, ...] = ()  # of objects that one call deletes
    versioned: bool = False  # whether it deletes versions of them

    def arn(self, service: str, resource: str, *, region: str | None = None) -> str:
        """Return an ARN in the call's account and region."""
        return f"arn:aws:{service}:{self.region if region is None else region}:{self.account}:{resource}"


def needs(asked: Asked, facts: Facts) -> tuple[Need, ...]:
    """Return what must be allowed for the call to be answered, its own actions first. Empty: everybody may."""
    if (asked.service, asked.action) == ("sts", "GetCallerIdentity"):
        return ()
    by_service = {
        "ec2": _ec2, "autoscaling": _autoscaling, "iam": _iam, "s3": _s3, "fis": _fis, "budgets": _budgets,
        "ssm": _ssm, "servicequotas": _quotas, "kms": _kms,
    }  # fmt: skip
    found = by_service.get(asked.service, _plain)(asked, facts)
    here = {"aws:RequestedRegion": asked.region}
    return tuple(Need(action=one.action, arn=one.arn, kind=one.kind, context={**one.context, **here}) for one in found)


def _plain(asked: Asked, facts: Facts) -> Iterator[Need]:
    del facts
    yield from (Need(action=action) for action in action_of(asked.service, asked.action, asked.params))


# ---- EC2


def _ec2(asked: Asked, facts: Facts) -> Iterator[Need]:
    action = f"ec2:{asked.action}"
    if asked.action.startswith(("Describe", "GetSpot")):
        yield Need(action=action)
    elif asked.action in {"RunInstances", "CreateFleet"}:
        yield from _fleet(asked, facts) if asked.action == "CreateFleet" else _run(asked, asked.params, facts)
    elif asked.action in {"CreateTags", "DeleteTags"}:
        yield from _tagging(asked, facts)
    else:
        yield from _on_things(asked, facts)


def _on_things(asked: Asked, facts: Facts) -> Iterator[Need]:
    action, kinds, born = f"ec2:{asked.action}", reference.kinds(f"ec2:{asked.action}"), tags_at_birth(asked.params)
    met = set()
    for thing in _named(asked, facts):
        # A type that the reference names, and a condition could speak of; nothing else is judged.
        if thing.kind in kinds:
            met.add(thing.kind)
            yield Need(action=action, arn=thing.arn, kind=thing.kind, context=_of(thing.tags))
    births = {kind for kind, required in kinds.items() if required and kind not in met and _born(asked.action, kind)}
    for kind in sorted({*births, *(kind for kind in born if kind in kinds)} - met):
        yield Need(action=action, arn=asked.arn("ec2", f"{kind}/*"), kind=kind, context=_with(born.get(kind, {})))
    yield from _tagged(asked, asked.action, born)


def _born(action: str, kind: str) -> bool:
    """Whether the call makes a thing of this type: then it is judged by the tags that it asks for."""
    return bool(_BIRTH.match(action)) and reference.knows(f"ec2:{action}", kind, "aws:RequestTag/x")


def _named(asked: Asked, facts: Facts) -> Iterator[Thing]:
    births = {kind for kind in reference.kinds(f"ec2:{asked.action}") if _born(asked.action, kind)}
    for key, value in asked.params.items():
        stem = re.sub(r"\.\d+$", "", key)
        kind = "placement-group" if stem == "GroupName" and "PlacementGroup" in asked.action else None
        kind = _BY_PARAMETER.get(stem) if kind is None else kind
        if kind is not None and kind not in births:
            yield facts.ec2(asked.region, kind, str(value))


def _tagging(asked: Asked, facts: Facts) -> Iterator[Need]:
    wanted = {
        str(asked.params[f"Tag.{n}.Key"]): str(asked.params.get(f"Tag.{n}.Value", ""))
        for n in range(1, 60) if f"Tag.{n}.Key" in asked.params
    }  # fmt: skip
    for thing in _named(asked, facts):
        context = {**_of(thing.tags), **_with(wanted)}
        yield Need(action=f"ec2:{asked.action}", arn=thing.arn, kind=thing.kind, context=context)


def _tagged(asked: Asked, by: str, born: Mapping[str, Tags]) -> Iterator[Need]:
    for kind, tags in born.items():
        context = {**_with(tags), "ec2:CreateAction": by}
        yield Need(action="ec2:CreateTags", arn=asked.arn("ec2", f"{kind}/*"), kind=kind, context=context)


def tags_at_birth(params: Params, below: str = "") -> dict[str, dict[str, str]]:
    """Return the tags that a call gives what it makes, by resource type."""
    found: dict[str, dict[str, str]] = {}
    for number in range(1, 20):
        stem = f"{below}TagSpecification.{number}"
        kind = params.get(f"{stem}.ResourceType")
        for tag in range(1, 60) if kind else ():
            if f"{stem}.Tag.{tag}.Key" in params:
                value = str(params.get(f"{stem}.Tag.{tag}.Value", ""))
                found.setdefault(str(kind), {})[str(params[f"{stem}.Tag.{tag}.Key"])] = value
    return found


def _fleet(asked: Asked, facts: Facts) -> Iterator[Need]:
    """A fleet names a template; what the template says is judged as RunInstances (CreateFleet's description)."""
    params = asked.params
    named = next((str(v) for k, v in params.items() if k.endswith(("LaunchTemplateName", "LaunchTemplateId"))), None)
    born = tags_at_birth(params)
    for kind in ("fleet", "instance", *(["volume"] if "volume" in born else [])):
        arn = asked.arn("ec2", f"{kind}/*")
        yield Need(action="ec2:CreateFleet", arn=arn, kind=kind, context=_with(born.get(kind, {})))
    if named is not None:
        thing = facts.ec2(asked.region, "launch-template", named)
        yield Need(action="ec2:CreateFleet", arn=thing.arn, kind=thing.kind, context=_of(thing.tags))
    subnets = [str(v) for k, v in params.items() if k.endswith("SubnetId")]
    for subnet in subnets:
        thing = facts.ec2(asked.region, "subnet", subnet)
        yield Need(action="ec2:CreateFleet", arn=thing.arn, kind=thing.kind, context=_of(thing.tags))
    if named is not None:
        yield from _from_template(asked, facts, {"LaunchTemplateId": named}, subnets, born=born)
    yield from _tagged(asked, "CreateFleet", born)


def _run(asked: Asked, params: Params, facts: Facts) -> Iterator[Need]:
    """A call of RunInstances by hand, without a template or with one."""
    template = {k.removeprefix("LaunchTemplate."): v for k, v in params.items() if k.startswith("LaunchTemplate.")}
    subnets = [str(params["SubnetId"])] if "SubnetId" in params else []
    data: dict[str, Any] = {}
    if "ImageId" in params:
        data["ImageId"] = params["ImageId"]
    if "MetadataOptions.HttpTokens" in params:
        data["MetadataOptions"] = {"HttpTokens": params["MetadataOptions.HttpTokens"]}
    profile = params.get("IamInstanceProfile.Name")
    data |= {"IamInstanceProfile": {"Name": profile}} if profile else {}
    data |= {"KeyName": params["KeyName"]} if "KeyName" in params else {}
    groups = [str(value) for key, value in params.items() if key.startswith("SecurityGroupId.")]
    data |= {"SecurityGroupIds": groups} if groups else {}
    yield from _from_template(asked, facts, template, subnets, born=tags_at_birth(params), more=data)


def _from_template(
    asked: Asked,
    facts: Facts,
    named: Params,
    subnets: list[str],
    *,
    born: Mapping[str, Tags] | None = None,
    more: Params | None = None,
    spot: bool = False,
) -> Iterator[Need]:
    """What starting a machine from a template takes of who asks for it."""
    name, data = facts.template(asked.region, named) if named else ("", {})
    data = {**data, **(more or {})}
    tags: dict[str, Tags] = {**_template_tags(data), **(born or {})}
    action, region = "ec2:RunInstances", asked.region
    profile = data.get("IamInstanceProfile") or {}
    how = {
        "ec2:MetadataHttpTokens": str((data.get("MetadataOptions") or {}).get("HttpTokens", "optional")),
        **({"ec2:InstanceProfile": profile.get("Arn") or facts.profile(str(profile["Name"]))} if profile else {}),
    }
    for kind in ("instance", "volume", "network-interface"):
        context = {**_with(tags.get(kind, {})), **(how if kind == "instance" else {})}
        yield Need(action=action, arn=asked.arn("ec2", f"{kind}/*"), kind=kind, context=context)
    yield Need(action=action, arn=f"arn:aws:ec2:{region}::image/{data.get('ImageId', 'ami-0')}", kind="image")
    for kind, used in _used(data, name, subnets):
        thing = facts.ec2(region, kind, used)
        yield Need(action=action, arn=thing.arn, kind=kind, context=_of(thing.tags))
    if spot:
        yield Need(action=action, arn=asked.arn("ec2", "spot-instances-request/*"), kind="spot-instances-request")
    yield from _tagged(asked, "RunInstances", tags)
    if profile:
        yield pass_role(asked, facts.role_of_profile(str(profile.get("Name") or profile["Arn"].rpartition("/")[2])))
    yield from _keys(asked, data)


def _template_tags(data: Params) -> dict[str, Tags]:
    specs = data.get("TagSpecifications") or data.get("TagSpecification") or []
    return {
        one["ResourceType"]: {tag["Key"]: tag.get("Value", "") for tag in one.get("Tags") or one.get("Tag") or []}
        for one in specs
    }


def _used(data: Params, template: str, subnets: list[str]) -> Iterator[tuple[str, str]]:
    cards = data.get("NetworkInterfaces") or []
    groups = {one for card in cards for one in card.get("Groups") or card.get("SecurityGroupId") or []}
    yield from (("security-group", one) for one in sorted({*groups, *(data.get("SecurityGroupIds") or [])}))
    yield from (("subnet", one) for one in subnets)
    if data.get("KeyName"):
        yield "key-pair", str(data["KeyName"])
    if template:
        yield "launch-template", template
    if group := (data.get("Placement") or {}).get("GroupName"):
        yield "placement-group", str(group)
    reservation = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    if reservation.get("CapacityReservationId"):
        yield "capacity-reservation", str(reservation["CapacityReservationId"])


def _keys(asked: Asked, data: Params) -> Iterator[Need]:
    """A disk under a customer's key (EBS user guide, how encryption works: permissions for IAM users)."""
    for disk in data.get("BlockDeviceMappings") or []:
        key = (disk.get("Ebs") or {}).get("KmsKeyId")
        if key:
            via = {"kms:ViaService": f"ec2.{asked.region}.amazonaws.com"}
            arn = key if key.startswith("arn:") else asked.arn("kms", f"key/{key}")
            for use in ("Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo"):
                yield Need(action=f"kms:{use}", arn=arn, kind="key", context=via)
            grant = {**via, "kms:GrantIsForAWSResource": "true"}
            yield Need(action="kms:CreateGrant", arn=arn, kind="key", context=grant)


def pass_role(asked: Asked, role: str, service: str = "ec2.amazonaws.com") -> Need:
    """Return what handing a role to a service takes."""
    arn = asked.arn("iam", f"role/{role}", region="")
    return Need(action="iam:PassRole", arn=arn, kind="role", context={"iam:PassedToService": service})


def _of(tags: Tags) -> dict[str, str]:
    return {f"aws:ResourceTag/{key}": value for key, value in tags.items()}


def _with(tags: Tags) -> dict[str, str | tuple[str, ...]]:
    return {**{f"aws:RequestTag/{key}": value for key, value in tags.items()}, "aws:TagKeys": tuple(tags)}


# ---- Auto Scaling


def _autoscaling(asked: Asked, facts: Facts) -> Iterator[Need]:
    action, params = f"autoscaling:{asked.action}", asked.params
    if asked.action.startswith("Describe"):
        yield Need(action=action)
        return
    group = facts.group(asked.region, params)
    tags = _members(params, "Tags")
    sizes = {f"autoscaling:{key}": str(params[key]) for key in ("MinSize", "MaxSize") if key in params}
    named = _group_template(params)
    context = {**_of(group.tags), **sizes, **_started_by(params, named), **(_with(tags) if tags else {})}
    yield Need(action=action, arn=group.arn, kind="autoScalingGroup", context=context)
    if tags and asked.action == "CreateAutoScalingGroup":
        context = {**_of(group.tags), **_with(tags)}
        yield Need(action="autoscaling:CreateOrUpdateTags", arn=group.arn, kind="autoScalingGroup", context=context)
    yield from _starting(asked, facts, named)


def _started_by(params: Params, named: Params) -> dict[str, str | tuple[str, ...]]:
    """Return what a group's machines are to be started from and answer for; a change of sizes says nothing of it."""
    told: dict[str, str | tuple[str, ...]] = {}
    if named:
        pinned = bool(re.fullmatch(r"\d+", str(named.get("Version", "$Default"))))
        told["autoscaling:LaunchTemplateVersionSpecified"] = str(pinned).lower()
    if "LaunchConfigurationName" in params:
        told["autoscaling:LaunchConfigurationName"] = str(params["LaunchConfigurationName"])
    for name in ("LoadBalancerNames", "TargetGroupARNs"):
        if values := tuple(str(value) for key, value in params.items() if key.startswith(f"{name}.member.")):
            told[f"autoscaling:{name}"] = values
    return told


def _group_template(params: Params) -> dict[str, str]:
    mixed = "MixedInstancesPolicy.LaunchTemplate.LaunchTemplateSpecification."
    return {
        key.removeprefix(stem): str(value)
        for stem in ("LaunchTemplate.", mixed) for key, value in params.items() if key.startswith(stem)
    }  # fmt: skip


def _starting(asked: Asked, facts: Facts, named: Params) -> Iterator[Need]:
    """Auto Scaling checks that who names a template could start machines from it; LaunchInstances starts them."""
    if asked.action == "CreateAutoScalingGroup":
        arn = asked.arn(
            "iam", "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling", region=""
        )
        service = {"iam:AWSServiceName": "autoscaling.amazonaws.com"}
        yield Need(action="iam:CreateServiceLinkedRole", arn=arn, kind="role", context=service)
    subnets = [str(value) for key, value in asked.params.items() if key.startswith("SubnetIds.")]
    if asked.action == "LaunchInstances":
        yield Need(action="ec2:DescribeLaunchTemplateVersions")
        group = facts.template(asked.region, {"AutoScalingGroupName": asked.params["AutoScalingGroupName"]})
        thing = facts.ec2(asked.region, "launch-template", group[0])
        # Whether the template's tags come with the fleet's call nobody says: they do not, the worse case.
        for kind in ("fleet", "instance"):
            yield Need(action="ec2:CreateFleet", arn=asked.arn("ec2", f"{kind}/*"), kind=kind)
        yield Need(action="ec2:CreateFleet", arn=thing.arn, kind=thing.kind, context=_of(thing.tags))
        for subnet in subnets:
            used = facts.ec2(asked.region, "subnet", subnet)
            yield Need(action="ec2:CreateFleet", arn=used.arn, kind="subnet", context=_of(used.tags))
        named = {"AutoScalingGroupName": asked.params["AutoScalingGroupName"]}
        yield from _from_template(asked, facts, named, subnets, spot=True)
    elif named:
        yield from _from_template(asked, facts, named, subnets)


def _members(params: Params, name: str) -> dict[str, str]:
    return {
        str(params[f"{name}.member.{n}.Key"]): str(params.get(f"{name}.member.{n}.Value", ""))
        for n in range(1, 60) if f"{name}.member.{n}.Key" in params
    }  # fmt: skip


# ---- IAM


def _iam(asked: Asked, facts: Facts) -> Iterator[Need]:
    action, params = f"iam:{asked.action}", asked.params
    profile, role, policy = params.get("InstanceProfileName"), params.get("RoleName"), params.get("PolicyArn")
    tags = _with(_members(params, "Tags")) if any(key.startswith("Tags.") for key in params) else {}
    kinds = reference.kinds(action)
    if "instance-profile" in kinds and profile:
        arn = facts.profile(str(profile))
        yield Need(action=action, arn=arn, kind="instance-profile", context=tags)
        if asked.action == "CreateInstanceProfile" and tags:
            yield Need(action="iam:TagInstanceProfile", arn=arn, kind="instance-profile", context=tags)
        if asked.action == "AddRoleToInstanceProfile":
            yield pass_role(asked, str(role))
    elif "role" in kinds and role:
        arn = asked.arn("iam", f"role/{role}", region="")
        bound = params.get("PermissionsBoundary") or facts.boundary(str(role))
        context = {**tags, **({"iam:PermissionsBoundary": str(bound)} if bound else {})}
        context |= {"iam:PolicyARN": str(policy)} if policy else {}
        yield Need(action=action, arn=arn, kind="role", context=context)
        if asked.action == "CreateRole" and tags:
            yield Need(action="iam:TagRole", arn=arn, kind="role", context=tags)
    elif "policy" in kinds:
        arn = str(policy or asked.arn("iam", f"policy/{params.get('PolicyName')}", region=""))
        yield Need(action=action, arn=arn, kind="policy", context=tags)
    elif asked.action == "CreateServiceLinkedRole":
        service = str(params["AWSServiceName"])
        arn = asked.arn("iam", f"role/aws-service-role/{service}/AWSServiceRoleFor", region="")
        yield Need(action=action, arn=arn, kind="role", context={"iam:AWSServiceName": service})
    else:
        yield Need(action=action)


# ---- S3


def _s3(asked: Asked, facts: Facts) -> Iterator[Need]:
    bucket, key = str(asked.params.get("Bucket", "")), str(asked.params.get("Key", ""))
    arn = f"arn:aws:s3:::{bucket}"
    for action in action_of("s3", asked.action, asked.params):
        if asked.action == "DeleteObjects":
            if action.endswith("Version") == asked.versioned:
                yield from (Need(action=action, arn=f"{arn}/{one}", kind="object") for one in asked.keys)
        elif key:
            yield Need(action=action, arn=f"{arn}/{key}", kind="object")
        else:
            prefix = {"s3:prefix": str(asked.params["prefix"])} if "prefix" in asked.params else {}
            yield Need(action=action, arn=arn if bucket else "*", kind="bucket" if bucket else "", context=prefix)
    yield from _store_key(asked, facts.key_of(bucket) if key else None)
    if key and asked.action in {"GetObject", "HeadObject"} and not facts.stands(bucket, key):
        # S3 says 404 only to who may list; to others a missing key is as forbidden as a key of others.
        yield Need(action="s3:ListBucket", arn=arn, kind="bucket", context={"s3:prefix": key})


def _store_key(asked: Asked, key: str | None) -> Iterator[Need]:
    """What an object under a customer's key takes; parts of an upload are read again when it is put together."""
    uses = {
        "GetObject": "Decrypt", "PutObject": "GenerateDataKey", "CopyObject": "Decrypt GenerateDataKey",
        "CreateMultipartUpload": "Decrypt GenerateDataKey", "UploadPart": "Decrypt GenerateDataKey",
        "UploadPartCopy": "Decrypt GenerateDataKey", "CompleteMultipartUpload": "Decrypt",
    }  # fmt: skip
    for use in uses.get(asked.action, "").split() if key else ():
        via = {"kms:ViaService": f"s3.{asked.region}.amazonaws.com"}
        yield Need(action=f"kms:{use}", arn=str(key), kind="key", context=via)


# ---- the others


def _fis(asked: Asked, facts: Facts) -> Iterator[Need]:
    action = action_of("fis", asked.action, {})[0]
    params, tags = asked.params, _with({str(k): str(v) for k, v in (asked.params.get("tags") or {}).items()})
    method, _, path = asked.action.partition(" ")
    if path.startswith("/tags/"):
        kind, _, name = unquote(path).rpartition(":")[2].partition("/")
        thing = facts.fis(asked.region, kind, name)
        yield Need(action=action, arn=thing.arn, kind=kind, context={**_of(thing.tags), **tags})
        return
    kind = "experiment" if path.startswith("/experiments") else "experiment-template"
    name = path.split("/")[2] if path.count("/") > 1 else ""
    if method == "POST":
        yield Need(action=action, arn=asked.arn("fis", f"{kind}/*"), kind=kind, context=tags)
        if params.get("tags"):
            yield Need(action="fis:TagResource", arn=asked.arn("fis", f"{kind}/*"), kind=kind, context=tags)
        for one in (params.get("actions") or {}).values():
            yield Need(action=action, arn=asked.arn("fis", f"action/{one['actionId']}"), kind="action", context=tags)
        if "roleArn" in params:
            yield pass_role(asked, str(params["roleArn"]).partition(":role/")[2], "fis.amazonaws.com")
        if "experimentTemplateId" in params:
            thing = facts.fis(asked.region, "experiment-template", str(params["experimentTemplateId"]))
            yield Need(action=action, arn=thing.arn, kind=thing.kind, context={**_of(thing.tags), **tags})
            arn = asked.arn("iam", "role/aws-service-role/fis.amazonaws.com/AWSServiceRoleForFIS", region="")
            service = {"iam:AWSServiceName": "fis.amazonaws.com"}
            yield Need(action="iam:CreateServiceLinkedRole", arn=arn, kind="role", context=service)
    else:
        thing = facts.fis(asked.region, kind, name)
        yield Need(action=action, arn=thing.arn, kind=kind, context=_of(thing.tags))


def _budgets(asked: Asked, facts: Facts) -> Iterator[Need]:
    del facts
    name = asked.params.get("BudgetName") or (asked.params.get("Budget") or {}).get("BudgetName")
    arn = asked.params.get("ResourceARN") or asked.arn("budgets", f"budget/{name}", region="")
    tags = _with({str(tag["Key"]): str(tag["Value"]) for tag in asked.params.get("ResourceTags") or ()})
    for action in action_of("budgets", asked.action, asked.params):
        yield Need(action=action, arn=str(arn), kind="budget", context=tags)


def _ssm(asked: Asked, facts: Facts) -> Iterator[Need]:
    action, params = f"ssm:{asked.action}", asked.params
    if asked.action == "StartSession":
        thing = facts.ec2(asked.region, "instance", str(params["Target"]))
        tags = {f"ssm:resourceTag/{key}": value for key, value in thing.tags.items()}
        yield Need(action=action, arn=thing.arn, kind="instance", context=tags)
        document = f"arn:aws:ssm:{asked.region}::document/{params.get('DocumentName', 'SSM-SessionManagerRunShell')}"
        yield Need(action=action, arn=document, kind="document")
    elif asked.action in {"SendCommand", "UpdateInstanceInformation"}:
        thing = facts.ec2(asked.region, "instance", str(params["InstanceId"]))
        tags = {f"ssm:resourceTag/{key}": value for key, value in thing.tags.items()}
        yield Need(action=action, arn=thing.arn, kind="instance", context=tags)
    elif asked.action in {"TerminateSession", "ResumeSession"}:
        yield Need(action=action, arn=asked.arn("ssm", f"session/{params['SessionId']}"), kind="session")
    else:
        name = str(params.get("Name", "")).lstrip("/")
        account = "" if name.startswith("aws/") else asked.account
        yield Need(action=action, arn=f"arn:aws:ssm:{asked.region}:{account}:parameter/{name}", kind="parameter")


def _kms(asked: Asked, facts: Facts) -> Iterator[Need]:
    """A key used by itself: no service stands between."""
    del facts
    yield Need(action=f"kms:{asked.action}", arn=str(asked.params["KeyId"]), kind="key")


def _quotas(asked: Asked, facts: Facts) -> Iterator[Need]:
    del facts
    action = f"servicequotas:{asked.action}"
    code = asked.params.get("QuotaCode")
    if code and "quota" in reference.kinds(action):
        arn = asked.arn("servicequotas", f"{asked.params['ServiceCode']}/{code}")
        yield Need(action=action, arn=arn, kind="quota")
        if asked.action == "RequestServiceQuotaIncrease":
            of = "servicequotas.amazonaws.com"
            role = asked.arn("iam", f"role/aws-service-role/{of}/AWSServiceRoleForServiceQuotas", region="")
            context = {"iam:AWSServiceName": of}
            yield Need(action="iam:CreateServiceLinkedRole", arn=role, kind="role", context=context)
    else:
        yield Need(action=action)
