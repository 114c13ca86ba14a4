"""What EC2 says of a region now, and the history of spot prices, asked once a minute."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from gpucloud.adapters.aws.faults import explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.offer import Pool, PricePoint

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


# The history of spot prices, remembered: it grows with time, and AWS is asked once a minute for each pool.


LINUX = ["Linux/UNIX (Amazon VPC)", "Linux/UNIX"]
"""The product whose prices are ours; AWS lists it under the one name or the other."""
_FRESH = timedelta(minutes=1)
# A price may be listed minutes after it began: so much of what is known already is read again.
_OVERLAP = timedelta(minutes=30)


@dataclass(slots=True, kw_only=True)
class _History:
    """One pool's known prices by the time they began: known back to `reaches`, asked for back to `wanted`."""

    prices: dict[datetime, Decimal] = field(default_factory=dict)
    reaches: datetime | None = None
    wanted: datetime | None = None
    answered_at: datetime | None = None
    asked_at: datetime | None = None


class SpotPrices:
    """Spot prices of any pool and time. Thread-safe."""

    def __init__(self, aws: Aws, *, now: Callable[[], datetime]) -> None:
        self._aws = aws
        self._now = now
        self._known: dict[Pool, _History] = {}
        self._remarks: dict[Pool, str] = {}
        self._lock = threading.Lock()

    @property
    def remarks(self) -> tuple[str, ...]:
        """A line for each pool that AWS once did not answer for."""
        return tuple(self._remarks.values())

    def between(self, pool: Pool, start: datetime, end: datetime, *, bound: Decimal) -> tuple[PricePoint, ...]:
        """Return the points that cover start..end; `bound` counts before the first price that is known."""
        with self._lock:
            history = self._known.setdefault(pool, _History())
            if self._is_due(history, start):
                self._ask(pool, history, start)
            points = sorted(history.prices.items())
        later = [PricePoint(since=since, usd_per_hour=usd) for since, usd in points if start < since <= end]
        before = [usd for since, usd in points if since <= start]
        return (PricePoint(since=start, usd_per_hour=before[-1] if before else bound), *later)

    def _is_due(self, history: _History, start: datetime) -> bool:
        if history.asked_at is None or self._now() - history.asked_at >= _FRESH:
            return True
        # Farther back than ever asked: a node that is older than those before.
        return history.wanted is None or start < history.wanted

    def _ask(self, pool: Pool, history: _History, start: datetime) -> None:
        now = history.asked_at = self._now()
        reach = history.wanted = min(start, history.wanted or start)
        known = history.answered_at is not None and reach == history.reaches
        since = max(reach, history.answered_at - _OVERLAP) if known and history.answered_at else reach
        try:
            history.prices |= self._read(pool, since, now)
        except (ProvisionError, CredentialsError) as error:
            self._remarks.setdefault(pool, f"the last known prices count: {error.message}")
            return
        history.reaches, history.answered_at = reach, now

    def _read(self, pool: Pool, since: datetime, until: datetime) -> dict[datetime, Decimal]:
        """Return the prices of since..until, the one in force at `since` included, as AWS lists them."""
        # The quick client: a running job does not wait for prices, and the next minute asks again.
        with explained(f"read the spot prices of {pool.instance_type}"):
            ec2 = self._aws.client("ec2", pool.region, quick=True)
            pages = ec2.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=[pool.instance_type],
                AvailabilityZone=pool.zone,
                ProductDescriptions=LINUX,
                StartTime=min(since, until),
                EndTime=until,
            )
            rows = [row for page in pages for row in page["SpotPriceHistory"]]
        # botocore gives times in the machine's own zone.
        return {row["Timestamp"].astimezone(timezone.utc): Decimal(row["SpotPrice"]) for row in rows}
