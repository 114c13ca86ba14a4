"""Where a node group is, what AWS lists of it at one moment, and each instance as a node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_in, code_of, known
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Access, Market
from gpucloud.domain.node.node import EndCause, Fault, Node, NodeState, Refusal
from gpucloud.domain.offer import EfaLayout, Pool

CLUSTER_TAG = "gpucloud:cluster"
RELIEVED_TAG = "gpucloud:relieved"
SUBNETS_TAG = "gpucloud:subnets"
SSH_TAG = "gpucloud:ssh"
AUTO_SHUTDOWN = "gpucloud-auto-shutdown"
AUTO_SHUTDOWN_AGAIN = "gpucloud-auto-shutdown-again"
LEAST_AHEAD = timedelta(seconds=120)
"""AWS runs a scheduled action up to two minutes late: what is started with less ahead may be up after it has fired."""


_STARTED_BY = re.compile(r"-efa[0-9a-z]+\.(?P<type>[a-z0-9-]+\.[a-z0-9-]+)\.(?P<market>spot|on_demand)$")


def started_by(template: str) -> tuple[str, Market] | None:
    """Return the type and the market of a template that `Place.template_of` named; None for any other name."""
    found = _STARTED_BY.search(template)
    return (found["type"], Market(found["market"])) if found else None


def drill_role(region: str) -> str:
    """Return the name of the role for drills, a part of the region's base.

    IAM lists roles without their tags: those of a cluster are known by name, `gpucloud-<job>-<region>`. No job's name
    has a dot, so that a job called `drill` finds, takes over and removes its own role only.
    """
    return f"gpucloud-base.drill-{region}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A group's region and cluster; the cluster's name is the Auto Scaling group's and the instances' tag."""

    region: str
    cluster: str

    @classmethod
    def of(cls, group: str) -> Place:
        """Return the place of `<region>/<cluster>`. ProvisionError for any other form."""
        region, slash, cluster = group.partition("/")
        if not (region and slash and cluster) or "/" in cluster:
            raise ProvisionError(f"{group} is no node group on AWS", hint="its name is <region>/<cluster>")
        return cls(region=region, cluster=cluster)

    def __str__(self) -> str:
        return f"{self.region}/{self.cluster}"

    def template(self, efa: EfaLayout) -> str:
        """Return the name of the launch template that Terraform makes for types whose EFA interfaces lie so."""
        return f"{self.cluster}-efa{efa}"

    def template_of(self, efa: EfaLayout, instance_type: str, market: Market) -> str:
        """Return the name of the launch template that starts machines of a type, paid so; `started_by` reads it."""
        return f"{self.template(efa)}.{instance_type}.{market.value}"

    def missing(self) -> ProvisionError:
        """Return the error for a group that is not there."""
        return ProvisionError(f"there is no node group {self}", hint="make the cluster first")


# What AWS lists of a node group at one moment, and each instance as a node.


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
class AutoShutdown:
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
    schedule: AutoShutdown = AutoShutdown()
    activities: tuple[Described, ...] = ()

    @property
    def shutdown_at(self) -> datetime | None:
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
    schedule = threads.submit(read_auto_shutdown, aws, place)
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


def read_auto_shutdown(aws: Aws, place: Place) -> AutoShutdown:
    """Return the group's shut-off as it stands."""
    with _asking(aws, "autoscaling", place) as client:
        answer = _of_group(
            lambda: client.describe_scheduled_actions(
                AutoScalingGroupName=place.cluster, ScheduledActionNames=[AUTO_SHUTDOWN, AUTO_SHUTDOWN_AGAIN]
            )
        )
    times = {
        a["ScheduledActionName"]: a.get("StartTime")
        for a in answer.get("ScheduledUpdateGroupActions", ())
        if _is_auto_shutdown(a)
    }
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    asked_at = parsedate_to_datetime(said) if said else None
    return AutoShutdown(at=times.get(AUTO_SHUTDOWN), again=times.get(AUTO_SHUTDOWN_AGAIN), asked_at=asked_at)


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


def _is_auto_shutdown(action: Described) -> bool:
    sizes = [action.get(name) for name in ("MinSize", "MaxSize", "DesiredCapacity")]
    recurs = bool(action.get("Recurrence"))
    return sizes == [0, 0, 0] and recurs is (action["ScheduledActionName"] == AUTO_SHUTDOWN_AGAIN)


# An EC2 instance as a node: its pool, how SSH reaches it, and why it ended.


# A machine's own timer and the cloud's schedule are set to the same moment by two clocks.
_CLOCKS_DIFFER = timedelta(seconds=5)
_STATES = {"pending": NodeState.PENDING, "running": NodeState.RUNNING}
_BY_US = "Client.UserInitiatedShutdown"
_BY_ITSELF = "Client.InstanceInitiatedShutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How SSH reaches the machines of a region, and as whom; of one that says itself how, `access` is that."""

    region: str
    user: str
    port: int
    access: Access

    def proxy(self, instance_id: str) -> tuple[str, ...]:
        """Return the command that leads to the machine's SSH; empty where it is reached directly."""
        if self.access is not Access.SESSION_MANAGER:
            return ()
        document = ("--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={self.port}")
        return ("aws", "ssm", "start-session", "--region", self.region, "--target", instance_id, *document)


def node_of(instance: Described, reach: Reach, shutdown_at: datetime | None, now: datetime) -> Node:
    """Return the instance as a node; `shutdown_at` is the group's, `now` counts as the end of one that ended untold."""
    state = _STATES.get(instance["State"]["Name"], NodeState.TERMINATED)
    ended = max(instance["LaunchTime"], _ended_at(instance) or now) if state is NodeState.TERMINATED else None
    private = instance.get("PrivateIpAddress") or ""
    reach = replace(reach, access=_access(instance, reach.access))
    public = instance.get("PublicIpAddress") if reach.access is Access.PUBLIC else None
    return Node(
        id=instance["InstanceId"],
        pool=_pool(instance),
        state=state,
        launched_at=instance["LaunchTime"],
        address=public or private,
        port=reach.port,
        user=reach.user,
        private_address=private,
        interface=None,
        proxy=reach.proxy(instance["InstanceId"]),
        ended_at=ended,
        end_cause=end_cause(_reason(instance), ended, shutdown_at) if ended else None,
    )


def end_cause(reason: str, ended: datetime, shutdown_at: datetime | None) -> EndCause:
    """Return why an instance ended, from its StateReason code. What nobody explains is charged: CRASH."""
    past = shutdown_at is not None and ended >= shutdown_at - _CLOCKS_DIFFER
    if reason == _BY_US:
        return EndCause.SCHEDULE if past else EndCause.CHOICE
    if reason in (_BY_ITSELF, ""):
        return EndCause.SCHEDULE if past else EndCause.CRASH
    return EndCause.INTERRUPTED  # taken, or died of AWS's own refusal before it ran


def refusal_of(instance: Described, at: datetime) -> Refusal | None:
    """Return the refusal that an instance tells by its death at launch; None when it died of anything else."""
    reason = _reason(instance)
    if instance["State"]["Name"] in _STATES or reason in (_BY_US, _BY_ITSELF, "") or "SpotInstance" in reason:
        return None
    text = f"{reason}: {instance.get('StateReason', {}).get('Message', '')}"
    code = reason if known(reason).fault is not Fault.UNKNOWN else code_in(text) or reason
    meaning = known(code)
    return Refusal(
        pool=_pool(instance),
        fault=meaning.fault,
        code=code,
        message=meaning.line or text,
        at=at,
        hint=meaning.step,
    )


def is_relieved(instance: Described) -> bool:
    """Whether another machine was started in its place."""
    return any(tag["Key"] == RELIEVED_TAG for tag in instance.get("Tags", ()))


def ended_by_a_user(instance: Described) -> bool:
    """Whether a user ended it: then a shut-off that AWS has forgotten since may be why."""
    return instance["State"]["Name"] not in _STATES and _reason(instance) == _BY_US


def _pool(instance: Described) -> Pool:
    market = Market.SPOT if instance.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND
    zone = instance["Placement"]["AvailabilityZone"]
    return Pool(instance_type=instance["InstanceType"], zone=zone, market=market)


def _access(instance: Described, desired: Access) -> Access:
    """Who wishes for a public address may have got a machine that AWS gives none: its template says so in a tag."""
    told = any(tag == {"Key": SSH_TAG, "Value": Access.SESSION_MANAGER.value} for tag in instance.get("Tags", ()))
    return Access.SESSION_MANAGER if told and desired is Access.PUBLIC else desired


def _reason(instance: Described) -> str:
    return str(instance.get("StateReason", {}).get("Code", ""))


def _ended_at(instance: Described) -> datetime | None:
    """AWS tells the time in prose only: `User initiated (2026-11-21 10:00:00 GMT)`."""
    told = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)", instance.get("StateTransitionReason") or "")
    return datetime.strptime(told[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc) if told else None
