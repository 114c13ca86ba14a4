"""The calls of Auto Scaling that change or read a level; `scaling` follows it."""

from __future__ import annotations

from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult

from tests.lab.aws import instances, pools
from tests.lab.aws.repairs import Patches
from tests.lab.aws.scaling import (
    GONE,
    GROUP_TAG,
    choices,
    end_member,
    follow,
    launch,
    next_is_spot,
    note,
    scheduled,
    when,
)
from tests.lab.aws.world import World, market, now


def install(patches: Patches, world: World) -> None:
    """Put the level's semantics in place of moto's."""
    _levels(patches, world)
    _members(patches, world)
    _schedules(patches)
    _launch_instances(patches, world)
    _activities(patches)


def _group(backend: Any, name: str) -> Any:
    if name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return backend.autoscaling_groups[name]


def _levels(patches: Patches, world: World) -> None:
    def set_desired_capacity(self: Any, new_capacity: int | None) -> None:
        wanted = (self.min_size or 0) if new_capacity is None else new_capacity
        if not (self.min_size or 0) <= wanted <= (self.max_size or 0):
            raise ValidationError(
                f"New SetDesiredCapacity value {wanted} is {'above max' if wanted else 'below min'} value "
                f"{self.max_size if wanted else self.min_size} for the AutoScalingGroup."
            )
        self.desired_capacity = wanted
        follow(self).retry_at = None
        world.kick.set()

    def update(self: Any, **asked: Any) -> None:
        self._set_azs_and_vpcs(asked["availability_zones"], asked["vpc_zone_identifier"], update=True)
        _resize(self, asked)
        _choose_template(self, asked)
        if asked["health_check_period"] is not None:
            self.health_check_grace_period = asked["health_check_period"]
        self.health_check_type = asked["health_check_type"] or self.health_check_type
        if asked["new_instances_protected_from_scale_in"] is not None:
            self.new_instances_protected_from_scale_in = asked["new_instances_protected_from_scale_in"]
        follow(self).retry_at = None
        world.kick.set()

    def by_name(self: Any, group_name: str, desired_capacity: int | None) -> None:
        _group(self, group_name).set_desired_capacity(desired_capacity)

    plain_update = AutoScalingResponse.update_auto_scaling_group
    create = AutoScalingBackend.create_auto_scaling_group

    def update_auto_scaling_group(self: Any) -> Any:
        said = plain_update(self)
        group = _group(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
        group.termination_policies = self._get_param("TerminationPolicies") or group.termination_policies
        return said

    def create_auto_scaling_group(self: Any, name: str, *args: Any, **asked: Any) -> Any:
        if name in self.autoscaling_groups:
            raise AutoscalingClientError(
                "AlreadyExists",
                f"AutoScalingGroup by this name already exists - A group with the name {name} already exists",
            )
        made = create(self, name, *args, **asked)
        made.created_time = now().isoformat()  # moto's has no zone
        return made

    patches.set(FakeAutoScalingGroup, "set_desired_capacity", set_desired_capacity)
    patches.set(FakeAutoScalingGroup, "update", update)
    patches.set(AutoScalingResponse, "update_auto_scaling_group", update_auto_scaling_group)
    patches.set(AutoScalingBackend, "set_desired_capacity", by_name)
    patches.set(AutoScalingBackend, "create_auto_scaling_group", create_auto_scaling_group)
    _deletion(patches, world)


def _resize(group: Any, asked: dict[str, Any]) -> None:
    least = group.min_size if asked["min_size"] is None else asked["min_size"]
    most = group.max_size if asked["max_size"] is None else asked["max_size"]
    level = asked["desired_capacity"]
    if least > most:
        raise ValidationError("Min size cannot be greater than max size")  # the group keeps what it had
    if level is not None and not least <= level <= most:
        raise ValidationError(
            f"Desired capacity:{level} must be between the specified min size:{least} and max size:{most}"
        )
    group.min_size, group.max_size = least, most
    group.desired_capacity = min(max(group.desired_capacity or 0, least), most) if level is None else level


def _choose_template(group: Any, asked: dict[str, Any]) -> None:
    """moto forgets a mixed policy that an update does not repeat; AWS keeps it, and its parts one by one."""
    policy = asked["mixed_instances_policy"]
    if policy:
        old = group.mixed_instances_policy or {}
        merged = {**old, **{key: value for key, value in policy.items() if value}}
        shares = {**(old.get("InstancesDistribution") or {}), **(policy.get("InstancesDistribution") or {})}
        if shares != (old.get("InstancesDistribution") or {}) and old:
            follow(group).wrong_market = True
        group.mixed_instances_policy = {**merged, "InstancesDistribution": shares}
    elif asked["launch_template"]:
        group.mixed_instances_policy = None
    if policy or asked["launch_template"]:
        group._set_launch_configuration(
            "", asked["launch_template"], mixed_instances_policy=group.mixed_instances_policy
        )


def _deletion(patches: Patches, world: World) -> None:
    def delete_auto_scaling_group(self: Any) -> EmptyResult:
        backend = self.autoscaling_backend
        group = _group(backend, self._get_param("AutoScalingGroupName"))
        left = [member for member in group.instance_states if member.instance.state != "terminated"]
        if left and not self._get_bool_param("ForceDelete", False):
            raise AutoscalingClientError(
                "ResourceInUse",
                "You cannot delete an AutoScalingGroup while there are instances or pending Spot instance request(s) "
                "still in the group.",
            )
        for member in left:
            instances.end(world, member.instance, instances.CHOICE, "User initiated")
        backend.autoscaling_groups.pop(group.name)
        for key, _action in list(scheduled(backend, group.name)):
            backend.scheduled_actions.pop(key)
        return EmptyResult()

    patches.set(AutoScalingResponse, "delete_auto_scaling_group", delete_auto_scaling_group)


def _members(patches: Patches, world: World) -> None:
    def detach_instances(self: Any, group_name: str, instance_ids: list[str], should_decrement: bool) -> list[Any]:
        group = _group(self, group_name)
        leaving = [_member(group, id_) for id_ in instance_ids]
        if should_decrement:
            if group.desired_capacity - len(leaving) < group.min_size:
                raise ValidationError(
                    f"AutoScalingGroup {group_name} has min-size={group.min_size}, max-size={group.max_size}, and "
                    f"desired-size={group.desired_capacity}. Detaching {len(leaving)} needs other sizes."
                )
            group.desired_capacity -= len(leaving)
        for member in leaving:
            self.ec2_backend.delete_tags([member.instance_id], {GROUP_TAG: group.name})
            group.instance_states.remove(member)
            note(group, f"Detaching EC2 instance: {member.instance_id}", "")
        follow(group).retry_at = None
        world.kick.set()
        return follow(group).activities[-len(leaving) :]

    def terminate_in_group(self: Any) -> ActionResult:
        id_ = self._get_param("InstanceId")
        member = _managed(world, id_)
        group = member.auto_scaling_group
        if self._get_bool_param("ShouldDecrementDesiredCapacity", False):
            if group.desired_capacity - 1 < group.min_size:
                raise ValidationError(
                    f"Currently, desiredSize equals minSize ({group.min_size}). Terminating instance without "
                    "replacement will violate group's min size constraint. Either set "
                    "shouldDecrementDesiredCapacity flag to false "
                    "or lower group's min size."
                )
            group.desired_capacity -= 1
        end_member(world, group, member)
        return ActionResult({"Activity": follow(group).activities[-1]})

    patches.set(AutoScalingBackend, "detach_instances", detach_instances)
    patches.set(AutoScalingBackend, "notify_terminate_instances", lambda _self, _ids: None)  # the loop sees it
    patches.set(AutoScalingResponse, "terminate_instance_in_auto_scaling_group", terminate_in_group)


def _member(group: Any, id_: str) -> Any:
    for member in group.instance_states:
        if member.instance_id == id_ and member.instance.state not in GONE:
            return member
    raise ValidationError(f"The instance {id_} is not part of Auto Scaling group {group.name}.")


def _managed(world: World, id_: str) -> Any:
    for group in world.groups():
        for member in group.instance_states:
            if member.instance_id == id_ and member.instance.state not in GONE:
                return member
    raise ValidationError(f"Instance Id not found - No managed instance found for instance ID {id_}")


def _schedules(patches: Patches) -> None:
    """moto keeps scheduled actions by their own name alone: two groups' shut-offs would be one."""
    put = AutoScalingBackend.put_scheduled_update_group_action

    def put_scheduled_update_group_action(self: Any, **asked: Any) -> Any:
        group, name = _group(self, asked["name"]), asked["scheduled_action_name"]
        at = asked.get("start_time")
        if at is not None:
            if when(at) <= now():
                raise ValidationError("Given start time is in the past")
            asked["start_time"] = when(at).replace(microsecond=0)
        others = {key: action for key, action in self.scheduled_actions.items() if key != (group.name, name)}
        taken = {when(one.start_time) for key, one in others.items() if key[0] == group.name and one.start_time}
        if asked.get("start_time") in taken:
            raise AutoscalingClientError("AlreadyExists", "A scheduled action with this start time already exists.")
        self.scheduled_actions.clear()
        action = put(self, **asked)
        self.scheduled_actions.clear()
        self.scheduled_actions.update({**others, (group.name, name): action})
        return action

    def delete_scheduled_action(self: Any, auto_scaling_group_name: str, scheduled_action_name: str) -> None:
        if self.scheduled_actions.pop((auto_scaling_group_name, scheduled_action_name), None) is None:
            raise ValidationError("Scheduled action name not found")

    patches.set(AutoScalingBackend, "put_scheduled_update_group_action", put_scheduled_update_group_action)
    patches.set(AutoScalingBackend, "delete_scheduled_action", delete_scheduled_action)


def _launch_instances(patches: Patches, world: World) -> None:
    def launch_instances(self: Any) -> ActionResult:
        group = _group(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
        wanted = int(self._get_param("RequestedCapacity"))
        subnet = _asked_subnet(group, self._get_param("SubnetIds", []), self._get_param("AvailabilityZones", []))
        if (group.desired_capacity or 0) + wanted > group.max_size:
            raise ValidationError(
                f"The requested capacity of {wanted} would take group {group.name} above its max size {group.max_size}."
            )
        spot = next_is_spot(group)
        kind = next(choices(group))[0]
        if world.launch_error is not None:  # the fleet behind it has the caller's rights, and tells so in its answer
            made, refused = [], pools.Refused(code=world.launch_error[0], message=world.launch_error[1])
        else:
            made, refused = launch(group, wanted, subnet)
        group.desired_capacity = (group.desired_capacity or 0) + len(made)
        pool = {
            "InstanceType": kind,
            "MarketType": market(spot=spot).replace("_", "-"),
            "SubnetId": subnet,
            "AvailabilityZone": group.ec2_backend.get_subnet(subnet).availability_zone,
        }
        answer: dict[str, Any] = {
            "AutoScalingGroupName": group.name,
            "ClientToken": self._get_param("ClientToken"),
            "Instances": [{**pool, "InstanceIds": [one.id for one in made]}] if made else [],
            "Errors": [],
        }
        if refused is not None:
            answer["Errors"] = [{**pool, "ErrorCode": refused.code, "ErrorMessage": refused.message}]
            if self._get_param("RetryStrategy") == "retry-with-group-configuration":
                group.desired_capacity += wanted - len(made)
        world.kick.set()
        return ActionResult(answer)

    patches.set(AutoScalingResponse, "launch_instances", launch_instances)


def _asked_subnet(group: Any, subnets: list[str], zones: list[str]) -> str:
    own = group.vpc_zone_identifier.split(",")
    fitting = [one for one in own if one in subnets or group.ec2_backend.get_subnet(one).availability_zone in zones]
    if not subnets and not zones and len(own) == 1:
        return str(own[0])
    if len(subnets) > 1 or len(zones) > 1 or not fitting:
        raise ValidationError("Exactly one subnet or Availability Zone of the group must be specified.")
    return str(fitting[0])


def _activities(patches: Patches) -> None:
    def describe_scaling_activities(self: Any) -> ActionResult:
        name = self._get_param("AutoScalingGroupName")
        groups = self.autoscaling_backend.autoscaling_groups
        chosen = [_group(self.autoscaling_backend, name)] if name else list(groups.values())
        found = sorted(
            (one for group in chosen for one in follow(group).activities),
            key=lambda one: one["StartTime"],
            reverse=True,
        )
        wanted = self._get_param("ActivityIds", [])
        found = [one for one in found if not wanted or one["ActivityId"] in wanted]
        start, size = int(self._get_param("NextToken") or 0), min(self._get_int_param("MaxRecords") or 100, 100)
        more = str(start + size) if len(found) > start + size else None
        return ActionResult({"Activities": found[start : start + size], "NextToken": more})

    patches.set(AutoScalingResponse, "describe_scaling_activities", describe_scaling_activities)
