"""What a group starts: one plain launch template for each type and market, of which it is given a version by number.

Terraform's templates say all but that, one for each layout of EFA interfaces. A group with a mixed policy would have
its machines replaced when their market is changed (Auto Scaling API reference, UpdateAutoScalingGroup); of a plain
template "existing instances continue to run with the configuration that they were originally launched with". A version
that is named by its number is checked, when it is set, for what its role may be passed; `$Latest` is not (user guide,
"Control launch template usage").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from decimal import ROUND_DOWN, Decimal
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.listing import Described
from gpucloud.adapters.aws.nodes.place import Place
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job import Market
from gpucloud.domain.offer import EfaLayout, Pool

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
