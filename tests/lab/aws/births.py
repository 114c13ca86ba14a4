"""How an instance is born: from a pool that may refuse, with all that its template says (moto leaves much out)."""

from __future__ import annotations

import copy
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.models.spot_requests import LaunchSpecification, SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_request_id
from moto.iam.models import iam_backends

from tests.lab.aws import instances, pools, tables
from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import ACCOUNT, World, now


class _Error(EC2ClientError):
    pass


def install(patches: Patches, world: World) -> None:
    """Make an instance have all that its template says, and be pending."""
    plain = InstanceBackend.run_instances

    def run_instances(
        self: EC2Backend, image_id: str, count: int, user_data: Any, security_group_names: list[str], **asked: Any
    ) -> Any:
        named = asked.get("launch_template")
        data: dict[str, Any] = dict(self._get_template_from_args(named).data) if named else {}
        image_id = image_id or data.get("ImageId", "")
        _fill(self, asked, data)
        _check(world, self, image_id, asked, data)
        for _ in range(count):
            refused = pools.take(world, asked["instance_type"], _zone(self, asked), spot=_spot(asked))
            if refused is not None:
                raise _Error(refused.code, refused.message)
        cards = [int(nic.get("DeviceIndex", 0)) for nic in asked.get("nics") or []]
        for number, nic in enumerate(asked.get("nics") or []):
            nic["DeviceIndex"] = number  # one device index may come once a network card: moto keeps one of them
        made = plain(self, image_id, count, user_data, security_group_names, **asked)
        for instance in made.instances:
            for nic, index in zip(instance.nics.values(), cards, strict=False):
                nic.device_index = index
            _complete(world, self, instance, data, asked)
        world.kick.set()
        return made

    patches.set(InstanceBackend, "run_instances", run_instances)

    plain_init = Instance.__init__

    def init(self: Any, *args: Any, **asked: Any) -> None:
        plain_init(self, *args, **asked)
        instances.set_state(self, "pending")
        self.spot_instance_request_id = None
        self.state_reason = None  # AWS gives one only with an end
        said = self.user_data
        self.lab = instances.Life(born=now(), user_data=_decoded(said))

    patches.set(Instance, "__init__", init)


def _decoded(said: Any) -> str:
    if said is None:
        return ""
    if isinstance(said, Base64EncodedString):
        return str(said.decode())
    return str(said)


def _fill(backend: EC2Backend, asked: dict[str, Any], data: dict[str, Any]) -> None:
    if asked.get("is_instance_type_default") and data.get("InstanceType"):
        asked["instance_type"], asked["is_instance_type_default"] = data["InstanceType"], False
    if not asked.get("metadata_options"):
        asked["metadata_options"] = data.get("MetadataOptions") or {}
    if not asked.get("instance_initiated_shutdown_behavior"):
        asked["instance_initiated_shutdown_behavior"] = data.get("InstanceInitiatedShutdownBehavior")
    market_options = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    if market_options and not asked.get("instance_market_options"):
        asked["instance_market_options"] = market_options
    nics = asked.get("nics") or copy.deepcopy(data.get("NetworkInterfaces") or [])
    subnet = asked.get("subnet_id") or next((nic["SubnetId"] for nic in nics if nic.get("SubnetId")), None)
    if subnet:
        asked["subnet_id"] = subnet
    for nic in nics:
        if subnet:
            nic.setdefault("SubnetId", subnet)
        nic["Groups"] = list(nic.get("Groups") or nic.get("SecurityGroupId") or [])
        nic["DeleteOnTermination"] = nic.get("DeleteOnTermination", True)
    asked["nics"] = nics
    if nics and not asked.get("security_group_ids"):
        asked["security_group_ids"] = list(nics[0]["Groups"])
    disks = asked.get("block_device_mappings") or copy.deepcopy(data.get("BlockDeviceMappings") or [])
    if disks:  # else moto makes a root volume of its own beside the template's
        for disk in disks:
            disk["Ebs"].setdefault("DeleteOnTermination", True)
        asked["block_device_mappings"] = disks
    tags = convert_tag_spec(data.get("TagSpecifications") or [])
    given = asked.get("tags") or {}
    asked["tags"] = {kind: {**tags.get(kind, {}), **given.get(kind, {})} for kind in {*tags, *given}}


def _age_s(profile: str) -> float:
    found = iam_backends[ACCOUNT]["aws"].get_instance_profile(profile)
    made: datetime = found.create_date
    return (now() - (made if made.tzinfo else made.replace(tzinfo=timezone.utc))).total_seconds()


def _check(world: World, backend: EC2Backend, image_id: str, asked: dict[str, Any], data: dict[str, Any]) -> None:
    if not backend.describe_images(filters={"image-id": [image_id]}):
        raise _Error("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
    profile = (data.get("IamInstanceProfile") or {}).get("Name")
    if profile and world.profile_s > 0 and _age_s(profile) < world.profile_s:
        raise _Error(
            "InvalidParameterValue",
            f"Value ({profile}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
        )
    most = ((data.get("InstanceMarketOptions") or {}).get("SpotOptions") or {}).get("MaxPrice")
    price = tables.spot_price(world.prices, asked["instance_type"], _zone(backend, asked))
    if most is not None and _spot(asked) and Decimal(most) < price:
        raise _Error(
            "SpotMaxPriceTooLow",
            f"Your Spot request price of {most} is lower than the minimum required Spot request fulfillment price of "
            f"{price}.",
        )
    key = asked.get("key_name") or data.get("KeyName")
    if key and key not in backend.key_pairs:
        raise _Error("InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")


def _spot(asked: dict[str, Any]) -> bool:
    return asked.get("instance_market_options") == "spot" or asked.get("lifecycle") == "spot"


def _zone(backend: EC2Backend, asked: dict[str, Any]) -> str:
    if asked.get("subnet_id"):
        return str(backend.get_subnet(asked["subnet_id"]).availability_zone)
    return str(asked.get("placement") or backend.region_name + "a")


def _complete(world: World, backend: EC2Backend, instance: Any, data: dict[str, Any], asked: dict[str, Any]) -> None:
    profile = data.get("IamInstanceProfile") or {}
    if profile and not asked.get("iam_instance_profile_name") and not asked.get("iam_instance_profile_arn"):
        backend.associate_iam_instance_profile(
            instance_id=instance.id,
            iam_instance_profile_name=profile.get("Name"),
            iam_instance_profile_arn=profile.get("Arn"),
        )
    group = (data.get("Placement") or {}).get("GroupName")
    if group:
        instance.placement.group_name = group
    for nic in instance.nics.values():
        nic.delete_on_termination = nic.delete_on_termination or not asked["nics"]  # moto leaves such ones behind
        nic.add_tags(asked["tags"].get("network-interface", {}))
    _note_untagged(world, backend, instance)
    if _spot(asked):
        instance.lifecycle = "spot"
        _spot_request(backend, instance, asked["tags"].get("spot-instances-request", {}))


def _note_untagged(world: World, backend: EC2Backend, instance: Any) -> None:
    volumes = [backend.volumes[device.volume_id] for _name, device in instance.get_block_device_mapping]
    for thing in (instance, *volumes, *instance.nics.values()):
        if not any(tag["key"] == "gpucloud:managed" for tag in thing.get_tags()):
            world.untagged.append(f"{type(thing).__name__} {thing.id} of {instance.id}")


def _spot_request(backend: EC2Backend, instance: Any, tags: dict[str, str]) -> None:
    """Give a spot instance its request: without its id Terraform and people cannot see that it is spot."""
    request: Any = object.__new__(SpotInstanceRequest)
    for name in ("price", "valid_from", "valid_until", "launch_group", "availability_zone_group", "user_data"):
        setattr(request, name, None)
    for name in ("spot_fleet_id", "launch_spec"):
        setattr(request, name, None)
    request.tags, request.all_tags, request.ec2_backend = {}, {}, backend
    request.id = instance.spot_instance_request_id = random_spot_request_id()
    request.instance, request.state, request._status_code = instance, "active", "fulfilled"
    request.status_message, request.type = "Your Spot request is fulfilled.", "one-time"
    request.instance_interruption_behaviour = "terminate"
    request.launch_specification = LaunchSpecification(
        None, None, instance.image_id, instance.key_name, instance.instance_type, None, False, instance.subnet_id
    )  # fmt: skip
    backend.spot_instance_requests[request.id] = request
    request.add_tags(tags)
