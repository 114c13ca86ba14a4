"""Whether a pool gives an instance: capacity and vCPU quotas, and how AWS words a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from tests.lab.aws.world import World, market

QUOTAS = {
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-34B43A08": "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
}
DEFAULT_QUOTA = 768.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a pool gave nothing, in EC2's words."""

    code: str
    message: str
    status: int = 400

    def in_activity(self, *, spot: bool) -> str:
        """Return the words that a scaling activity has for it."""
        said = f"Could not launch Spot Instances. {self.code} - {self.message}" if spot else self.message
        return f"{said} Launching EC2 instance failed."


def quota_code(instance_type: str, *, spot: bool) -> str:
    """Return the code of the quota that the type counts against."""
    family = instance_type.split(".", maxsplit=1)[0]
    if family.startswith(("g", "vt")):
        return "L-3819A6DF" if spot else "L-DB2E81BA"
    if family[0] == "p":
        if not spot:
            return "L-417A185B"
        return "L-C4BD4855" if family.startswith(("p5", "p6")) else "L-7212CCBC"
    return "L-34B43A08" if spot else "L-1216C47A"


def vcpus(instance_type: str) -> int:
    """Return what the quota counts."""
    known = next((kind for kind in INSTANCE_TYPES.values() if kind["InstanceType"] == instance_type), None)
    return int(known["VCpuInfo"]["DefaultVCpus"]) if known else 1


def take(world: World, instance_type: str, zone: str, *, spot: bool) -> Refused | None:
    """Take one instance out of the pool; None when the pool gave it."""
    if not _offered(instance_type, zone):
        return Refused(
            code="Unsupported",
            message=f"Your requested instance type ({instance_type}) is not supported in your requested Availability "
            f"Zone ({zone}). Please retry your request by not specifying an Availability Zone or choosing another.",
        )
    over = _over_quota(world, instance_type, zone, spot=spot)
    if over is not None:
        return over
    key = f"{instance_type}/{zone}/{market(spot=spot)}"
    left = world.capacity.get(key)
    if left is None:
        return None
    if left <= 0:
        return _no_capacity(instance_type, zone, spot=spot)
    world.capacity[key] = left - 1
    return None


def _offered(instance_type: str, zone: str) -> bool:
    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(zone.rstrip("abcdef"), [])
    return any(offer["InstanceType"] == instance_type and offer["Location"] == zone for offer in offers)


def _over_quota(world: World, instance_type: str, zone: str, *, spot: bool) -> Refused | None:
    code = quota_code(instance_type, spot=spot)
    limit = world.quotas.get(code, DEFAULT_QUOTA)
    used = sum(
        vcpus(instance.instance_type)
        for instance in world.instances()
        if instance.state in {"pending", "running"}
        and str(instance.placement.zone).startswith(zone.rstrip("abcdef"))
        and quota_code(instance.instance_type, spot=instance.lifecycle == "spot") == code
    )
    if used + vcpus(instance_type) <= limit:
        return None
    if spot:
        return Refused(code="MaxSpotInstanceCountExceeded", message="Max spot instance count exceeded")
    return Refused(
        code="VcpuLimitExceeded",
        message=f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def _no_capacity(instance_type: str, zone: str, *, spot: bool) -> Refused:
    if spot:
        message = "There is no Spot capacity available that matches your request."
    else:
        message = (
            f"We currently do not have sufficient {instance_type} capacity in the Availability Zone you requested "
            f"({zone}). Our system will be working on provisioning additional capacity. You can currently get "
            f"{instance_type} capacity by not specifying an Availability Zone in your request."
        )
    return Refused(code="InsufficientInstanceCapacity", message=message, status=500)
