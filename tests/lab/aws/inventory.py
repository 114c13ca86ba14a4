"""What is there: one line for each thing that gpucloud could have made, in every region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moto.autoscaling.models import autoscaling_backends
from moto.budgets.models import budgets_backends
from moto.cloudwatch.models import cloudwatch_backends
from moto.ec2 import ec2_backends
from moto.fis.models import fis_backends
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends

from tests.lab.aws.repairs import placement_groups
from tests.lab.aws.world import ACCOUNT


def inventory() -> tuple[str, ...]:
    """Return the lines, sorted: kind, region, id, name."""
    return tuple(sorted(" ".join(part for part in line if part) for line in _lines()))


def _lines() -> Iterator[tuple[str, ...]]:
    for region, ec2 in list(ec2_backends[ACCOUNT].items()):
        yield from _ec2(region, ec2)
        yield from _network(region, ec2)
    for region, scaling in list(autoscaling_backends[ACCOUNT].items()):
        for group in scaling.autoscaling_groups.values():
            yield "auto-scaling-group", region, group.name
        for action in scaling.scheduled_actions.values():
            yield "schedule", region, action.auto_scaling_group_name, action.scheduled_action_name
    for region, fis in list(fis_backends[ACCOUNT].items()):
        yield from (("experiment-template", region, id_) for id_ in fis.experiment_templates)
    for region, watch in list(cloudwatch_backends[ACCOUNT].items()):
        yield from (("alarm", region, name) for name in watch.alarms)
    yield from _global()


def _ec2(region: str, ec2: Any) -> Iterator[tuple[str, ...]]:
    for instance in ec2.all_instances():
        if instance.state != "terminated":
            yield "instance", region, instance.id, instance.state, _tag(instance, "gpucloud:cluster")
    for volume in ec2.volumes.values():
        yield "volume", region, volume.id, _tag(volume, "gpucloud:cluster")
    for request in ec2.spot_instance_requests.values():
        if request.state in {"open", "active"}:
            yield "spot-request", region, request.id
    for template in ec2.launch_templates.values():
        yield "launch-template", region, template.id, template.name
    for name in ec2.key_pairs:
        yield "key-pair", region, name
    for name in placement_groups(ec2):
        yield "placement-group", region, name


def _network(region: str, ec2: Any) -> Iterator[tuple[str, ...]]:
    own = {vpc.id for vpc in ec2.vpcs.values() if str(vpc.is_default).lower() != "true"}
    yield from (("vpc", region, id_) for id_ in own)
    for subnets in ec2.subnets.values():
        yield from (("subnet", region, one.id, one.availability_zone) for one in subnets.values() if one.vpc_id in own)
    for gateway in ec2.internet_gateways.values():
        if gateway.vpc is None or gateway.vpc.id in own:
            yield "internet-gateway", region, gateway.id
    for table in ec2.route_tables.values():
        if table.vpc_id in own and not table.main_association_id:
            yield "route-table", region, table.id
    for endpoint in ec2.vpc_end_points.values():
        if endpoint.state != "deleted":
            yield "vpc-endpoint", region, endpoint.id
    for nat in ec2.nat_gateways.values():
        if nat.state != "deleted":
            yield "nat-gateway", region, nat.id
    for groups in ec2.groups.values():
        yield from (("security-group", region, one.id, one.name) for one in groups.values() if one.name != "default")
    yield from (("network-interface", region, id_) for id_ in ec2.enis)
    yield from (("address", region, one.allocation_id or one.public_ip) for one in ec2.addresses)


def _global() -> Iterator[tuple[str, ...]]:
    iam = iam_backends[ACCOUNT]["aws"]
    yield from (("role", role.name) for role in iam.roles.values() if not role.path.startswith("/aws-service-role/"))
    yield from (("instance-profile", profile.name) for profile in iam.instance_profiles.values())
    yield from (("policy", policy.name) for policy in iam.managed_policies.values() if ":aws:policy" not in policy.arn)
    yield from (("bucket", name) for name in s3_backends[ACCOUNT]["aws"].buckets)
    for budgets in budgets_backends[ACCOUNT]["aws"].budgets.values():
        yield from (("budget", name) for name in budgets)


def _tag(thing: Any, key: str) -> str:
    return next((str(tag["value"]) for tag in thing.get_tags() if tag["key"] == key), "")
