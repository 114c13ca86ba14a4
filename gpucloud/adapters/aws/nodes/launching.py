"""Starting machines: launch templates, the group's settings for a pool, one synchronous launch, calls insisted on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_DOWN, Decimal
from typing import Any, TypeVar

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_in, code_of, known, known_of_new
from gpucloud.adapters.aws.nodes.listing import Described, Listing, Place, settings_that_hold_back
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Fault, Refusal
from gpucloud.domain.offer import EfaLayout, Pool
from gpucloud.system.retries import Retry

# The call is newer than some endpoints, policies and versions of botocore.
_NO_SUCH_CALL = ("InvalidAction", "UnknownOperation", "UnknownOperationException", "UnsupportedOperation")
NOT_ALLOWED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_REFUSING = (Fault.CAPACITY, Fault.QUOTA, Fault.PERMISSION, Fault.PARAMETER)


class NoLaunchCall(Exception):
    """Endpoint, caller or botocore has no `LaunchInstances`; `lasting` unless only this launch could not use it."""

    def __init__(self, *, lasting: bool) -> None:
        super().__init__()
        self.lasting = lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What one launch brought: the machines that were started, and why others were not."""

    ids: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def subnet_of(listing: Listing, pool: Pool) -> str:
    """Return the subnet of the pool's zone. ProvisionError when the cluster has none there."""
    subnets = listing.subnets
    if pool.zone not in subnets:
        zones = ", ".join(sorted(subnets)) or "no zone"
        raise ProvisionError(
            f"the cluster has no subnet in {pool.zone} (it has {zones})",
            hint="gpucloud up, which makes what is missing",
        )
    return subnets[pool.zone]


def settings(listing: Listing, size: int, pool: Pool, template: Described | None) -> dict[str, Any]:
    """Return what must change at the group so that it holds `size` machines and starts those of `pool`.

    The maximum is the level: whatever is repeated or raced, AWS starts no more. `template` is what it starts them by,
    None where it starts none.
    """
    group = listing.group or {}
    wanted: dict[str, Any] = {"MinSize": 0, "MaxSize": size}
    if size > 0:
        wanted["VPCZoneIdentifier"] = subnet_of(listing, pool)
    changes = {name: value for name, value in wanted.items() if group.get(name) != value}
    own = group.get("LaunchTemplate", {})
    if template is not None and any(own.get(name) != value for name, value in template.items()):
        changes["LaunchTemplate"] = dict(template)
    return {**changes, **settings_that_hold_back(group)}


def launch(client: Any, sleep: Callable[[float], None], now: Callable[[], datetime], **asked: Any) -> Launched:
    """Start machines and return what came of it. NoLaunchCall, ClientError.

    `asked`: name, number, pool, subnet, token, and whether the cluster is so new that AWS may not know all of it yet.
    A repeat with the same token starts nothing twice: botocore repeats it by itself when the answer is lost.
    """
    call = getattr(client, "launch_instances", None)
    if call is None:
        raise NoLaunchCall(lasting=True)
    try:
        answer = insist(lambda: call(**_request(asked)), sleep)
    except botocore.exceptions.ClientError as error:
        return _refused(error, asked, now())
    ids = tuple(i for collection in answer.get("Instances", ()) for i in collection["InstanceIds"])
    told = ((e["ErrorCode"], e.get("ErrorMessage", "")) for e in answer.get("Errors", ()))
    refusals = tuple(_refusal(code, message, asked, now()) for code, message in told)
    if not ids and any(refusal.code in NOT_ALLOWED for refusal in refusals):
        # It is a fleet with the caller's rights, which tells in its answer what it may not do; the group has its own.
        raise NoLaunchCall(lasting=True)
    if len(ids) < asked["number"] and not refusals:
        refusals = (_refusal("UnfulfillableCapacity", "", asked, now()),)
    return Launched(ids=ids, refusals=refusals)


def _request(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "AutoScalingGroupName": asked["name"],
        "RequestedCapacity": asked["number"],
        "SubnetIds": [asked["subnet"]],
        "ClientToken": asked["token"],
        "RetryStrategy": "none",
    }


def _refused(error: botocore.exceptions.ClientError, asked: dict[str, Any], at: datetime) -> Launched:
    code = code_of(error)
    if code in _NO_SUCH_CALL or code in NOT_ALLOWED:
        raise NoLaunchCall(lasting=True) from error
    if code == "ValidationError":
        raise NoLaunchCall(lasting=False) from error
    if known(code).fault not in _REFUSING:
        raise error
    return Launched(ids=(), refusals=(_refusal(code, str(error), asked, at),))


def _refusal(code: str, message: str, asked: dict[str, Any], at: datetime) -> Refusal:
    told = code if known(code).fault is not Fault.UNKNOWN else code_in(message) or code
    meaning = known_of_new(told, message) if asked["settling"] else known(told)
    line = meaning.line or message[:300]
    return Refusal(pool=asked["pool"], fault=meaning.fault, code=told, message=line, at=at, hint=meaning.step)


# What a group starts: one plain launch template for each type and market, of which it is given a version by number.
#
# Terraform's templates say all but that, one for each layout of EFA interfaces. A group with a mixed policy would have
# its machines replaced when their market is changed (Auto Scaling API reference, UpdateAutoScalingGroup); of a plain
# template "existing instances continue to run with the configuration that they were originally launched with". A
# version that is named by its number is checked, when it is set, for what its role may be passed; `$Latest` is not
# (user guide, "Control launch template usage").


_ABSENT = ("InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateName.NotFound")
_THERE = "InvalidLaunchTemplateName.AlreadyExistsException"
_MILLIONTH = Decimal("0.000001")


def pinned(aws: Aws, place: Place, pool: Pool, efa: EfaLayout, cap_usd_per_hour: Decimal | None) -> dict[str, str]:
    """Return the template and version that starts machines of the pool, made where there is none yet. ProvisionError.

    AWS itself keeps a spot machine's price at or below the cap: it takes the machine rather than charge more.
    """
    with aws.calling("ec2", f"choose the launch template of {place} for {pool}", place.region) as ec2:
        base = _latest(ec2, place.template(efa))
        data = _data(ec2, base["LaunchTemplateData"], pool, cap_usd_per_hour)
        name = place.template_of(efa, pool.instance_type, pool.market)
        return {"LaunchTemplateName": name, "Version": str(_version(ec2, name, data, place.template(efa)))}


def drop_templates(aws: Aws, place: Place) -> None:
    """Delete the cluster's templates for types and markets; those that Terraform made stay."""
    with aws.calling("ec2", f"delete the launch templates of {place}", place.region) as ec2:
        mine = [{"Name": "tag:gpucloud:cluster", "Values": [place.cluster]}]
        pages = ec2.get_paginator("describe_launch_templates").paginate(Filters=mine)
        for name in [one["LaunchTemplateName"] for page in pages for one in page["LaunchTemplates"]]:
            if name.startswith(f"{place.cluster}-efa") and "." in name:
                _delete(ec2, name)


def _delete(ec2: Any, name: str) -> None:
    try:
        ec2.delete_launch_template(LaunchTemplateName=name)
    except botocore.exceptions.ClientError as error:
        if code_of(error) not in _ABSENT:
            raise


def _latest(ec2: Any, name: str) -> Described:
    asked = {"LaunchTemplateName": name, "Versions": ["$Latest"]}
    found: Described = ec2.describe_launch_template_versions(**asked)["LaunchTemplateVersions"][0]
    return found


def _version(ec2: Any, name: str, data: Mapping[str, Any], base: str) -> int:
    """Return the number of the version that says this: the last one, or a new one."""
    said = f"gpucloud {hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]}"
    asked = {"LaunchTemplateName": name, "LaunchTemplateData": data, "VersionDescription": said}
    try:
        last = _latest(ec2, name)
    except botocore.exceptions.ClientError as error:
        if code_of(error) not in _ABSENT:
            raise
        return _created(ec2, asked, base)
    if last.get("VersionDescription") == said:
        return int(last["VersionNumber"])
    return int(ec2.create_launch_template_version(**asked)["LaunchTemplateVersion"]["VersionNumber"])


def _created(ec2: Any, asked: Mapping[str, Any], base: str) -> int:
    """Make the template, with the tags of the one that it stems from; another process may be doing the same."""
    tags = ec2.describe_launch_templates(LaunchTemplateNames=[base])["LaunchTemplates"][0].get("Tags", [])
    own = [{"ResourceType": "launch-template", "Tags": tags}] if tags else []
    try:
        made = ec2.create_launch_template(**asked, TagSpecifications=own)
    except botocore.exceptions.ClientError as error:
        if code_of(error) != _THERE:
            raise
        return int(ec2.create_launch_template_version(**asked)["LaunchTemplateVersion"]["VersionNumber"])
    return int(made["LaunchTemplate"]["LatestVersionNumber"])


def _data(ec2: Any, base: Described, pool: Pool, cap_usd_per_hour: Decimal | None) -> dict[str, Any]:
    """Return Terraform's data with type and market. A Capacity Block is a market of its own, and named there."""
    data: dict[str, Any] = _asked(base, ec2.meta.service_model.shape_for("RequestLaunchTemplateData"))
    data["InstanceType"] = pool.instance_type
    if data.get("InstanceMarketOptions", {}).get("MarketType") == "capacity-block":
        return data
    data.pop("InstanceMarketOptions", None)
    if pool.market is Market.SPOT:
        price = {} if cap_usd_per_hour is None else {"MaxPrice": _usd(cap_usd_per_hour)}
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate", **price}
        data["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return data


def _usd(price: Decimal) -> str:
    return f"{price.quantize(_MILLIONTH, rounding=ROUND_DOWN).normalize():f}"


def _asked(told: Any, shape: Any) -> Any:
    """Return what was told of a template as it can be asked for: answers say a little more than requests may."""
    if shape.type_name == "structure":
        members = shape.members
        return {name: _asked(value, members[name]) for name, value in told.items() if name in members}
    return [_asked(value, shape.member) for value in told] if shape.type_name == "list" else told


# Calls that AWS refuses only because it is still busy with the one before.


Answer = TypeVar("Answer")

# botocore repeats what was throttled; these come as plain refusals (HTTP 4xx) and are over by themselves.
_BUSY = ("ResourceContention", "IdempotentCallInProgress", "ScalingActivityInProgress")
# What was made a moment ago, and is not known everywhere yet: a template's version, a role's profile.
_NOT_YET = re.compile(
    r"launch ?template.*(not exist|not ?found)|invalid iam instance profile|InvalidLaunchTemplate\w*\.\w*NotFound",
    re.IGNORECASE | re.DOTALL,
)
_GONE = re.compile(r"not part of|not found|no managed instance", re.IGNORECASE)
_BUSY_FOR = Retry(first_s=0.5, longest_s=15.0, tries=7)  # half a minute


def insist(call: Callable[[], Answer], sleep: Callable[[float], None]) -> Answer:
    """Return the call's answer, repeating it for half a minute while AWS is busy, or does not know yet what it made.

    The call must bear repeating.
    """
    tries = _BUSY_FOR.begin(sleep)
    while True:
        try:
            return call()
        except botocore.exceptions.ClientError as error:
            passes = code_of(error).startswith(_BUSY) or _NOT_YET.search(str(error))
            if not passes or not tries.again():
                raise


def unless_gone(call: Callable[[], Answer]) -> bool:
    """Make a call about one machine of a group; False when AWS says that the group has no such machine (any more)."""
    try:
        call()
    except botocore.exceptions.ClientError as error:
        if code_of(error) != "ValidationError" or not _GONE.search(str(error)):
            raise
        return False
    return True
