"""What stands in a real account and lives there, asked through plain boto3. Only `bring_forward` changes anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import boto3.session
import botocore.exceptions

from tests.cloud.figures import Machine, Resource

SPOT_G_VCPUS = "L-3819A6DF"  # "All G and VT Spot Instance Requests", in vCPUs
_MANAGED = "gpucloud:managed"
_BASE = "gpucloud:base"
_SHUT_OFF = "gpucloud-auto-shutdown"
_ENDED_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)")
_NOT_THERE = {"InvalidAction", "UnknownOperation", "UnsupportedOperation", "AccessDenied", "AccessDeniedException"}


class Account:
    """One account in one region."""

    def __init__(self, region: str | None) -> None:
        self._session = boto3.session.Session(region_name=region)
        self.region: str = self._session.region_name

    def caller(self) -> dict[str, str]:
        """Return who asks: `Account` and `Arn`."""
        answer: dict[str, str] = self._session.client("sts").get_caller_identity()
        return answer

    def spot_quota(self) -> float:
        """Return how many vCPUs of G and VT spot machines may run at once."""
        quotas = self._session.client("service-quotas")
        return float(quotas.get_service_quota(ServiceCode="ec2", QuotaCode=SPOT_G_VCPUS)["Quota"]["Value"])

    def machines(self) -> tuple[Machine, ...]:
        """Return every instance of gpucloud that EC2 still tells of: ended ones for about an hour."""
        pages = self._session.client("ec2").get_paginator("describe_instances")
        found = pages.paginate(Filters=[{"Name": f"tag:{_MANAGED}", "Values": ["true"]}])
        return tuple(_machine(one) for page in found for r in page["Reservations"] for one in r["Instances"])

    def alive(self) -> tuple[str, ...]:
        """Return the ids of what is charged now."""
        return tuple(machine.id for machine in self.machines() if machine.ended_at is None)

    def ending(self, instance_id: str) -> str | None:
        """Return why and when the instance ended, in EC2's words; None while it runs."""
        answer = self._session.client("ec2").describe_instances(InstanceIds=[instance_id])
        (one,) = [i for r in answer["Reservations"] for i in r["Instances"]]
        return None if one["State"]["Name"] in ("pending", "running") else str(one.get("StateTransitionReason", ""))

    def inventory(self) -> frozenset[Resource]:
        """Return everything tagged as gpucloud's in the region, and its roles and buckets in the account."""
        return frozenset([*self._ec2(), *self._groups(), *self._roles(), *self._buckets(), *self._fis_templates()])

    def bring_forward(self, group: str, until: datetime) -> None:
        """Have AWS end the group's machines at `until`, as gpucloud arms it. ValueError for a group not gpucloud's."""
        client = self._session.client("autoscaling")
        (found,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
        if (_MANAGED, "true") not in {(tag["Key"], tag["Value"]) for tag in found["Tags"]}:
            raise ValueError(f"{group} is not gpucloud's")
        client.put_scheduled_update_group_action(
            AutoScalingGroupName=group,
            ScheduledActionName=_SHUT_OFF,
            StartTime=until,
            MinSize=0,
            MaxSize=0,
            DesiredCapacity=0,
        )

    def launch_instances_answers(self, group: str) -> str:
        """Return what LaunchInstances says of a group whose limit is 0, where it can start nothing."""
        client = self._session.client("autoscaling")
        (found,) = client.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
        if found["MaxSize"] != 0:
            raise ValueError(f"{group} could start a machine")
        try:
            client.launch_instances(
                AutoScalingGroupName=group,
                RequestedCapacity=1,
                ClientToken=group,
                RetryStrategy="none",
                SubnetIds=found["VPCZoneIdentifier"].split(",")[:1],
            )
        except botocore.exceptions.ClientError as error:
            code = str(error.response["Error"]["Code"])
            return f"absent:{code}" if code in _NOT_THERE else f"answers:{code}"
        return "answers:ok"

    def _ec2(self) -> Iterator[Resource]:
        pages = self._session.client("ec2").get_paginator("describe_tags")
        tags = [tag for page in pages.paginate(Filters=_any_of(_MANAGED, _BASE)) for tag in page["Tags"]]
        base = {tag["ResourceId"] for tag in tags if tag["Key"] == _BASE}
        # EC2 tells the tags of instances, their disks and interfaces for some time after their end.
        alive = set(self.alive())
        for tag in tags:
            if tag["Key"] == _MANAGED and (tag["ResourceType"] != "instance" or tag["ResourceId"] in alive):
                yield Resource(tag["ResourceType"], tag["ResourceId"], tag["ResourceId"] in base)

    def _groups(self) -> Iterator[Resource]:
        client = self._session.client("autoscaling")
        pages = client.get_paginator("describe_tags").paginate(Filters=[{"Name": "key", "Values": [_MANAGED]}])
        for name in sorted({tag["ResourceId"] for page in pages for tag in page["Tags"]}):
            yield Resource("group", name)
            for action in client.describe_scheduled_actions(AutoScalingGroupName=name)["ScheduledUpdateGroupActions"]:
                yield Resource("schedule", f"{name}/{action['ScheduledActionName']}")

    def _roles(self) -> Iterator[Resource]:
        client = self._session.client("iam")
        for page in client.get_paginator("list_roles").paginate():
            for name in (role["RoleName"] for role in page["Roles"] if role["RoleName"].startswith("gpucloud-")):
                tags = _as_dict(client.list_role_tags(RoleName=name)["Tags"])
                if _MANAGED in tags:
                    yield Resource("role", name, _BASE in tags)
        for page in client.get_paginator("list_instance_profiles").paginate():
            names = [profile["InstanceProfileName"] for profile in page["InstanceProfiles"]]
            yield from (Resource("instance-profile", name) for name in names if name.startswith("gpucloud-"))

    def _buckets(self) -> Iterator[Resource]:
        client = self._session.client("s3")
        mine = f"gpucloud-{self.caller()['Account']}-{self.region}"
        if mine in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            yield Resource("bucket", mine, base=True)

    def _fis_templates(self) -> Iterator[Resource]:
        pages = self._session.client("fis").get_paginator("list_experiment_templates").paginate()
        for template in (template for page in pages for template in page["experimentTemplates"]):
            if _MANAGED in template.get("tags", {}):
                yield Resource("fis-template", template["id"])


def ended_at(reason: str) -> datetime | None:
    """Return the time in EC2's "User initiated (2026-11-21 10:00:00 GMT)"; None where there is none."""
    found = _ENDED_AT.search(reason)
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc) if found else None


def _machine(one: dict[str, Any]) -> Machine:
    charged = one["State"]["Name"] in ("pending", "running")
    # An end without a time counts as now: rather too much than too little.
    end = None if charged else ended_at(one.get("StateTransitionReason", "")) or datetime.now(timezone.utc)
    return Machine(id=one["InstanceId"], launched_at=one["LaunchTime"], ended_at=end)


def _any_of(*keys: str) -> list[dict[str, Any]]:
    return [{"Name": "key", "Values": [*keys]}]


def _as_dict(tags: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}
