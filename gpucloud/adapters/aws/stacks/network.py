"""The network that machines are plugged into, and from where the caller reaches them."""

from __future__ import annotations

import ipaddress
import os
import shutil
import urllib.request
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

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


def zone_for_nat(stands: str | None, wished: Sequence[str], zones: Sequence[str], without: Set[str]) -> str:
    """Return where the NAT gateway stands, else the first zone of the machines that has one, else any that has."""
    order = [*([stands] if stands else []), *(zone for zone in wished if zone in zones), *sorted(zones)]
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
