"""Clusters on AWS: bucket, base and cluster made by Terraform; nothing of it costs by the hour."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.account import account_of, boundary_of, boundary_of_role, caller_of
from gpucloud.adapters.aws.faults import known
from gpucloud.adapters.aws.nodes.launching import drop_templates
from gpucloud.adapters.aws.nodes.listing import Place, drill_role
from gpucloud.adapters.aws.policy import boundary_arn
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.aws.standing import (
    Network,
    any_cluster,
    base_as_found,
    base_network,
    find_alert,
    find_base,
    find_cluster,
    network_of_cluster,
    own_network,
    usable_zones,
    zone_for_nat,
    zone_of_nat,
)
from gpucloud.adapters.home import bundled
from gpucloud.adapters.terraform.stack import Stack, Story, Variables, common_variables
from gpucloud.adapters.terraform.workfolder import StateHome, in_bucket, in_directory
from gpucloud.domain.errors import CleanupIncomplete, CredentialsError, GpucloudError, ProvisionError
from gpucloud.domain.job.spec import Access, AwsChoices
from gpucloud.domain.node.node import Fault
from gpucloud.domain.offer import EfaLayout
from gpucloud.domain.variables import GPUCLOUD_SSH_CIDR
from gpucloud.ports import ClusterSpec
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.s3 import S3Store

_CIDR = "10.42.0.0/16"
_LIMIT_S = 900.0
_GONE = re.compile(r"Invalid(Vpc|VpcID|Subnet|SubnetID|Group|GroupId|SecurityGroupID)\.NotFound")
_NO_NAT = re.compile(r"NotAvailableInZone")
_NO_SUBNET = re.compile(r"Value \((?P<zone>[a-z0-9-]+)\) for parameter availabilityZone is invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCosts:
    """A region's base that stands: how many resources, and what each of them costs in a month, in USD."""

    region: str
    resources: int
    monthly: tuple[tuple[str, Decimal], ...]

    @property
    def monthly_usd(self) -> Decimal:
        """What the base costs in a month."""
        return sum((usd for _, usd in self.monthly), Decimal(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where what is not the provisioner's own comes from; each is asked only when it is needed.

    `bucket(region)` makes the account's bucket there and returns its name, `image(region)` the machine image,
    `root_device(image, region)` what it calls its root disk, `ssh_cidr()` the addresses that SSH comes from,
    `user_data(store_url=, cluster=, region=)` the first-boot script; `session_tools()` raises ToolMissing where this
    machine has not what reaches others through Session Manager.
    """

    bucket: Callable[[str], str]
    user_data: Callable[..., str]
    image: Callable[[str], str]
    root_device: Callable[[str, str], str]
    ssh_cidr: Callable[[], str]
    session_tools: Callable[[], None]


class AwsProvisioner:
    """The `Provisioner` port on AWS. A group is named `<region>/<cluster>`."""

    def __init__(
        self,
        aws: Aws,
        *,
        home: Path,
        choices: AwsChoices,
        store_url: str,
        sources: Sources,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`home` is gpucloud's own folder; `store_url` the job's store, which holds its cluster's state."""
        self._aws = aws
        self._choices = choices
        self._store_url = store_url
        self._sources = sources
        self._root = home / "terraform"
        self._env = terraform_environment(choices.profile, env)
        self._stores: dict[str, ObjectStore] = {}

    def group(self, name: str, region: str) -> str:
        """Return `<region>/<name>`."""
        return f"{region}/{name}"

    def image(self, region: str) -> str:
        """Return the machine image that a job would be pinned to now."""
        return self._sources.image(region)

    def ensure(self, spec: ClusterSpec, *, story: Story) -> str:
        """Make bucket, base and cluster where they do not stand yet, and return the group: no machine."""
        if self._access(spec) is Access.SESSION_MANAGER:
            self._sources.session_tools()
        network = self._network(spec, story)
        try:
            self._ensure_cluster(spec, network, story)
        except ProvisionError as error:
            if self._choices.subnets or not _GONE.search(error.message):
                raise
            story("a part of the base was removed by someone else: making it anew")
            self._ensure_cluster(spec, self._network(spec, story, believe=False), story)
        return self.group(spec.name, spec.region)

    def destroy(self, group: str, *, story: Story) -> None:
        """Remove the cluster, and list again: CleanupIncomplete names what is still there. The base stays."""
        region, _, name = group.partition("/")
        vpc_id, boundary = network_of_cluster(self._aws, region, name), boundary_of_role(self._aws, f"{name}-{region}")
        fallback = any_cluster(region, name, self._store_url, vpc_id, boundary)
        self._cluster(region, name).destroy(story=story, fallback=fallback)
        drop_templates(self._aws, Place.of(group))
        left = find_cluster(self._aws, region, name, fallback)
        if left:
            raise CleanupIncomplete(
                f"{group} still has {', '.join(sorted(left.values()))}", hint="the same command again removes them"
            )

    def destroy_base(self, region: str, *, story: Story) -> None:
        """Remove the region's base; ProvisionError while a cluster stands in it. The bucket stays: it holds jobs."""
        standing = self.clusters(region)
        if standing:
            raise ProvisionError(
                f"the base in {region} is in use by {', '.join(standing)}",
                hint=f"first `gpucloud down {standing[0].removeprefix('gpucloud-')}`",
            )
        found = find_base(self._aws, region)
        if not found:
            return
        boundary = boundary_of_role(self._aws, drill_role(region))
        self._base(region).destroy(story=story, fallback=base_as_found(region, found, boundary))
        left = find_base(self._aws, region)
        if left:
            raise CleanupIncomplete(
                f"the base in {region} still has {', '.join(sorted(left.values()))}",
                hint="the same command again removes them",
            )

    def base(self, region: str) -> BaseCosts | None:
        """Return what stands of the region's base and what it costs; None when nothing does."""
        found = find_base(self._aws, region)
        if not found:
            return None
        monthly = [("NAT gateway", Decimal("32.85"))] if "aws_nat_gateway.this[0]" in found else []
        monthly += [("public address of the NAT gateway", Decimal("3.65"))] if "aws_eip.nat[0]" in found else []
        return BaseCosts(region=region, resources=len(found), monthly=tuple(monthly))

    def clusters(self, region: str) -> tuple[str, ...]:
        """Return the names of the clusters that stand in the region, by their tags."""
        with self._aws.calling("ec2", f"list the clusters in {region}", region) as ec2:
            mine = [{"Name": "tag-key", "Values": ["gpucloud:cluster"]}]
            groups = ec2.get_paginator("describe_security_groups").paginate(Filters=mine)
            templates = ec2.get_paginator("describe_launch_templates").paginate(Filters=mine)
            tags = [one["Tags"] for page in groups for one in page["SecurityGroups"]]
            tags += [one["Tags"] for page in templates for one in page["LaunchTemplates"]]
        return tuple(sorted({tag["Value"] for some in tags for tag in some if tag["Key"] == "gpucloud:cluster"}))

    def _network(self, spec: ClusterSpec, story: Story, *, believe: bool = True) -> Network:
        choices = self._choices
        if choices.subnets:
            self._sources.bucket(spec.region)
            public = self._access(spec) is Access.PUBLIC
            return own_network(self._aws, spec.region, choices.subnets, public_address=public)
        private = any(layout.several for layout in spec.efa)
        return base_network(self._apply_base(spec, story, private=private, believe=believe), _CIDR, private=private)

    def _apply_base(self, spec: ClusterSpec, story: Story, *, private: bool, believe: bool) -> Mapping[str, Any]:
        """Apply the base without the zones that AWS turns out to refuse, one after the other."""
        unusable: set[str] = set()
        without_nat: set[str] = set()
        while True:
            asked: dict[str, Any] = {}
            before: dict[str, Any] = {}

            def wanted(last: Variables, asked: dict[str, Any] = asked, before: dict[str, Any] = before) -> Variables:
                before.update(last)
                asked.update(self._base_variables(spec, last, private=private, not_in=(unusable, without_nat)))
                return asked

            try:
                made = self._base(spec.region).apply(wanted, story=story, stands=lambda: believe)
            except ProvisionError as error:
                refused = _NO_SUBNET.search(error.message)
                if refused and refused["zone"] not in {*spec.zones, *unusable}:
                    unusable.add(refused["zone"])
                    story(f"{refused['zone']} takes no subnet of this account: going on without that zone")
                elif _NO_NAT.search(error.message) and len(without_nat) + 1 < len(asked["zones"]):
                    without_nat.add(str(asked["nat_zone"]))
                    story(f"{asked['nat_zone']} has no NAT gateways: trying the next zone")
                else:
                    raise
            else:
                if asked["alert"] and asked["alert"] != before.get("alert"):
                    story(_alarm(asked["alert"], spec.region))
                return made

    def _base_variables(
        self, spec: ClusterSpec, last: Variables, *, private: bool, not_in: tuple[set[str], set[str]]
    ) -> Variables:
        """Return the base's variables; what an earlier job needed of it stays until the base goes.

        `not_in` are the zones that take no subnet, and those that have no NAT gateway.
        """
        unusable, without_nat = not_in
        zones = last.get("zones", ())
        if not set(spec.zones) <= set(zones) or not zones or unusable:
            zones = tuple(zone for zone in usable_zones(self._aws, spec.region) if zone not in unusable)
        stands = last.get("nat_zone") if last.get("private") else None
        if stands is None and (private or not last):
            stands = zone_of_nat(self._aws, spec.region)
        private = private or bool(last.get("private")) or stands is not None
        nat_zone = zone_for_nat(stands, spec.zones, zones, without_nat) if private else None
        told = {"email": self._choices.alert_email, "topic": self._choices.alert_topic}
        alert = {**told, "monthly_usd": str(self._choices.alert_usd)} if any(told.values()) else last.get("alert")
        return {
            "region": spec.region,
            "zones": list(zones),
            "cidr": _CIDR,
            "private": private,
            "nat_zone": nat_zone,
            # Who brings a profile of his own may make no roles, as a company's rules have it.
            "drill_role": self._choices.instance_profile is None or bool(last.get("drill_role")),
            "permissions_boundary": last.get("permissions_boundary") or self._boundary,
            "alert": alert,
        }

    @cached_property
    def _boundary(self) -> str | None:
        """The boundary that roles are made under: the job's, else the account's own where it has one."""
        if self._choices.permissions_boundary is not None:
            return self._choices.permissions_boundary
        who = caller_of(self._aws)
        return boundary_of(self._aws, boundary_arn(who.partition, who.account))

    def _ensure_cluster(self, spec: ClusterSpec, network: Network, story: Story) -> None:
        variables = self._cluster_variables(spec, network)
        stack = self._cluster(spec.region, spec.name)
        stack.apply(lambda _: variables, story=story, stands=partial(self._group_stands, spec.region, spec.name))

    def _cluster_variables(self, spec: ClusterSpec, network: Network) -> Variables:
        choices = self._choices
        user_data = self._sources.user_data(store_url=spec.store, cluster=spec.name, region=spec.region)
        image = spec.image or self.image(spec.region)
        return {
            **common_variables(spec, cidr=self._cidr(spec, network)),
            "zones": [zone for zone in spec.zones if zone in network.subnets],
            "image": image,
            "user_data": user_data,
            "efa": [{"interfaces": one.interfaces, "cards": one.cards} for one in sorted({*spec.efa} or {EfaLayout()})],
            "data": list(spec.data),
            "network": network.variable(),
            "machine": {
                "disk_gib": choices.disk_gib,
                "root_device": self._sources.root_device(image, spec.region),
                "kms_key": choices.kms_key,
                "instance_profile": choices.instance_profile,
                "permissions_boundary": self._boundary if choices.instance_profile is None else None,
                "capacity_reservation": choices.capacity_reservation,
                "capacity_block": choices.capacity_block,
            },
            "ssh": self._access(spec).value,
        }

    def _access(self, spec: ClusterSpec) -> Access:
        """Machines without a public address are not reached as the others are; one of them decides for all."""
        desired = self._choices.access
        return next((one.access(desired) for one in spec.efa if one.several), desired)

    def _cidr(self, spec: ClusterSpec, network: Network) -> str:
        if self._access(spec) is Access.PUBLIC or self._env.get(GPUCLOUD_SSH_CIDR):
            return self._sources.ssh_cidr()
        return network.cidr

    def _group_stands(self, region: str, name: str) -> bool:
        with self._aws.calling("autoscaling", f"look for {name}", region) as autoscaling:
            listed = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
        return bool(listed)

    def _base(self, region: str) -> Stack:
        url = f"s3://{self._sources.bucket(region)}"
        return self._stack(f"base-{region}", "base", url, partial(self._stands_of_base, region))

    def _cluster(self, region: str, name: str) -> Stack:
        # A job may move to another region: each has a state of its own.
        return self._stack(
            f"{name}-{region}", "cluster", self._store_url, lambda v: find_cluster(self._aws, region, name, v)
        )

    def _stack(self, name: str, module: str, url: str, adopt: Callable[[Variables], Mapping[str, str]]) -> Stack:
        return Stack(
            name=name,
            module=bundled("terraform", "aws", module),
            root=self._root,
            env=self._env,
            home=state_home(self._aws, self._store(url), name),
            least=(1, 10),
            limit_s=_LIMIT_S,
            explain=explain,
            adopt=adopt,
        )

    def _store(self, url: str) -> ObjectStore:
        if url not in self._stores:
            self._stores[url] = open_store(url, profile=self._choices.profile)
        return self._stores[url]

    def _stands_of_base(self, region: str, variables: Variables) -> Mapping[str, str]:
        found = find_base(self._aws, region)
        if not variables.get("private"):
            found = {to: found[to] for to in found if "private" not in to and "nat" not in to}
        if not variables.get("drill_role", True):
            found = {to: found[to] for to in found if "drill" not in to}
        if variables.get("alert"):
            found |= find_alert(self._aws, region, account_of(self._aws))
        return found


def _alarm(alert: Mapping[str, Any], region: str) -> str:
    """Return the line for an alarm that was made, with what it does not ring without."""
    whom = " and ".join(str(one) for one in (alert["email"], alert["topic"]) if one)
    return (
        f"AWS Budgets warns {whom} over {alert['monthly_usd']} USD a month for all of gpucloud in {region}, once the"
        " account's owner has activated the cost allocation tag gpucloud:managed (Billing console)"
    )


# Where the Terraform state of a stack on AWS is kept, and what runs Terraform sees of the caller's environment.


_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def terraform_environment(profile: str | None, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for Terraform: with a named profile that profile counts, as it does in boto3."""
    kept = dict(os.environ if env is None else env)
    if profile is None:
        return kept
    return {name: value for name, value in kept.items() if name not in _KEYS} | {"AWS_PROFILE": profile}


def state_home(aws: Aws, store: ObjectStore, name: str) -> StateHome:
    """Return the home of a stack's state in the store."""
    if isinstance(store, DirectoryStore):
        return in_directory(store, name)
    if not isinstance(store, S3Store):
        raise ProvisionError(f"Terraform's state cannot be kept in {store.url}", hint="store: s3://bucket/prefix")
    bucket = store.url.removeprefix("s3://").partition("/")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    home = in_bucket(store, name, region=bucket_region(aws, bucket), endpoint=endpoint)
    earlier = partial(_earlier, aws, bucket, str(home.backend["s3"]["key"]))
    return in_bucket(store, name, region=home.backend["s3"]["region"], endpoint=endpoint, earlier=earlier)


def bucket_region(aws: Aws, bucket: str) -> str:
    """Return the region that the bucket lies in."""
    client = aws.client("s3")
    try:
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except botocore.exceptions.ClientError as error:
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})  # a refusal names the region too
    return str(headers.get("x-amz-bucket-region") or aws.region)


def explain(code: str, words: str) -> GpucloudError | None:
    """Return what the code means, in one line with its next step; None for a code that is not in the table."""
    meaning = known(code)
    if meaning.fault is Fault.UNKNOWN:
        return None
    kind = CredentialsError if meaning.fault is Fault.CREDENTIALS else ProvisionError
    return kind(f"{meaning.line} ({code}: {words})", hint=meaning.step)


def _earlier(aws: Aws, bucket: str, key: str) -> Iterator[bytes]:
    """Give the object's versions, newest first; none where the bucket keeps none."""
    with aws.calling("s3", f"list the versions of {key}") as s3:
        for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=key):
            for version in page.get("Versions", ()):
                if version["Key"] == key and version["VersionId"] != "null":
                    reply = s3.get_object(Bucket=bucket, Key=key, VersionId=version["VersionId"])
                    yield reply["Body"].read()
