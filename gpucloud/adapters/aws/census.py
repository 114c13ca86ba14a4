"""Everything that bears a cluster's tag in an account, and AWS's own figures for what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.money.costs import Billed, BilledLine
from gpucloud.domain.supervision.strays import CLUSTER, Thing
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
# Roles have no region and are listed without their tags: a cluster's are known by name, `<cluster>-<region>`.
_OF_IAM = (
    ("role", "list_roles", "Roles", "RoleName", "get_role", "Role"),
    ("instance-profile", "list_instance_profiles", "InstanceProfiles", "InstanceProfileName", "get_instance_profile",
     "InstanceProfile"),
)  # fmt: skip
_NAMED = "gpucloud-"
_SINCE = ("CreateTime", "CreatedTime", "LaunchTime", "CreateDate")


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

    @property
    def regions(self) -> tuple[str, ...]:
        """Those that were named, or that jobs known here have to do with."""
        return self._regions

    def things(self) -> tuple[Thing, ...]:
        """Return what bears a cluster's tag."""
        named = [(how, name) for how in _OF_IAM for name in self._names(how[1], how[2], how[3])]
        found = [thing for region in self._regions for thing in self._in_region(region)]
        for region in self._regions:
            for how, name in named:
                if name.endswith(f"-{region}"):
                    found += self._identity(region, name, how)
        return tuple(found)

    def of_cluster(self, cluster: str) -> tuple[Thing, ...]:
        """Return what bears this cluster's tag; asks for no list of everybody's roles."""
        found = [t for region in self._regions for t in self._in_region(region) if t.cluster == cluster]
        for region in self._regions:
            for how in _OF_IAM:
                found += self._identity(region, f"{cluster}-{region}", how)
        return tuple(thing for thing in found if thing.cluster == cluster)

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """End the machines, let Terraform remove what it makes, and delete what no machine took with it.

        Network interfaces go before the firewall that they are in. What hangs on a machine that still ends goes with
        it; what hangs on one of somebody else's is left, and listed again.
        """
        group = self._provisioner.group(cluster, region)
        self._group.purge(group)
        self._delete_free("network-interface", region, things)
        self._provisioner.destroy(group, story=story)
        self._delete_free("volume", region, things)

    def _in_region(self, region: str) -> Iterator[Thing]:
        yield from self._instances(region)
        yield from self._of_ec2(region)
        yield from self._groups(region)

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

    def _names(self, call: str, where: str, name: str) -> tuple[str, ...]:
        with self._aws.calling("iam", f"{call.replace('_', ' ')}") as iam:
            pages = iam.get_paginator(call).paginate()
            return tuple(one[name] for page in pages for one in page[where] if one[name].startswith(_NAMED))

    def _identity(self, region: str, name: str, how: tuple[str, ...]) -> Iterator[Thing]:
        kind, _, _, parameter, call, where = how
        answer = self._if_there(call, **{parameter: name})
        if answer is not None:
            thing = self._thing(kind, region, name, answer[where])
            if thing.cluster:  # the base's roles have no cluster
                yield thing

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

    def _delete_free(self, kind: str, region: str, things: tuple[Thing, ...]) -> None:
        """Delete those of the things that are of this kind and hang on no machine."""
        ids = [thing.id for thing in things if thing.kind == kind]
        if not ids:
            return
        _, look, where, name = next(how for how in _OF_EC2 if how[0] == kind)
        free = [{"Name": f"{kind}-id", "Values": ids}, {"Name": "status", "Values": ["available"]}]
        with self._aws.calling("ec2", f"delete {', '.join(ids)}", region) as ec2:
            for one in getattr(ec2, look)(Filters=free)[where]:
                try:
                    getattr(ec2, f"delete_{kind.replace('-', '_')}")(**{name: one[name]})
                except botocore.exceptions.ClientError as error:
                    if not str(code_of(error)).endswith(".NotFound"):
                        raise

    def _thing(self, kind: str, region: str, name: str, described: Mapping[str, Any]) -> Thing:
        return Thing(
            kind=kind,
            id=name,
            account=self._account,
            region=region,
            tags=_tags(described.get("Tags") or described.get("TagSet") or ()),  # a network interface's: TagSet
            since=next((described[key] for key in _SINCE if key in described), None),
        )


def _stands(described: Mapping[str, Any]) -> bool:
    return described.get("State") not in {"deleting", "deleted"}


def _tags(tags: Iterable[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((tag["Key"], tag["Value"]) for tag in tags)


# AWS's own figures for what a job has cost: Cost Explorer, asked by the tag that everything of the job bears.


TAG = "gpucloud:job"
# Served from one region of each partition.
_REGIONS = {"aws": "us-east-1", "aws-cn": "cn-northwest-1"}
_MONTHS_KEPT = timedelta(days=365)


class CostExplorer:
    """Implements `BillingData`. AWS charges 0.01 USD for a request, and for each further page of its answer."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def of_job(self, job: str, first: datetime, now: datetime) -> Billed:
        """Return the unblended cost by day and usage type, from the first's day to the end of today (UTC).

        Empty where the tag is not active as a cost allocation tag, or the data has not come yet.
        """
        begin, end = max(first, now - _MONTHS_KEPT).date(), now.date() + timedelta(days=1)
        asked: dict[str, Any] = {
            "TimePeriod": {"Start": begin.isoformat(), "End": end.isoformat()},
            "Granularity": "DAILY",
            "Metrics": ["UnblendedCost"],
            "Filter": {"Tags": {"Key": TAG, "Values": [job], "MatchOptions": ["EQUALS"]}},
            "GroupBy": [{"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
        }
        lines: list[BilledLine] = []
        requests, token = 0, ""
        region = _REGIONS.get(self._aws.partition, "us-east-1")
        with self._aws.calling("ce", "read AWS's bill from Cost Explorer", region) as explorer:
            while not requests or token:
                page = explorer.get_cost_and_usage(**asked, **({"NextPageToken": token} if token else {}))
                lines += _lines(page)
                requests, token = requests + 1, page.get("NextPageToken", "")
        return Billed(asked_at=now, first=begin.isoformat(), lines=tuple(lines), requests=requests)


def _lines(page: dict[str, Any]) -> list[BilledLine]:
    return [
        BilledLine(day=day["TimePeriod"]["Start"], usage=group["Keys"][0], usd=_usd(group))
        for day in page["ResultsByTime"]
        for group in day["Groups"]
    ]


def _usd(group: dict[str, Any]) -> Decimal:
    return Decimal(group["Metrics"]["UnblendedCost"]["Amount"])
