"""What AWS lists of a node group at one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.place import CLUSTER_TAG, SHUT_OFF, SHUT_OFF_AGAIN, SUBNETS_TAG, Place, started_by
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.offer import Pool

_LEAVING = ("Terminating", "Terminated", "Detaching", "Detached")
Described = Mapping[str, Any]

_SETTLING = timedelta(minutes=2)

# Without these a schedule fires and ends nothing (Auto Scaling user guide, "Suspend and resume processes").
HOLDING_PROCESSES = frozenset({"ScheduledActions", "Terminate"})
# What every group of ours says of its end. A policy of termination may be somebody's own function, which says "none".
_OPEN_TO_THE_END: dict[str, tuple[Any, Any]] = {
    "NewInstancesProtectedFromScaleIn": (False, False),
    "TerminationPolicies": (["NewestInstance"], ["NewestInstance"]),
    "DeletionProtection": ("none", "none"),
    "InstanceLifecyclePolicy": ({}, {"RetentionTriggers": {"TerminateHookAbandon": "terminate"}}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutOff:
    """The shut-off as AWS lists it: when it fires, and when the action that recurs fires next; None where one lacks.

    `asked_at` is when that was, by AWS's own clock, which fires it.
    """

    at: datetime | None = None
    again: datetime | None = None
    asked_at: datetime | None = field(default=None, compare=False)

    @property
    def armed(self) -> datetime | None:
        """Return when machines end; None unless both actions stand."""
        return self.at if self.again is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One reading: the Auto Scaling group, every instance with the cluster's tag (ended ones too), the shut-off.

    `group` is None where there is none; `activities` are read when they are needed, the newest first.
    """

    group: Described | None
    instances: tuple[Described, ...]
    schedule: ShutOff = ShutOff()
    activities: tuple[Described, ...] = ()

    @property
    def shut_off(self) -> datetime | None:
        """Return when the group is shut off; None too while something would keep that from ending its machines."""
        return None if held_back(self) else self.schedule.armed

    @property
    def suspended(self) -> frozenset[str]:
        """The group's processes that AWS does not run now."""
        return frozenset(one["ProcessName"] for one in (self.group or {}).get("SuspendedProcesses", ()))

    @property
    def desired(self) -> int:
        """The level as AWS says it."""
        return int(self.group["DesiredCapacity"]) if self.group else 0

    @property
    def members(self) -> tuple[Described, ...]:
        """The instances that the group itself lists."""
        return tuple(self.group.get("Instances", ())) if self.group else ()

    @property
    def counted(self) -> frozenset[str]:
        """The instances that the group counts: those that leave it are listed for a while yet."""
        return frozenset(m["InstanceId"] for m in self.members if not m["LifecycleState"].startswith(_LEAVING))

    @property
    def impaired(self) -> frozenset[str]:
        """The instances whose status checks fail (EC2 Auto Scaling user guide, "Health checks")."""
        return frozenset(m["InstanceId"] for m in self.members if m.get("HealthStatus") == "Unhealthy")

    @property
    def subnets(self) -> dict[str, str]:
        """Zone → subnet, from the tag that Terraform put on the group."""
        tags = {tag["Key"]: tag["Value"] for tag in self.group.get("Tags", ())} if self.group else {}
        pairs = (pair.partition("=") for pair in tags.get(SUBNETS_TAG, "").split(",") if "=" in pair)
        return {zone.strip(): subnet.strip() for zone, _, subnet in pairs}

    @property
    def pool(self) -> Pool | None:
        """The pool that the group starts machines of by itself; None before the first one was set."""
        group = self.group or {}
        made = started_by(group.get("LaunchTemplate", {}).get("LaunchTemplateName", ""))
        zones = {subnet: zone for zone, subnet in self.subnets.items()}
        zone = zones.get(group.get("VPCZoneIdentifier", ""))
        return Pool(instance_type=made[0], zone=zone, market=made[1]) if made and zone else None

    def settles(self, at: datetime) -> bool:
        """Whether the cluster, whose group is made last, was so new then that AWS may not have known all of it."""
        made_at: datetime | None = (self.group or {}).get("CreatedTime")
        return made_at is not None and at - made_at < _SETTLING


def read(aws: Aws, place: Place, threads: Executor) -> Listing:
    """Ask for group, instances and shut-off at once. ProvisionError, CredentialsError."""
    group = threads.submit(_group, aws, place)
    schedule = threads.submit(read_shut_off, aws, place)
    instances = tagged(aws, place)
    return Listing(group=group.result(), instances=instances, schedule=schedule.result())


def with_activities(listing: Listing, aws: Aws, place: Place) -> Listing:
    """Return the listing with what the group did lately."""
    with _asking(aws, "autoscaling", place) as client:
        answer = _of_group(
            lambda: client.describe_scaling_activities(AutoScalingGroupName=place.cluster, MaxRecords=50)
        )
        return replace(listing, activities=tuple(answer.get("Activities", ())))


def tagged(aws: Aws, place: Place) -> tuple[Described, ...]:
    """Return every instance with the cluster's tag, those that ended within the last hour too."""
    with _asking(aws, "ec2", place) as client:
        pages = client.get_paginator("describe_instances").paginate(
            Filters=[{"Name": f"tag:{CLUSTER_TAG}", "Values": [place.cluster]}]
        )
        return tuple(i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"])


def read_shut_off(aws: Aws, place: Place) -> ShutOff:
    """Return the group's shut-off as it stands."""
    with _asking(aws, "autoscaling", place) as client:
        answer = _of_group(
            lambda: client.describe_scheduled_actions(
                AutoScalingGroupName=place.cluster, ScheduledActionNames=[SHUT_OFF, SHUT_OFF_AGAIN]
            )
        )
    times = {
        a["ScheduledActionName"]: a.get("StartTime")
        for a in answer.get("ScheduledUpdateGroupActions", ())
        if _is_shut_off(a)
    }
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    asked_at = parsedate_to_datetime(said) if said else None
    return ShutOff(at=times.get(SHUT_OFF), again=times.get(SHUT_OFF_AGAIN), asked_at=asked_at)


def held_back(listing: Listing) -> tuple[str, ...]:
    """Return what keeps a shut-off from ending machines, in words for people; nothing where it ends all."""
    found = [f"suspended {name}" for name in sorted(listing.suspended & HOLDING_PROCESSES)]
    found += settings_that_hold_back(listing.group or {})
    found += [f"protected {m['InstanceId']}" for m in listing.members if m.get("ProtectedFromScaleIn")]
    return tuple(found)


def settings_that_hold_back(group: Described) -> dict[str, Any]:
    """Return what must be set so that the group's level alone decides what ends, as UpdateAutoScalingGroup takes it."""
    return {
        name: wanted
        for name, (allowed, wanted) in _OPEN_TO_THE_END.items()
        if group.get(name) and group[name] not in (allowed, wanted)
    }


@contextlib.contextmanager
def _asking(aws: Aws, service: str, place: Place) -> Iterator[Any]:
    with aws.calling(service, f"list the node group {place}", place.region) as client:
        yield client


def _group(aws: Aws, place: Place) -> Described | None:
    with _asking(aws, "autoscaling", place) as client:
        groups = client.describe_auto_scaling_groups(AutoScalingGroupNames=[place.cluster])["AutoScalingGroups"]
        return groups[0] if groups else None


def _of_group(ask: Callable[[], Described]) -> Described:
    """Ask about a group; nothing comes back where it is not there: `ValidationError … not found`."""
    try:
        return ask()
    except botocore.exceptions.ClientError as error:
        if code_of(error) != "ValidationError" or "not found" not in str(error).lower():
            raise
        return {}


def _is_shut_off(action: Described) -> bool:
    sizes = [action.get(name) for name in ("MinSize", "MaxSize", "DesiredCapacity")]
    recurs = bool(action.get("Recurrence"))
    return sizes == [0, 0, 0] and recurs is (action["ScheduledActionName"] == SHUT_OFF_AGAIN)
