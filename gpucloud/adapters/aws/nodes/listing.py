"""What AWS lists of a node group at one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.place import CLUSTER_TAG, SHUT_OFF, SUBNETS_TAG, Place
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job import Market
from gpucloud.domain.offer import Pool

_LEAVING = ("Terminating", "Terminated", "Detaching", "Detached")
Described = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One reading: the Auto Scaling group, every instance with the cluster's tag (ended ones too), the shut-off.

    `group` is None where there is none; `activities` are read when they are needed, the newest first.
    """

    group: Described | None
    instances: tuple[Described, ...]
    shut_off: datetime | None
    activities: tuple[Described, ...] = ()

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
        policy = (self.group or {}).get("MixedInstancesPolicy") or {}
        overrides = policy.get("LaunchTemplate", {}).get("Overrides", ())
        zones = {subnet: zone for zone, subnet in self.subnets.items()}
        zone = zones.get((self.group or {}).get("VPCZoneIdentifier", ""))
        if not overrides or zone is None:
            return None
        share = policy.get("InstancesDistribution", {}).get("OnDemandPercentageAboveBaseCapacity", 100)
        market = Market.ON_DEMAND if share else Market.SPOT
        return Pool(instance_type=overrides[0]["InstanceType"], zone=zone, market=market)


def read(aws: Aws, place: Place, threads: Executor) -> Listing:
    """Ask for group, instances and shut-off at once. ProvisionError, CredentialsError."""
    group = threads.submit(_group, aws, place)
    shut_off = threads.submit(shut_off_of, aws, place)
    instances = tagged(aws, place)
    return Listing(group=group.result(), instances=instances, shut_off=shut_off.result())


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


def shut_off_of(aws: Aws, place: Place) -> datetime | None:
    """Return when the group's shut-off is due; None when none is armed."""
    with _asking(aws, "autoscaling", place) as client:
        answer = _of_group(
            lambda: client.describe_scheduled_actions(
                AutoScalingGroupName=place.cluster, ScheduledActionNames=[SHUT_OFF]
            )
        )
        times = [a.get("StartTime") for a in answer.get("ScheduledUpdateGroupActions", ()) if _is_shut_off(a)]
        return times[0] if times else None


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
    return action["ScheduledActionName"] == SHUT_OFF and sizes == [0, 0, 0]
