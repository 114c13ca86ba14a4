"""What stands in AWS already: the network that machines are plugged into, and parts of a stack whose state was lost."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import urllib.request
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained
from gpucloud.adapters.aws.nodes.listing import drill_role
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError, ToolMissing, UsageError
from gpucloud.domain.variables import GPUCLOUD_SSH_CIDR

_TAG_LENGTH = 256  # the longest value of a tag (Auto Scaling user guide, tag restrictions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One subnet a zone of one VPC; `cidr` is the VPC's own range."""

    vpc_id: str
    cidr: str
    subnets: Mapping[str, str]
    security_group_ids: tuple[str, ...] = ()
    public_address: bool = True

    def variable(self) -> dict[str, Any]:
        """Return the cluster module's `network`."""
        return {
            "vpc_id": self.vpc_id,
            "subnets": dict(self.subnets),
            "security_group_ids": list(self.security_group_ids),
            "public_address": self.public_address,
        }


def own_network(aws: Aws, region: str, subnets: tuple[str, ...], *, public_address: bool) -> Network:
    """Return the network of the user's own subnets.

    UsageError when they lie in two VPCs, two share a zone, or they are too many for the cluster module's tag of them.
    """
    with aws.calling("ec2", f"read the subnets {', '.join(subnets)}", region) as ec2:
        listed = ec2.describe_subnets(SubnetIds=list(subnets))["Subnets"]
        vpcs = sorted({subnet["VpcId"] for subnet in listed})
        if len(vpcs) != 1:
            raise UsageError(f"aws: subnets: they lie in {' and '.join(vpcs)}", hint="name subnets of one VPC")
        cidr = ec2.describe_vpcs(VpcIds=vpcs)["Vpcs"][0]["CidrBlock"]
    by_zone = {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in listed}
    if len(by_zone) != len(listed):
        raise UsageError("aws: subnets: two of them lie in the same zone", hint="name one subnet a zone")
    if len(",".join(f"{zone}={subnet}" for zone, subnet in by_zone.items())) > _TAG_LENGTH:
        raise UsageError(
            f"aws: subnets: {len(by_zone)} are more than a group's tag can name, of which machines are told by zone",
            hint=f"name {_TAG_LENGTH // max(len(f'{zone}={subnet},') for zone, subnet in by_zone.items())} at the most",
        )
    return Network(vpc_id=vpcs[0], cidr=cidr, subnets=by_zone, public_address=public_address)


def base_network(outputs: Mapping[str, Any], cidr: str, *, private: bool) -> Network:
    """Return the network of the region's base, from its stack's outputs."""
    subnets = outputs.get("private_subnets" if private else "subnets")
    if not subnets:
        raise ProvisionError(
            "the base stack has no subnets", hint="`gpucloud down --base`, then the same command makes it anew"
        )
    return Network(
        vpc_id=outputs["vpc_id"],
        cidr=cidr,
        subnets=subnets,
        security_group_ids=(outputs["security_group_id"],),
        public_address=not private,
    )


def network_of_cluster(aws: Aws, region: str, name: str) -> str:
    """Return the id of the VPC that the cluster's security group lies in; an id that no VPC has when it has none."""
    with aws.calling("ec2", f"look for {name}", region) as ec2:
        mine = [{"Name": "tag:gpucloud:cluster", "Values": [name]}]
        groups = ec2.describe_security_groups(Filters=mine)["SecurityGroups"]
    return str(groups[0]["VpcId"]) if groups else "vpc-00000000000000000"


def zone_of_nat(aws: Aws, region: str) -> str | None:
    """Return the zone in which the base's NAT gateway stands; None where there is none."""
    mine = [{"Name": "tag:gpucloud:base", "Values": [region]}]
    with aws.calling("ec2", f"look for the NAT gateway of {region}", region) as ec2:
        gateways = ec2.describe_nat_gateways(Filters=mine)["NatGateways"]
        ids = [str(one["SubnetId"]) for one in gateways if one["State"] in {"pending", "available"}]
        zones = ec2.describe_subnets(SubnetIds=ids[:1])["Subnets"] if ids else ()
    return next((str(subnet["AvailabilityZone"]) for subnet in zones), None)


def zone_for_nat(stands: str | None, desired: Sequence[str], zones: Sequence[str], without: Set[str]) -> str:
    """Return where the NAT gateway stands, else the first zone of the machines that has one, else any that has."""
    order = [*([stands] if stands else []), *(zone for zone in desired if zone in zones), *sorted(zones)]
    return next(zone for zone in order if zone not in without)


def usable_zones(aws: Aws, region: str) -> tuple[str, ...]:
    """Return the region's availability zones that the account may use."""
    with aws.calling("ec2", f"list the zones of {region}", region) as ec2:
        zones = ec2.describe_availability_zones(Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}])
    usable = {"opt-in-not-required", "opted-in"}
    return tuple(
        sorted(
            zone["ZoneName"]
            for zone in zones["AvailabilityZones"]
            if zone["State"] == "available" and zone.get("OptInStatus", "opted-in") in usable
        )
    )


# How the caller reaches machines by SSH: from which addresses it may come, and with what through Session Manager.
#
# The addresses are the caller's own, unless GPUCLOUD_SSH_CIDR says otherwise.


_ASKED = "https://checkip.amazonaws.com"
_TIMEOUT_S = 5.0
_HINT = "set GPUCLOUD_SSH_CIDR to the addresses that SSH comes from, such as 203.0.113.7/32"


def ssh_cidr(env: Mapping[str, str] | None = None, *, url: str = _ASKED) -> str:
    """Return GPUCLOUD_SSH_CIDR, else this machine's public IPv4 address with /32.

    UsageError when the variable is no range, ProvisionError when nobody can be asked.
    """
    named = (os.environ if env is None else env).get(GPUCLOUD_SSH_CIDR)
    if named:
        return _checked(named)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  a constant
            said = reply.read(100).decode("ascii", errors="replace").strip()
        return f"{ipaddress.IPv4Address(said)}/32"
    except (OSError, ValueError) as error:
        raise ProvisionError(f"cannot learn this machine's public address from {url}: {error}", hint=_HINT) from error


class OurAddress:
    """From where SSH comes, as it is let in, and whether that is another by now, as in another Wi-Fi."""

    def __init__(self, ask: Callable[[], str] = ssh_cidr) -> None:
        self._ask = ask
        self._let_in: str | None = None

    def ask(self) -> str:
        """Return what is to be let in. Raises as `ssh_cidr` does."""
        self._let_in = self._ask()
        return self._let_in

    def moved_to(self) -> str | None:
        """Return what is to be let in now, if that is another than before; None also where nobody can be asked."""
        if self._let_in is None:
            return None  # SSH comes from no address of ours
        with contextlib.suppress(ProvisionError):
            now = self._ask()
            return now if now != self._let_in else None
        return None


def require_session_tools(find: Callable[[str], str | None] = shutil.which) -> None:
    """Raise ToolMissing where the two programs are not here that lead to machines through Session Manager."""
    missing = [name for name in ("aws", "session-manager-plugin") if find(name) is None]
    if missing:
        raise ToolMissing(
            f"machines without a public address are reached through Session Manager, and {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not on PATH",
            hint="install the AWS CLI and its Session Manager plugin (AWS Systems Manager user guide), or take machines"
            " with one EFA interface at the most",
        )


def _checked(cidr: str) -> str:
    try:
        network = ipaddress.IPv4Network(cidr if "/" in cidr else f"{cidr}/32")
    except ValueError as error:
        raise UsageError(f"GPUCLOUD_SSH_CIDR: {error}", hint=_HINT) from error
    if network.prefixlen < 8:
        raise UsageError(f"GPUCLOUD_SSH_CIDR: {network} is nearly the whole internet", hint=_HINT)
    return str(network)


# What stands of a stack in AWS, found by tag or name: Terraform address → import id. For a state that was lost.
#
# Each address is one of `terraform/aws/{base,cluster}`. Only what bears gpucloud's own tags is taken.


Found = dict[str, str]
_ANYWHERE = "0.0.0.0/0"


def find_base(aws: Aws, region: str) -> Found:
    """Return what stands of the region's base."""
    name = f"gpucloud-{region}"
    mine = [{"Name": "tag:gpucloud:base", "Values": [region]}]
    with aws.calling("ec2", f"list what stands in {region}", region) as ec2:
        found = _network(ec2, mine, name) | _ways_out(ec2, mine, name) | _base_firewall(ec2, mine)
    return found | _role(aws, drill_role(region), "aws_iam_role.drill", {"drill": "aws_iam_role_policy.drill"})


def has_drill_role(aws: Aws, region: str) -> bool:
    """Whether the role stands there by which AWS takes a machine for a drill, whichever job had it made."""
    return _if_there(aws, "iam", "get_role", RoleName=drill_role(region)) is not None


def find_alert(aws: Aws, region: str, account: str) -> Found:
    """Return the region's budget alert, if there is one."""
    name = f"gpucloud-{region}"
    reply = _if_there(aws, "budgets", "describe_budget", region=region, AccountId=account, BudgetName=name)
    return {"aws_budgets_budget.this[0]": f"{account}:{name}"} if reply else {}


def find_cluster(aws: Aws, region: str, name: str, variables: Mapping[str, Any]) -> Found:
    """Return what stands of a cluster; `variables` tell which of its parts the module makes."""
    mine = [{"Name": "tag:gpucloud:cluster", "Values": [name]}]
    with aws.calling("ec2", f"list what stands of {name}", region) as ec2:
        found = _machine_parts(ec2, mine, name) | _cluster_firewall(ec2, mine, variables)
    with aws.calling("autoscaling", f"list what stands of {name}", region) as autoscaling:
        if autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]:
            found["aws_autoscaling_group.this"] = name
    own = f"{name}-{region}"
    found |= _role(aws, own, "aws_iam_role.node", {"job": "aws_iam_role_policy.node"})
    profile = _if_there(aws, "iam", "get_instance_profile", InstanceProfileName=own)
    if profile and _is_ours(profile["InstanceProfile"].get("Tags", ())):
        found["aws_iam_instance_profile.node[0]"] = own
    return found


def _network(ec2: Any, mine: list[dict[str, Any]], name: str) -> Found:
    found: Found = {}
    for vpc in sorted(ec2.describe_vpcs(Filters=mine)["Vpcs"], key=lambda one: str(one["VpcId"]), reverse=True):
        found["aws_vpc.this"] = vpc["VpcId"]
    for gateway in ec2.describe_internet_gateways(Filters=mine)["InternetGateways"]:
        found["aws_internet_gateway.this"] = gateway["InternetGatewayId"]
    for subnet in ec2.describe_subnets(Filters=mine)["Subnets"]:
        kind = "public" if _name(subnet).startswith(f"{name}-public") else "private"
        found[f'aws_subnet.{kind}["{subnet["AvailabilityZone"]}"]'] = subnet["SubnetId"]
    for endpoint in ec2.describe_vpc_endpoints(Filters=mine)["VpcEndpoints"]:
        if endpoint["State"] not in {"deleting", "deleted"}:
            found["aws_vpc_endpoint.s3"] = endpoint["VpcEndpointId"]
    return found


def _ways_out(ec2: Any, mine: list[dict[str, Any]], name: str) -> Found:
    found: Found = {}
    zones = {one["SubnetId"]: one["AvailabilityZone"] for one in ec2.describe_subnets(Filters=mine)["Subnets"]}
    for table in ec2.describe_route_tables(Filters=mine)["RouteTables"]:
        table_id = table["RouteTableId"]
        kind, index = ("public", "") if _name(table) == f"{name}-public" else ("private", "[0]")
        found[f"aws_route_table.{kind}{index}"] = table_id
        if any(route.get("DestinationCidrBlock") == _ANYWHERE for route in table["Routes"]):
            found[f"aws_route.{kind}{index}"] = f"{table_id}_{_ANYWHERE}"
        for subnet in (one.get("SubnetId") for one in table["Associations"]):
            if subnet in zones:
                found[f'aws_route_table_association.{kind}["{zones[subnet]}"]'] = f"{subnet}/{table_id}"
    for gateway in ec2.describe_nat_gateways(Filters=mine)["NatGateways"]:
        if gateway["State"] in {"pending", "available"}:
            found["aws_nat_gateway.this[0]"] = gateway["NatGatewayId"]
    for address in ec2.describe_addresses(Filters=mine)["Addresses"]:
        found["aws_eip.nat[0]"] = address["AllocationId"]
    return found


def _base_firewall(ec2: Any, mine: list[dict[str, Any]]) -> Found:
    found: Found = {}
    for group in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]:
        if group["GroupName"] == "default":
            continue  # it comes with the network, and Terraform takes it as it is
        found["aws_security_group.nodes"] = group["GroupId"]
        for rule in _rules(ec2, group["GroupId"]):
            if rule["IsEgress"] and rule.get("CidrIpv4") == _ANYWHERE:
                found["aws_vpc_security_group_egress_rule.internet"] = rule["SecurityGroupRuleId"]
    return found


def _cluster_firewall(ec2: Any, mine: list[dict[str, Any]], variables: Mapping[str, Any]) -> Found:
    found: Found = {}
    own_way_out = not variables.get("network", {}).get("security_group_ids")
    for group in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]:
        found["aws_security_group.this"] = group["GroupId"]
        for rule in _rules(ec2, group["GroupId"]):
            side = "egress" if rule["IsEgress"] else "ingress"
            if rule.get("ReferencedGroupInfo", {}).get("GroupId") == group["GroupId"]:
                what = "peers"
            elif side == "ingress" and variables.get("ssh") != "session_manager":
                what = "ssh[0]"
            elif side == "egress" and own_way_out:
                what = "internet[0]"
            else:
                continue
            found[f"aws_vpc_security_group_{side}_rule.{what}"] = rule["SecurityGroupRuleId"]
    return found


def _machine_parts(ec2: Any, mine: list[dict[str, Any]], name: str) -> Found:
    found: Found = {}
    for key in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]:
        found["aws_key_pair.this"] = key["KeyName"]
    for group in ec2.describe_placement_groups(Filters=mine)["PlacementGroups"]:
        if group["State"] not in {"deleting", "deleted"}:
            found["aws_placement_group.this[0]"] = group["GroupName"]
    for template in ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"]:
        count = template["LaunchTemplateName"].removeprefix(f"{name}-efa")
        if "." not in count:  # those for one type and market are the node group's, in no state
            found[f'aws_launch_template.this["{count}"]'] = template["LaunchTemplateId"]
    return found


def _role(aws: Aws, name: str, address: str, policies: Mapping[str, str]) -> Found:
    """Return the role with its inline policies, by name; one that is not gpucloud's is left alone."""
    role = _if_there(aws, "iam", "get_role", RoleName=name)
    if not role or not _is_ours(role["Role"].get("Tags", ())):
        return {}
    found = {f"{address}[0]": name}
    with aws.calling("iam", f"list the policies of {name}") as iam:
        there = iam.list_role_policies(RoleName=name)["PolicyNames"]
    return found | {f"{policies[policy]}[0]": f"{name}:{policy}" for policy in there if policy in policies}


def _rules(ec2: Any, group: str) -> list[dict[str, Any]]:
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])
    return list(rules["SecurityGroupRules"])


def _if_there(aws: Aws, service: str, call: str, region: str | None = None, **parameters: Any) -> dict[str, Any] | None:
    """Return the call's answer; None when what it asks for does not exist."""
    client = aws.client(service, region)
    with explained(f"{call.replace('_', ' ')} {next(reversed(parameters.values()))}"):
        try:
            return dict(getattr(client, call)(**parameters))
        except botocore.exceptions.ClientError as error:
            if code_of(error) in {"NoSuchEntity", "NotFoundException"}:
                return None
            raise


def _is_ours(tags: Any) -> bool:
    return any(tag["Key"] == "gpucloud:managed" for tag in tags)


def _name(resource: Mapping[str, Any]) -> str:
    return next((str(tag["Value"]) for tag in resource.get("Tags", ()) if tag["Key"] == "Name"), "")


# Variables for a stack of which no record is left: it is only taken into a state in order to be removed.


# A launch template is taken in under its layout's key, so every layout that may have been made stands here.
_ANY_LAYOUT = [
    {"interfaces": 0, "cards": 1},
    *({"interfaces": n, "cards": n + plain} for n in (1, 2, 4, 8, 16, 32, 64) for plain in (0, 1)),
]
_ANY_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def base_as_found(region: str, found: Mapping[str, str], boundary: str | None) -> dict[str, Any]:
    """Return variables that fit what was found of a region's base, its role under that boundary."""
    zones = sorted({to.split('"')[1] for to in found if to.startswith("aws_subnet.")})
    private = any("nat" in to or "private" in to for to in found)
    return {
        "region": region,
        "zones": zones or [f"{region}a"],
        "private": private,
        "drill_role": True,
        "permissions_boundary": boundary,
        "alert": None,
    }


def any_cluster(region: str, name: str, store: str, vpc_id: str, boundary: str | None) -> dict[str, Any]:
    """Return variables that any cluster of this name can be removed with, its role under that boundary."""
    return {
        "name": name,
        "region": region,
        "zones": [f"{region}a"],
        "node_type": "g4dn.xlarge",
        "market": "spot",
        "tags": {},
        "access": {"public_key": _ANY_KEY, "cidr": "127.0.0.1/32"},
        "store": store,
        "machine": {"permissions_boundary": boundary},
        "image": "ami-00000000000000000",
        "user_data": "",
        "efa": _ANY_LAYOUT,
        "network": {"vpc_id": vpc_id, "subnets": {f"{region}a": "subnet-0"}, "public_address": False},
    }
