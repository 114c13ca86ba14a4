"""Auto Scaling as AWS does it: a level that a loop follows, refusals as activities, schedules that fire.

moto launches within the call and knows no capacity. Here a call sets the level; `step` follows it.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from moto.autoscaling.models import InstanceState as Member
from moto.ec2.exceptions import EC2ClientError

from tests.lab.aws import instances, pools
from tests.lab.aws.world import World, now

GROUP_TAG = "aws:autoscaling:groupName"
GONE = ("shutting-down", "terminated")


@dataclass(slots=True)
class Follow:
    """What the loop knows of one group."""

    retry_at: datetime | None = None
    fired: str = ""  # what the last schedule did, as AWS tells it in what came of it
    wrong_market: bool = False  # its purchase options were changed: members of the other market are replaced
    activities: list[dict[str, Any]] = field(default_factory=list)  # newest last


def follow(group: Any) -> Follow:
    """Return what the loop knows of a group."""
    if not hasattr(group, "lab"):
        group.lab = Follow()
    found: Follow = group.lab
    return found


def step(world: World) -> None:
    """Fire what is due, let the dead go, follow every level."""
    for group in world.groups():
        _fire(world, group)
        _let_go(group)
        _settle(group)
        _follow(world, group)
        _replace(world, group)


# ---- the loop


def _fire(world: World, group: Any) -> None:
    due = now() - timedelta(seconds=world.shutdown_lag_s)
    for key, action in list(scheduled(group.autoscaling_backend, group.name)):
        if action.start_time is None or when(action.start_time) > due:
            continue
        if "ScheduledActions" not in group._suspended_processes:
            _set_sizes(group, action)
        if action.recurrence:
            action.start_time = _next(action.recurrence, now())
        else:  # what is due while the process is suspended does not fire later (Auto Scaling user guide)
            group.autoscaling_backend.scheduled_actions.pop(key)


def _next(recurrence: str, after: datetime) -> datetime:
    """The lab knows one form of cron: every so many minutes."""
    found = re.fullmatch(r"\*/(\d+) \* \* \* \*", recurrence)
    if found is None:
        raise ValueError(f"the lab cannot read the recurrence {recurrence!r}")
    whole = after.replace(second=0, microsecond=0)
    return whole + timedelta(minutes=int(found[1]) - whole.minute % int(found[1]))


def _set_sizes(group: Any, action: Any) -> None:
    sizes, before = (action.min_size, action.max_size, action.desired_capacity), group.desired_capacity
    group.min_size = group.min_size if sizes[0] is None else sizes[0]
    group.max_size = group.max_size if sizes[1] is None else sizes[1]
    if sizes[2] is not None:
        group.desired_capacity = sizes[2]
    group.desired_capacity = min(max(group.desired_capacity or 0, group.min_size), group.max_size)
    follow(group).fired = _fired(group, before)


def _fired(group: Any, before: int) -> str:
    return (
        f"At {now():%Y-%m-%dT%H:%M:%SZ} a scheduled action update of AutoScalingGroup constraints to "
        f"min: {group.min_size}, max: {group.max_size}, desired: {group.desired_capacity} "
        f"changing the desired capacity from {before} to {group.desired_capacity}.  "
    )


def _let_go(group: Any) -> None:
    """A machine that ended leaves its group, and the level asks for another."""
    if {"HealthCheck", "ReplaceUnhealthy"} & set(group._suspended_processes):
        return
    for member in list(group.instance_states):
        if member.instance.state in GONE and member.lifecycle_state != "Terminating":
            code = member.instance.state_reason.code
            if member.lifecycle_state == "Pending":
                reason = f"Termination Reason: {member.instance.state_reason.message}"
                said = f"Instance became unhealthy while waiting for instance to be in InService state. {reason}"
                note(group, f"Launching a new EC2 instance: {member.instance_id}", said, ok=False)
                follow(group).retry_at = now() + timedelta(seconds=0.5)
            else:
                note(group, f"Terminating EC2 instance: {member.instance_id}", f"taken out of service: {code}")
            member.lifecycle_state = "Terminating"
    group.instance_states = [
        member for member in group.instance_states if member.instance.state != "terminated"
    ]  # fmt: skip


def _settle(group: Any) -> None:
    for member in group.instance_states:
        if member.lifecycle_state == "Pending" and member.instance.state == "running":
            member.lifecycle_state = "InService"


def _counting(group: Any) -> list[Any]:
    return [member for member in group.instance_states if member.lifecycle_state in {"Pending", "InService"}]


def _follow(world: World, group: Any) -> None:
    level, there = int(group.desired_capacity or 0), _counting(group)
    about = follow(group)
    if len(there) > level and "Terminate" not in group._suspended_processes:
        open_to_it = [member for member in there if not member.protected_from_scale_in]
        oldest = sorted(open_to_it, key=lambda member: instances.life(member.instance).born)
        for member in oldest[: len(there) - level]:
            end_member(world, group, member, cause=about.fired)
        about.fired = ""
    elif len(there) < level and "Launch" not in group._suspended_processes:
        if about.retry_at is not None and now() < about.retry_at:
            return
        for subnet in _subnets(group):
            _made, refused = launch(group, level - len(_counting(group)), subnet)
            if refused is None:
                about.retry_at = None
                return
        about.retry_at = now() + timedelta(seconds=world.retry_s)


def _replace(world: World, group: Any) -> None:
    """A changed share of spot and on demand replaces members, one at a time, the new one first."""
    about = follow(group)
    if not about.wrong_market or "Launch" in group._suspended_processes:
        return
    share = (group.mixed_instances_policy or {}).get("InstancesDistribution", {})
    wants_spot = not int(share.get("OnDemandPercentageAboveBaseCapacity", 100))
    there = _counting(group)
    wrong = [member for member in there if (member.instance.lifecycle == "spot") is not wants_spot]
    if not wrong:
        about.wrong_market = False
    elif len(there) > int(group.desired_capacity or 0) or not launch(group, 1, _subnets(group)[0])[1]:
        end_member(world, group, wrong[0], cause="The purchase options of the group were changed.  ")


def end_member(world: World, group: Any, member: Any, *, cause: str = "") -> None:
    """End a machine of a group; `cause` is what the group says before its own reason."""
    member.lifecycle_state = "Terminating"
    instances.end(world, member.instance, instances.CHOICE, "User initiated")
    note(group, f"Terminating EC2 instance: {member.instance_id}", "", cause=cause)


def _subnets(group: Any) -> list[str]:
    ids = group.vpc_zone_identifier.split(",") if group.vpc_zone_identifier else []
    used = [member.instance.subnet_id for member in group.instance_states]
    return sorted(ids, key=used.count)


# ---- one launch


def launch(group: Any, count: int, subnet: str) -> tuple[list[Any], pools.Refused | None]:
    """Launch up to `count` in a subnet; what was launched and why no more."""
    made: list[Any] = []
    for _ in range(count):
        spot, refused = next_is_spot(group), None
        for instance_type, template in choices(group):
            try:
                made.append(_launch_one(group, subnet, instance_type, template, spot=spot))
            except EC2ClientError as error:
                refused = pools.Refused(code=str(error.code), message=str(error.message))
            else:
                refused = None
                break
        if refused is not None:
            said = refused.in_activity(spot=spot)
            note(group, "Launching a new EC2 instance.  Status Reason: " + said, said, ok=False, subnet=subnet)
            return made, refused
    return made, None


def _launch_one(group: Any, subnet: str, instance_type: str, template: dict[str, Any], *, spot: bool) -> Any:
    version = group.ec2_backend._get_template_from_args(template)
    extra = {"placement": None, "region_name": group.region, "subnet_id": subnet, "launch_template": template}
    reservation = group.ec2_backend.run_instances(
        version.image_id,
        1,
        version.user_data,
        version.security_groups,
        instance_type=instance_type,
        is_instance_type_default=False,
        tags={"instance": {**group.get_propagated_tags(), GROUP_TAG: group.name}},
        **({"instance_market_options": "spot"} if spot else {}),
        **extra,
    )
    instance = reservation.instances[0]
    instance.autoscaling_group = group
    protected = bool(group.new_instances_protected_from_scale_in)
    member = Member(instance, lifecycle_state="Pending", protected_from_scale_in=protected)
    group.instance_states.append(member)
    note(group, f"Launching a new EC2 instance: {instance.id}", "", subnet=subnet)
    return instance


def choices(group: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, template to launch by) in the order of preference."""
    policy = group.mixed_instances_policy or {}
    base = {"LaunchTemplateId": group.ec2_launch_template.id, "Version": group.launch_template_version}
    for override in policy.get("LaunchTemplate", {}).get("Overrides") or [{}]:
        said = override.get("LaunchTemplateSpecification")
        template = {key: said[key] for key in said if said[key]} if said else base
        if "LaunchTemplateId" in template:
            template.pop("LaunchTemplateName", None)
        kind = override.get("InstanceType") or group.ec2_backend._get_template_from_args(template).instance_type
        yield kind, template


def next_is_spot(group: Any) -> bool:
    policy = group.mixed_instances_policy
    if not policy:
        version = group.ec2_launch_template.get_version(group.launch_template_version)
        return (version.data.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
    shares = policy.get("InstancesDistribution") or {}
    base = int(shares.get("OnDemandBaseCapacity") or 0)
    percentage = shares.get("OnDemandPercentageAboveBaseCapacity")
    percent = 100 if percentage is None else int(percentage)
    there = [member.instance for member in _counting(group)]
    wanted = base + math.ceil(max(0, len(there) + 1 - base) * percent / 100)
    return sum(1 for instance in there if instance.lifecycle != "spot") >= wanted


def note(group: Any, what: str, said: str, *, ok: bool = True, subnet: str = "", cause: str = "") -> None:
    at = now()
    did = "started" if what.startswith("Launching") else "taken out of service"
    zone = group.ec2_backend.get_subnet(subnet).availability_zone if subnet else ""
    activity = {
        "ActivityId": str(uuid.uuid4()),
        "AutoScalingGroupName": group.name,
        "AutoScalingGroupARN": group.arn,
        "Description": what,
        "Cause": f"{cause}At {at:%Y-%m-%dT%H:%M:%SZ} an instance was {did} in response to a difference between desired "
        f"and actual capacity, with desired capacity {group.desired_capacity}.",
        "StartTime": at,
        "EndTime": at,
        "StatusCode": "Successful" if ok else "Failed",
        "Progress": 100,
        "Details": json.dumps({"Subnet ID": subnet, "Availability Zone": zone}),
    }
    follow(group).activities.append(activity | ({"StatusMessage": said} if said and not ok else {}))


def scheduled(backend: Any, group_name: str) -> Iterator[tuple[Any, Any]]:
    for key, action in backend.scheduled_actions.items():
        if action.auto_scaling_group_name == group_name:
            yield key, action


def when(said: Any) -> datetime:
    at = datetime.fromisoformat(said.replace("Z", "+00:00")) if isinstance(said, str) else said
    return at if at.tzinfo else at.replace(tzinfo=timezone.utc)
