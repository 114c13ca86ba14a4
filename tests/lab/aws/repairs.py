"""What moto 5.2 leaves out or gets wrong, put right for the time of a lab; each repair says why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import moto.ec2.responses.launch_templates as template_responses
from moto.budgets.responses import BudgetsResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.nat_gateways import NatGatewayBackend
from moto.ec2.models.security_groups import SecurityGroupBackend, SecurityGroupRule
from moto.ec2.responses import EC2Response
from moto.iam.aws_managed_policies import aws_managed_policies_data
from moto.iam.models import AWSManagedPolicy, IAMBackend


class Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a class or module until undo."""
        self._old.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, maker: Callable[[Any], Any]) -> None:
        """Replace a method by what `maker` makes of the present one."""
        self.set(owner, name, maker(getattr(owner, name)))

    def undo(self) -> None:
        """Put everything back."""
        while self._old:
            owner, name, value = self._old.pop()
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def install(patches: Patches) -> None:
    """Put the repairs in place."""
    _placement_groups(patches)
    _budgets(patches)
    _templates(patches)
    _rules(patches)
    _nat(patches)
    _managed_policies(patches)


# Placement groups: NotImplementedError in moto, an HTTP 500 that Terraform repeats for minutes.
class _UnknownPlacementGroup(EC2ClientError):
    def __init__(self, name: str) -> None:
        super().__init__("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


class _TakenPlacementGroup(EC2ClientError):
    def __init__(self, name: str) -> None:
        super().__init__("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")


def placement_groups(backend: EC2Backend) -> dict[str, dict[str, Any]]:
    """Return the placement groups of a region by name; they go with the backend's state."""
    if not hasattr(backend, "lab_placement_groups"):
        backend.lab_placement_groups = {}  # type: ignore[attr-defined]
    return backend.lab_placement_groups  # type: ignore[attr-defined,no-any-return]


def _placement_groups(patches: Patches) -> None:
    def create_placement_group(self: Any) -> ActionResult:
        name = self._get_param("GroupName")
        self.error_on_dryrun()
        if name in placement_groups(self.ec2_backend):
            raise _TakenPlacementGroup(name)
        tags = self._parse_tag_specification().get("placement-group", {})
        group = {
            "GroupName": name,
            "GroupId": "pg-" + hashlib.sha256(name.encode()).hexdigest()[:17],
            "State": "available",
            "Strategy": self._get_param("Strategy") or "cluster",
            "GroupArn": f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}",
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        }
        placement_groups(self.ec2_backend)[name] = group
        return ActionResult({"PlacementGroup": group})

    def describe_placement_groups(self: Any) -> ActionResult:
        groups = placement_groups(self.ec2_backend)
        names, ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
        for name in names:
            if name not in groups:
                raise _UnknownPlacementGroup(name)
        filters = self._filters_from_querystring()
        found = [
            group
            for name, group in groups.items()
            if (not names or name in names) and (not ids or group["GroupId"] in ids) and _matches(group, filters)
        ]
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self: Any) -> EmptyResult:
        name = self._get_param("GroupName")
        if placement_groups(self.ec2_backend).pop(name, None) is None:
            raise _UnknownPlacementGroup(name)
        return EmptyResult()

    for method in (create_placement_group, describe_placement_groups, delete_placement_group):
        patches.set(EC2Response, method.__name__, method)


def _matches(group: dict[str, Any], filters: dict[str, list[str]]) -> bool:
    tags = {tag["Key"]: tag["Value"] for tag in group["Tags"]}
    for name, values in filters.items():
        own = tags.get(name[4:]) if name.startswith("tag:") else group.get(_camel(name))
        if name == "tag-key":
            if not set(values) & set(tags):
                return False
        elif own not in values:
            return False
    return True


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


# Budgets: subscribers and tags cannot be read back in moto, so a budget made by Terraform is tainted for ever.
def _budgets(patches: Patches) -> None:
    def describe_subscribers_for_notification(self: Any) -> str:
        budget = self.backend.budgets[self._get_param("AccountId")][self._get_param("BudgetName")]
        want = self._get_param("Notification")
        for notification in budget.notifications:
            if all(notification.details.get(key) == want[key] for key in want if key != "NotificationState"):
                return json.dumps({"Subscribers": notification.subscribers})
        return json.dumps({"Subscribers": []})

    def create_budget_of(old: Any) -> Any:
        def create_budget(self: Any) -> Any:
            said = old(self)
            name = self._get_param("Budget")["BudgetName"]
            budget = self.backend.budgets[self._get_param("AccountId")][name]
            budget.lab_tags = self._get_param("ResourceTags") or []
            return said

        return create_budget

    def list_tags_for_resource(self: Any) -> str:
        arn = self._get_param("ResourceARN")
        budget = self.backend.budgets[arn.split(":")[4]].get(arn.split("budget/")[-1])
        return json.dumps({"ResourceTags": getattr(budget, "lab_tags", [])})

    patches.set(BudgetsResponse, "describe_subscribers_for_notification", describe_subscribers_for_notification)
    patches.wrap(BudgetsResponse, "create_budget", create_budget_of)
    patches.set(BudgetsResponse, "list_tags_for_resource", list_tags_for_resource)


# Launch templates: moto writes the template's own tags into its data; Terraform then sees a change for ever.
def _templates(patches: Patches) -> None:
    old = template_responses.LaunchTemplates.create_launch_template

    def create_launch_template(self: Any) -> Any:
        said = old(self)
        for template in self.ec2_backend.launch_templates.values():
            for version in template.versions:
                _without_own_tags(version.data)
        return said

    patches.set(template_responses.LaunchTemplates, "create_launch_template", create_launch_template)


def _without_own_tags(data: dict[str, Any]) -> None:
    specs = data.get("TagSpecifications")
    if specs:
        kept = [spec for spec in specs if spec.get("ResourceType") != "launch-template"]
        data["TagSpecifications"] = kept
        if not kept:
            del data["TagSpecifications"]


# Security group rules that name a group: moto drops their description. A rule for all protocols has no ports, and moto
# refuses to change one.
def _rules(patches: Patches) -> None:
    def description(self: Any) -> str | None:
        return self.ip_range.get("Description") or self.source_group.get("Description")

    def modify_of(old: Any) -> Any:
        def modify_security_group_rules(self: Any, group_id: str, rules: dict[str, dict[str, Any]]) -> None:
            ports = {"FromPort": -1, "ToPort": -1}
            whole = {key: rule | (ports if rule.get("IpProtocol") == "-1" else {}) for key, rule in rules.items()}
            old(self, group_id, whole)
            group = self.get_security_group_by_name_or_id(group_id)
            for key, rule in rules.items():
                changed = group.get_rule(key)
                if rule.get("IpProtocol") == "-1":
                    changed.from_port = changed.to_port = None
                if rule.get("ReferencedGroupId"):
                    changed.source_group["Description"] = changed.ip_range.pop("Description", None)

        return modify_security_group_rules

    patches.set(SecurityGroupRule, "description", property(description))
    patches.wrap(SecurityGroupBackend, "modify_security_group_rules", modify_of)


# NAT gateways: moto leaves the interface of a deleted one behind.
def _nat(patches: Patches) -> None:
    def delete_of(old: Any) -> Any:
        def delete_nat_gateway(self: Any, nat_gateway_id: str) -> Any:
            gateway = old(self, nat_gateway_id)
            self.enis.pop(gateway._eni.id, None)
            return gateway

        return delete_nat_gateway

    patches.wrap(NatGatewayBackend, "delete_nat_gateway", delete_of)


# AWS's own policies: moto has none unless told, and all of them take half a second.
_POLICIES = ("AmazonSSMManagedInstanceCore",)


def _managed_policies(patches: Patches) -> None:
    known = json.loads(aws_managed_policies_data)

    def policies(self: Any) -> list[AWSManagedPolicy]:
        return [AWSManagedPolicy.from_data(name, self.account_id, self.region_name, known[name]) for name in _POLICIES]

    patches.set(IAMBackend, "_init_aws_policies", policies)
