"""EC2 instances as AWS has them: pending, running, shutting down, ended with a reason."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from moto.ec2.models.instances import Instance, InstanceState, StateReason

from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import World, market, now

_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}
_GONE = ("shutting-down", "terminated")
CHOICE = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
TAKEN = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Instance terminated by the Spot service")
POWERED_OFF = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")


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
