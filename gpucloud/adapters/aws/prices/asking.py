"""What EC2 says of a region now: which zones offer a type, what spot machines cost there, how likely they are had."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpucloud.adapters.aws.prices.spot import LINUX
from gpucloud.adapters.aws.session import Aws

_TYPES_AT_ONCE = 100  # values of one filter, at most 200 (EC2 API reference)


def zones_of(aws: Aws, region: str, names: list[str]) -> dict[str, set[str]]:
    """Return the zones that offer each type; a type that none does is left out. CredentialsError, ProvisionError."""
    zones: dict[str, set[str]] = {}
    with aws.calling("ec2", f"list what {region} offers", region) as ec2:
        paginator = ec2.get_paginator("describe_instance_type_offerings")
        for start in range(0, len(names), _TYPES_AT_ONCE):
            some = [{"Name": "instance-type", "Values": names[start : start + _TYPES_AT_ONCE]}]
            for page in paginator.paginate(LocationType="availability-zone", Filters=some):
                for offering in page["InstanceTypeOfferings"]:
                    if _is_ours(offering["Location"], region):
                        zones.setdefault(offering["InstanceType"], set()).add(offering["Location"])
    return zones


def spot_prices(aws: Aws, region: str, names: list[str], now: datetime) -> dict[str, dict[str, Decimal]]:
    """Return the spot price now by type and zone; where there is none, none is offered. CredentialsError, …"""
    latest: dict[tuple[str, str], tuple[datetime, Decimal]] = {}
    with aws.calling("ec2", f"read the spot prices of {region}", region) as ec2:
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=names, ProductDescriptions=LINUX, StartTime=now, EndTime=now
        )
        for row in (row for page in pages for row in page["SpotPriceHistory"]):
            if row.get("SpotPrice") and _is_ours(row["AvailabilityZone"], region):
                _keep_latest(latest, row)
    prices: dict[str, dict[str, Decimal]] = {}
    for (name, zone), (_, price) in sorted(latest.items()):
        prices.setdefault(name, {})[zone] = price
    return prices


def placement_scores(aws: Aws, region: str, names: list[str]) -> dict[str, int]:
    """Return by zone id how likely one machine of any of these types is had now: 1 to 10. CredentialsError, …

    AWS answers for a few new sets of types a day, and scores sets of fewer than three types low.
    """
    with aws.calling("ec2", f"read the spot placement scores of {region}", region) as ec2:
        pages = ec2.get_paginator("get_spot_placement_scores").paginate(
            InstanceTypes=names,
            TargetCapacity=1,
            TargetCapacityUnitType="units",
            SingleAvailabilityZone=True,
            RegionNames=[region],
        )
        rows = [row for page in pages for row in page["SpotPlacementScores"]]
    return {str(row["AvailabilityZoneId"]): int(row["Score"]) for row in rows if "AvailabilityZoneId" in row}


def _is_ours(zone: str, region: str) -> bool:
    """Whether the zone is one of the region's own: local zones, which must be opted in to, have longer names."""
    return re.fullmatch(rf"{region}[a-z]", zone) is not None


def _keep_latest(latest: dict[tuple[str, str], tuple[datetime, Decimal]], row: dict[str, Any]) -> None:
    key = (str(row["InstanceType"]), str(row["AvailabilityZone"]))
    point = (row["Timestamp"], Decimal(row["SpotPrice"]))
    latest[key] = max(latest.get(key, point), point)
