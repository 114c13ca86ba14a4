"""What AWS knows of itself: spot prices, images and the parameters that name them, consoles."""

from __future__ import annotations

import hashlib
import random
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.ec2.responses import EC2Response
from moto.ssm.models import Parameter, ParameterDict

from tests.lab.aws.pools import vcpus
from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import World, now

IMAGES = {
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id": (
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20260901", "898082745236", "amazon",
    ),
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": (
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260901", "898082745236", "amazon",
    ),
    "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id": (
        "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20260901", "099720109477", None,
    ),
    "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id": (
        "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260901", "099720109477", None,
    ),
}  # fmt: skip
# USD an hour, about what these cost in 2026; what is not here costs 4 cents a vCPU.
_SPOT = {
    "g4dn.xlarge": "0.2100", "g4dn.2xlarge": "0.3000", "g4dn.12xlarge": "1.6000", "g5.xlarge": "0.4500",
    "g5.12xlarge": "2.6000", "g6.xlarge": "0.3600", "p3.2xlarge": "0.9800", "p4d.24xlarge": "11.5000",
    "p5.48xlarge": "27.0000", "t3.micro": "0.0031",
}  # fmt: skip
_CHANGES_EVERY = timedelta(hours=6)
_KEPT = timedelta(days=90)

Prices = dict[str, list[tuple[datetime, str]]]


def install(patches: Patches, world: World, prices: Prices) -> None:
    """Put the tables in place of moto's."""
    _images(patches)
    _prices(patches, prices)
    _console(patches, world)


def image_id(region: str, parameter: str) -> str:
    """Return the id of the image that a public parameter names in a region."""
    return "ami-0" + hashlib.sha256(f"{region}{parameter}".encode()).hexdigest()[:16]


def _images(patches: Patches) -> None:
    def load_of(old: Any) -> Any:
        def load(self: Any) -> None:
            old(self)
            for parameter, (name, owner, alias) in IMAGES.items():
                id_ = image_id(self.region_name, parameter)
                self.amis[id_] = Ami(
                    self, id_, name=name, owner_id=owner, owner_alias=alias, public=True, virtualization_type="hvm",
                    architecture="x86_64", root_device_type="ebs", root_device_name="/dev/sda1", description=name,
                    creation_date=datetime(2026, 9, 1, tzinfo=timezone.utc),
                )  # fmt: skip

        return load

    def loading_of(old: Any) -> Any:
        def check(self: Any, key: str) -> None:
            old(self, key)
            name = str(key or "")
            if name in IMAGES and not dict.__contains__(self, name):
                dict.__setitem__(self, name, [_parameter(self, name)])

        return check

    patches.wrap(AmiBackend, "_load_amis", load_of)
    patches.wrap(ParameterDict, "_check_loading_status", loading_of)


def _parameter(held: Any, name: str) -> Parameter:
    return Parameter(
        account_id=held.account_id, name=name, value=image_id(held.region_name, name), parameter_type="String",
        description=None, allowed_pattern=None, keyid=None, version=1, data_type="aws:ec2:image",
        last_modified_date=datetime(2026, 9, 1, tzinfo=timezone.utc),
    )  # fmt: skip


def _prices(patches: Patches, prices: Prices) -> None:
    def describe_spot_price_history(self: Any) -> ActionResult:
        filters = self._filters_from_querystring()
        kinds = self._get_param("InstanceTypes", []) or filters.get("instance-type", [])
        zones = filters.get("availability-zone", [])
        zone = self._get_param("AvailabilityZone")
        products = self._get_param("ProductDescriptions", []) or filters.get("product-description", ["Linux/UNIX"])
        until = _aware(self._get_param("EndTime")) or now()
        since = _aware(self._get_param("StartTime")) or until - _KEPT
        offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(self.region, [])
        rows = [
            {
                "InstanceType": offer["InstanceType"],
                "AvailabilityZone": offer["Location"],
                "ProductDescription": "Linux/UNIX",
                "SpotPrice": price,
                "Timestamp": at,
            }
            for offer in offers
            if (not kinds or offer["InstanceType"] in kinds)
            and (not zones or offer["Location"] in zones)
            and zone in {None, offer["Location"]}
            and {"Linux/UNIX", "Linux/UNIX (Amazon VPC)"} & set(products)
            for at, price in _between(_series(prices, offer["InstanceType"], offer["Location"], until), since, until)
        ]
        rows.sort(key=lambda row: row["Timestamp"], reverse=True)
        start, size = int(self._get_param("NextToken") or 0), min(self._get_int_param("MaxResults") or 1000, 1000)
        more = str(start + size) if len(rows) > start + size else ""
        return ActionResult({"SpotPriceHistory": rows[start : start + size], "NextToken": more})

    patches.set(EC2Response, "describe_spot_price_history", describe_spot_price_history)


def _aware(said: Any) -> datetime | None:
    if not said:
        return None
    at = datetime.fromisoformat(str(said).replace("Z", "+00:00"))
    return at if at.tzinfo else at.replace(tzinfo=timezone.utc)


def _series(prices: Prices, kind: str, zone: str, until: datetime) -> list[tuple[datetime, str]]:
    """Return (from when, price), oldest first; the same for the same type, zone and time."""
    if f"{kind}/{zone}" in prices:
        return sorted(prices[f"{kind}/{zone}"])
    base = Decimal(_SPOT[kind]) if kind in _SPOT else Decimal("0.04") * vcpus(kind)
    chance = random.Random(f"{kind}/{zone}")
    offset, level = timedelta(minutes=chance.randrange(360)), chance.uniform(0.9, 1.3)
    step = int((until - _KEPT).timestamp() // _CHANGES_EVERY.total_seconds())
    made = []
    while True:
        at = datetime.fromtimestamp(step * _CHANGES_EVERY.total_seconds(), timezone.utc) + offset
        if at > until:
            return made
        factor = level + random.Random(f"{kind}/{zone}/{step}").uniform(-0.05, 0.05)
        made.append((at, f"{base * Decimal(factor):.6f}"))
        step += 1


def spot_price(prices: Prices, kind: str, zone: str) -> Decimal:
    """Return what a spot machine of the type costs there an hour now."""
    return Decimal(_series(prices, kind, zone, now())[-1][1])


def _between(
    series: list[tuple[datetime, str]], since: datetime, until: datetime
) -> list[tuple[datetime, str]]:  # fmt: skip
    """Return the changes in a span, and the one that was in force at its start."""
    before = [point for point in series if point[0] <= since]
    return before[-1:] + [point for point in series if since < point[0] <= until]


def _console(patches: Patches, world: World) -> None:
    def get_console_output(self: Any) -> ActionResult:
        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        said = world.machines.console(instance.id) if world.machines else ""
        return ActionResult(
            {"InstanceId": instance.id, "Timestamp": now(), "Output": Base64EncodedString.from_raw_string(said)}
        )

    patches.set(EC2Response, "get_console_output", get_console_output)
