"""What IAM's judge must know of what stands, from moto's stores: ARNs, tags, templates, boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moto.autoscaling.models import autoscaling_backends
from moto.ec2 import ec2_backends
from moto.fis.models import fis_backends
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends

from tests.iam.needs import Params, Thing
from tests.lab.aws.repairs import placement_groups
from tests.lab.aws.world import ACCOUNT

_PREFIXES = {
    "eipalloc": "elastic-ip", "igw": "internet-gateway", "i": "instance", "key": "key-pair", "lt": "launch-template",
    "nat": "natgateway", "eni": "network-interface", "rtb": "route-table", "sgr": "security-group-rule",
    "sg": "security-group", "subnet": "subnet", "vol": "volume", "vpce": "vpc-endpoint", "vpc": "vpc", "ami": "image",
    "pg": "placement-group", "cr": "capacity-reservation",
}  # fmt: skip


class LabFacts:
    """The `Facts` of the emulated AWS."""

    def ec2(self, region: str, kind: str, name: str) -> Thing:
        """Return one thing of EC2, by id or name; without tags when it does not stand."""
        backend = ec2_backends[ACCOUNT][region]
        name = self._associated(backend, name) if name.rpartition("-")[0] in {"rtbassoc", "eipassoc"} else name
        kind = kind or _PREFIXES[name.rpartition("-")[0]]
        id_, tags = self._told(backend, kind, name)
        return Thing(arn=f"arn:aws:ec2:{region}:{ACCOUNT}:{kind}/{id_}", kind=kind, tags=tags)

    def group(self, region: str, params: Params) -> Thing:
        """Return the Auto Scaling group that a call is about, by its name or by a machine of it."""
        groups = autoscaling_backends[ACCOUNT][region].autoscaling_groups
        name, of = (
            params.get("AutoScalingGroupName") or params.get("Tags.member.1.ResourceId"),
            params.get("InstanceId"),
        )
        group = groups.get(name) or next(
            (one for one in groups.values() if of in [member.instance_id for member in one.instance_states]), None
        )
        stem = f"arn:aws:autoscaling:{region}:{ACCOUNT}:autoScalingGroup:*:autoScalingGroupName/"
        tags = {tag["Key"]: tag["Value"] for tag in group.tags} if group else {}
        return Thing(arn=str(group.arn) if group else f"{stem}{name}", kind="autoScalingGroup", tags=tags)

    def template(self, region: str, named: Params) -> tuple[str, Mapping[str, Any]]:
        """Return a launch template's name and what its named version says; a group's own for a group."""
        if "AutoScalingGroupName" in named:
            group = autoscaling_backends[ACCOUNT][region].autoscaling_groups.get(named["AutoScalingGroupName"])
            if group is None:
                return "", {}
            template, version = group.ec2_launch_template, group.launch_template_version
        else:
            backend = ec2_backends[ACCOUNT][region]
            wanted = named.get("LaunchTemplateId") or named.get("LaunchTemplateName")
            template = next((one for one in backend.launch_templates.values() if wanted in {one.id, one.name}), None)
            version = named.get("Version", "$Default")
        if template is None:
            return "", {}
        return str(template.id), template.get_version(version).data

    def boundary(self, role: str) -> str | None:
        """Return the ARN of a role's boundary."""
        found = next((one for one in iam_backends[ACCOUNT]["aws"].roles.values() if one.name == role), None)
        return None if found is None else (found.permissions_boundary_arn or None)

    def profile(self, name: str) -> str:
        """Return the ARN of an instance profile, its path in it; one that is not there has none."""
        found = iam_backends[ACCOUNT]["aws"].instance_profiles.values()
        absent = f"arn:aws:iam::{ACCOUNT}:instance-profile/{name}"
        return next((str(one.arn) for one in found if one.name == name), absent)

    def role_of_profile(self, profile: str) -> str:
        """Return path and name of the role in an instance profile; the profile's name while it is not there."""
        found = iam_backends[ACCOUNT]["aws"].instance_profiles.values()
        arns = (str(one.roles[0].arn) for one in found if one.name == profile and one.roles)
        return next((arn.partition(":role/")[2] for arn in arns), profile)

    def key_of(self, bucket: str) -> str | None:
        """Return the ARN of the key that a bucket's objects are under by default."""
        held = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
        rule = ((held.encryption if held else None) or {}).get("Rule") or {}
        key = (rule.get("ApplyServerSideEncryptionByDefault") or {}).get("KMSMasterKeyID")
        return str(key) if key else None

    def fis(self, region: str, kind: str, name: str) -> Thing:
        """Return a drill's template or the drill."""
        backend = fis_backends[ACCOUNT][region]
        arn = f"arn:aws:fis:{region}:{ACCOUNT}:{kind}/{name}"
        return Thing(arn=arn, kind=kind, tags=backend.tagger.get_tag_dict_for_resource(arn))

    def stands(self, bucket: str, key: str) -> bool:
        """Whether the object is there."""
        held = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
        return held is not None and key in held.keys

    def _associated(self, backend: Any, association: str) -> str:
        for table in backend.route_tables.values():
            if association in table.all_associations_ids:
                return str(table.id)
        for address in backend.addresses:
            if address.association_id == association:
                return str(address.allocation_id)
        return "rtb-0"

    def _told(self, backend: Any, kind: str, name: str) -> tuple[str, dict[str, str]]:
        """Return the id in the ARN and the tags."""
        if kind == "launch-template":
            found = next((one for one in backend.launch_templates.values() if name in {one.id, one.name}), None)
            return (found.id, dict(backend.tags.get(found.id, {}))) if found else (name, {})
        if kind == "key-pair":
            pair = next((one for one in backend.key_pairs.values() if name in {one.key_name, one.id}), None)
            return (pair.key_name, {tag["key"]: tag["value"] for tag in pair.get_tags()}) if pair else (name, {})
        if kind == "placement-group":
            found = placement_groups(backend).get(name, {"Tags": []})
            return name, {tag["Key"]: tag["Value"] for tag in found["Tags"]}
        return name, dict(backend.tags.get(name, {}))
