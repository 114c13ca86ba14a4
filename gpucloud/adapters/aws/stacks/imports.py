"""What stands of a stack in AWS, found by tag or name: Terraform address → import id. For a state that was lost.

Each address is one of `terraform/aws/{base,cluster}`. Only what bears gpucloud's own tags is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of, explained
from gpucloud.adapters.aws.nodes.place import drill_role
from gpucloud.adapters.aws.session import Aws

Found = dict[str, str]
_ANYWHERE = "0.0.0.0/0"


def find_base(aws: Aws, region: str) -> Found:
    """Return what stands of the region's base."""
    name = f"gpucloud-{region}"
    mine = [{"Name": "tag:gpucloud:base", "Values": [region]}]
    with aws.calling("ec2", f"list what stands in {region}", region) as ec2:
        found = _network(ec2, mine, name) | _ways_out(ec2, mine, name) | _base_firewall(ec2, mine)
    return found | _role(aws, drill_role(region), "aws_iam_role.drill", {"drill": "aws_iam_role_policy.drill"})


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
