"""EC2 instances as AWS has them: pending, running, shutting down, ended with a reason; made whole from a template."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance, InstanceBackend, InstanceState, StateReason
from moto.ec2.models.spot_requests import LaunchSpecification, SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_request_id

from tests.lab.aws import pools
from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import World, market, now

_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}
_GONE = ("shutting-down", "terminated")
CHOICE = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
TAKEN = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Instance terminated by the Spot service")
POWERED_OFF = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")


class _Error(EC2ClientError):
    pass


@dataclass(slots=True)
class Life:
    """What the lab knows of an instance beyond moto."""

    born: datetime
    user_data: str
    died: datetime | None = None
    ends_at: datetime | None = None  # a notice has been given
    address: str | None = None
    machine: str = ""  # "", then "starting", "up", "ended"


def install(patches: Patches, world: World) -> None:
    """Put the life of instances in place of moto's."""
    _launching(patches, world)
    _ending(patches, world)
    _addresses(patches, world)


def end(world: World, instance: Any, reason: tuple[str, str], said: str = "") -> None:
    """Begin an instance's end; one that ends already keeps its reason."""
    if instance.state in _GONE:
        return
    set_state(instance, "shutting-down")
    instance.state_reason = StateReason(reason[1], reason[0])
    instance._reason = f"{said} ({now():%Y-%m-%d %H:%M:%S} GMT)" if said else ""
    life(instance).died = now()
    request = instance.ec2_backend.spot_instance_requests.get(instance.spot_instance_request_id or "")
    if request is not None:
        request.state = "closed"
        request._status_code = f"instance-terminated-{'by-user' if reason is CHOICE else 'no-capacity'}"
    world.kick.set()


def take_away(world: World, instance: Any) -> None:
    """The cloud takes a spot instance."""
    end(world, instance, TAKEN, "Service initiated")


def set_state(instance: Any, name: str) -> None:
    """Set an instance's state."""
    instance._state = InstanceState(name, _CODES[name])


def life(instance: Any) -> Life:
    """Return what the lab knows of an instance."""
    found: Life = instance.lab
    return found


def step(world: World) -> None:
    """Move every instance on: boot, run, be taken, end. Slow work on machines is done without the lock."""
    _start_machines(world)
    answering = _answering(world)
    off = world.machines.powered_off() if world.machines else frozenset()
    with world.lock:
        for instance in world.instances():
            if instance.id in off:
                end(world, instance, POWERED_OFF)
            _move(world, instance, answering)
    _end_machines(world)


def _move(world: World, instance: Any, answering: frozenset[str]) -> None:
    about = life(instance)
    if about.ends_at is not None and now() >= about.ends_at:
        take_away(world, instance)
    if instance.state == "pending":
        key = f"{instance.instance_type}/{instance.placement.zone}/{market(spot=instance.lifecycle == 'spot')}"
        death = world.deaths.get(key)
        if death is not None and death.times > 0:
            death.times -= 1
            end(world, instance, (death.code, death.message))
        elif now() - about.born >= timedelta(seconds=world.boot_s) and _is_up(world, instance, answering):
            set_state(instance, "running")


def _is_up(world: World, instance: Any, answering: frozenset[str]) -> bool:
    return world.machines is None or instance.id in answering


def _start_machines(world: World) -> None:
    if world.machines is None:
        return
    with world.lock:
        waiting = [one for one in world.instances() if one.state == "pending" and not life(one).machine]
        orders = [(instance, _order(world, instance)) for instance in waiting]
        for instance in waiting:
            life(instance).machine = "starting"
    for instance, order in orders:
        machine = world.machines.launch(instance.id, **order)
        with world.lock:
            life(instance).address = machine.address
            life(instance).machine = "up"


def _order(world: World, instance: Any) -> dict[str, Any]:
    from tests.lab.aws.roles import role_of  # noqa: PLC0415 - only with machines

    keys = instance.ec2_backend.key_pairs
    key = keys[instance.key_name].public_key if instance.key_name in keys else ""
    return {
        "instance_type": instance.instance_type,
        "zone": instance.placement.zone,
        "spot": instance.lifecycle == "spot",
        "image_user": world.image_user,
        "public_key": key,
        "user_data": life(instance).user_data,
        "role": role_of(instance),
        "account": instance.owner_id,
        "extra_env": dict(world.node_env),
    }


def _answering(world: World) -> frozenset[str]:
    if world.machines is None:
        return frozenset()
    with world.lock:
        asked = [one.id for one in world.instances() if one.state == "pending" and life(one).machine == "up"]
    return frozenset(id_ for id_ in asked if world.machines.answers(id_))


def _end_machines(world: World) -> None:
    with world.lock:
        ending = [one for one in world.instances() if one.state == "shutting-down"]
    for instance in ending:
        about = life(instance)
        if world.machines is not None and about.machine == "up":
            world.machines.end(instance.id)
            about.machine = "ended"
        with world.lock:
            if about.machine != "starting" and now() - (about.died or now()) >= timedelta(seconds=world.end_s):
                _finish(instance)


def _finish(instance: Any) -> None:
    reason, said = instance.state_reason, instance._reason
    set_state(instance, "shutting-down")  # moto changes the state in place: not the one that others remember
    instance.lab_final()  # moto's own: volumes and interfaces go
    instance.state_reason, instance._reason = reason, said


def _ending(patches: Patches, world: World) -> None:
    final = Instance.terminate

    def terminate(self: Any) -> Any:
        previous = copy.copy(self._state)
        end(world, self, CHOICE, "User initiated")
        return previous

    patches.set(Instance, "terminate", terminate)
    patches.set(Instance, "lab_final", final)


def _addresses(patches: Patches, world: World) -> None:
    def address_of(old: Any) -> Any:
        def address(self: Any) -> Any:
            if world.machines is None:
                return old.fget(self) if self.state not in _GONE else None
            return life(self).address if self.state not in _GONE else None

        return property(address)

    for name in ("public_ip_address", "private_ip_address"):
        patches.set(Instance, name, address_of(vars(Instance)[name]))


def _launching(patches: Patches, world: World) -> None:
    """Make an instance have its template's profile, IMDS, interfaces and tags, and be pending: moto leaves them out."""
    plain = InstanceBackend.run_instances

    def run_instances(
        self: EC2Backend, image_id: str, count: int, user_data: Any, security_group_names: list[str], **asked: Any
    ) -> Any:
        named = asked.get("launch_template")
        data: dict[str, Any] = dict(self._get_template_from_args(named).data) if named else {}
        image_id = image_id or data.get("ImageId", "")
        _fill(self, asked, data)
        _check(self, image_id, asked, data)
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
        set_state(self, "pending")
        self.spot_instance_request_id = None
        self.state_reason = None  # AWS gives one only with an end
        said = self.user_data
        self.lab = Life(born=now(), user_data=_decoded(said))

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


def _check(backend: EC2Backend, image_id: str, asked: dict[str, Any], data: dict[str, Any]) -> None:
    if not backend.describe_images(filters={"image-id": [image_id]}):
        raise _Error("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
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
