"""Everything in an account that bears a cluster's tag, in the regions that are asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.strays import CLUSTER, Thing
from gpucloud.ports import NodeGroup, Provisioner

_MINE = [{"Name": "tag-key", "Values": [CLUSTER]}]
# What is asked, where the answer lies, and the id within: all of EC2 that a cluster has.
_OF_EC2 = (
    ("volume", "describe_volumes", "Volumes", "VolumeId"),
    ("network-interface", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
    ("launch-template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateName"),
    ("security-group", "describe_security_groups", "SecurityGroups", "GroupId"),
)
_WHOLE = (
    ("key-pair", "describe_key_pairs", "KeyPairs", "KeyName"),
    ("placement-group", "describe_placement_groups", "PlacementGroups", "GroupName"),
)
_SINCE = ("CreateTime", "CreatedTime", "LaunchTime")


class AwsCensus:
    """Implements `Census` for one account and some regions."""

    def __init__(
        self, aws: Aws, account: str, regions: tuple[str, ...], *, group: NodeGroup, provisioner: Provisioner
    ) -> None:
        self._aws = aws
        self._account = account
        self._regions = regions
        self._group = group
        self._provisioner = provisioner

    @property
    def account(self) -> str:
        """The account's number."""
        return self._account

    @property
    def regional(self) -> bool:
        """Every cluster is of one region."""
        return True

    def things(self) -> tuple[Thing, ...]:
        """Return what bears a cluster's tag, and the roles of the clusters that were found."""
        return tuple(thing for region in self._regions for thing in self._in_region(region))

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """End the machines, let Terraform remove what it makes, and delete disks that no machine took with it."""
        group = self._provisioner.group(cluster, region)
        self._group.purge(group)
        self._provisioner.destroy(group, story=story)
        for thing in things:
            if thing.kind == "volume":
                self._delete_volume(thing)

    def _in_region(self, region: str) -> Iterator[Thing]:
        found = [*self._instances(region), *self._of_ec2(region), *self._groups(region)]
        yield from found
        for cluster in sorted({thing.cluster for thing in found}):
            yield from self._identity(region, cluster)

    def _instances(self, region: str) -> Iterator[Thing]:
        with self._aws.calling("ec2", f"list the machines in {region}", region) as ec2:
            pages = ec2.get_paginator("describe_instances").paginate(Filters=_MINE)
            for one in [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]:
                if one["State"]["Name"] not in {"terminated", "shutting-down"}:
                    yield self._thing("instance", region, one["InstanceId"], one)

    def _of_ec2(self, region: str) -> Iterator[Thing]:
        with self._aws.calling("ec2", f"list what stands in {region}", region) as ec2:
            for kind, call, where, name in _OF_EC2:
                for page in ec2.get_paginator(call).paginate(Filters=_MINE):
                    yield from (self._thing(kind, region, one[name], one) for one in page[where] if _stands(one))
            for kind, call, where, name in _WHOLE:
                answer = getattr(ec2, call)(Filters=_MINE)
                yield from (self._thing(kind, region, one[name], one) for one in answer[where] if _stands(one))

    def _groups(self, region: str) -> Iterator[Thing]:
        with self._aws.calling("autoscaling", f"list the node groups in {region}", region) as autoscaling:
            for page in autoscaling.get_paginator("describe_auto_scaling_groups").paginate(Filters=_MINE):
                for one in page["AutoScalingGroups"]:
                    yield self._thing("auto-scaling-group", region, one["AutoScalingGroupName"], one)

    def _identity(self, region: str, cluster: str) -> Iterator[Thing]:
        """Roles have no region: a cluster's has the region in its name."""
        name = f"{cluster}-{region}"
        role = self._if_there("get_role", RoleName=name)
        if role is not None:
            yield self._thing("role", region, name, role["Role"])
        profile = self._if_there("get_instance_profile", InstanceProfileName=name)
        if profile is not None:
            yield self._thing("instance-profile", region, name, profile["InstanceProfile"])

    def _if_there(self, call: str, **parameters: str) -> Mapping[str, Any] | None:
        client = self._aws.client("iam")
        with explained(f"look for {next(iter(parameters.values()))}"):
            try:
                answer: Mapping[str, Any] = getattr(client, call)(**parameters)
            except botocore.exceptions.ClientError as error:
                if code_of(error) == "NoSuchEntity":
                    return None
                raise
        return answer

    def _delete_volume(self, volume: Thing) -> None:
        with self._aws.calling("ec2", f"delete {volume.id}", volume.region) as ec2:
            try:
                ec2.delete_volume(VolumeId=volume.id)
            except botocore.exceptions.ClientError as error:
                if code_of(error) != "InvalidVolume.NotFound":
                    raise

    def _thing(self, kind: str, region: str, name: str, described: Mapping[str, Any]) -> Thing:
        return Thing(
            kind=kind,
            id=name,
            account=self._account,
            region=region,
            tags=_tags(described.get("Tags", ())),
            since=next((described[key] for key in _SINCE if key in described), None),
        )


def _stands(described: Mapping[str, Any]) -> bool:
    return described.get("State") not in {"deleting", "deleted"}


def _tags(tags: Iterable[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((tag["Key"], tag["Value"]) for tag in tags)
