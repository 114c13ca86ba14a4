"""What AWS is asked of machines and prices: the whole catalog made new, and a region's spot prices once a minute."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.faults import explained
from gpucloud.adapters.aws.prices.catalog import load, written
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.market.catalog import Catalog, Machine, PriceList, Scores, SpotList
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.system.wholefile import write_whole

_PRICE_LISTS = {"aws": "us-east-1", "aws-cn": "cn-northwest-1", "aws-us-gov": "us-east-1"}
"""Where AWS answers for prices; the service is in a few regions only."""
_FAMILIES = ("g*", "p*", "u-p*")
"""The families with GPUs, a tenth of all types: G, P, and P6e's racks. Some have none of NVIDIA's."""
_SOLD_AS = {2861: 3, 5722: 6, 11444: 12, 22888: 24, 45776: 48}
"""What a GPU's memory is sold as in GiB, by the MiB that EC2 lists (parts of an L4; A10G, L4; L40S)."""
_CALLED = {"RTX PRO Server 6000": "RTX PRO 6000"}
"""Models that EC2 calls otherwise than their driver does, which names them to the gate."""


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


def refresh(
    aws: Aws, region: str, into: Path, *, scored: tuple[str, ...] = (), now: Callable[[], datetime] = _utc_now
) -> Catalog:
    """Ask AWS for the region's GPU machines and prices, write them to the file, and return the catalog that counts now.

    `scored` are GPU models whose placement scores are asked for too, where the region has them.
    Raises CredentialsError, ProvisionError; the file is then as it was.
    """
    machines = {machine.name: machine for machine in _machines(aws, region)}
    prices = {name: usd for name, usd in _prices(aws, region) if name in machines}
    if not prices:
        raise ProvisionError(
            f"AWS lists no price of a GPU machine in {region}", hint="name a region that has GPU machines"
        )
    at, names = now(), sorted(machines)
    zones = {name: len(found) for name, found in zones_of(aws, region, names).items()}
    spot = SpotList(as_of=at, usd_per_hour=spot_prices(aws, region, names, at))
    scores = {
        gpu: Scores(as_of=at, by_zone=placement_scores(aws, region, types))
        for gpu in scored
        if (types := sorted(one.name for one in machines.values() if one.gpu == gpu and one.why_not is None))
    }
    packaged, before = load(), load(into)
    own = _without(packaged, before)
    news = replace(
        own,
        machines={**own.machines, **machines},
        prices={**own.prices, region: PriceList(as_of=at.date(), usd_per_hour=prices)},
        zones={**own.zones, region: zones},
        spot={**own.spot, region: spot},
        scores={**own.scores, region: {**own.scores.get(region, {}), **scores}} if scores else own.scores,
    )
    _write(into, written(news))
    return load(into)


def renew_prices(aws: Aws, region: str, into: Path, *, now: Callable[[], datetime] = _utc_now) -> Catalog:
    """Read the region's list prices alone, write them to the file, and return the catalog that counts now.

    Raises CredentialsError, ProvisionError; the file is then as it was.
    """
    packaged, before = load(), load(into)
    prices = {name: usd for name, usd in _prices(aws, region) if name in before.machines}
    if not prices:
        raise ProvisionError(f"AWS lists no price of a GPU machine in {region}", hint="gpucloud catalog refresh")
    own = _without(packaged, before)
    fresh = PriceList(as_of=now().date(), usd_per_hour=prices)
    _write(into, written(replace(own, prices={**own.prices, region: fresh})))
    return load(into)


def machine_of(kind: Mapping[str, Any]) -> Machine | None:
    """Return the machine that DescribeInstanceTypes describes; None for one without a GPU of NVIDIA's."""
    gpus = [gpu for gpu in kind.get("GpuInfo", {}).get("Gpus", ()) if gpu.get("Manufacturer") == "NVIDIA"]
    if not gpus:
        return None
    network = kind.get("NetworkInfo", {})
    lasting, burst = _network(network)
    mib = int(gpus[0]["MemoryInfo"]["SizeInMiB"])
    return Machine(
        name=str(kind["InstanceType"]),
        gpu=_CALLED.get(gpus[0]["Name"], str(gpus[0]["Name"])),
        # Parts of a GPU (g6f) are listed with a count of 0: no process can have one to itself.
        gpus=sum(int(gpu.get("Count", 0)) for gpu in gpus),
        gpu_part=float(gpus[0].get("GpuPartitionSize", 1)),
        vram_gib=_SOLD_AS.get(mib, mib // 1024),
        vcpus=int(kind["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=int(kind["MemoryInfo"]["SizeInMiB"]) // 1024,
        efa=int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)),
        cards=int(network.get("MaximumNetworkCards", 1)),
        network_gbps=lasting,
        burst_gbps=burst,
        nvme_gb=int(kind.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)),
        architecture=_architecture(kind.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
    )


def _machines(aws: Aws, region: str) -> Iterator[Machine]:
    families = [{"Name": "instance-type", "Values": list(_FAMILIES)}]
    with aws.calling("ec2", f"list the instance types of {region}", region) as ec2:
        for page in ec2.get_paginator("describe_instance_types").paginate(Filters=families):
            for kind in page["InstanceTypes"]:
                machine = machine_of(kind)
                if machine is not None:
                    yield machine


def _network(network: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return what the network carries for hours, and for minutes where that is more, in Gbps.

    `NetworkPerformance` is the machine's ("50 Gigabit", "4x 100 Gigabit", "Up to 25 Gigabit"); the sum over its cards
    is not: they share it (g6e.48xlarge has 400 Gbps, and four cards that list 400 each).
    """
    told = re.fullmatch(r"(Up to )?(?:(\d+)x )?([\d.]+) Gigabit", str(network.get("NetworkPerformance", "")))
    if told is None:
        return None, None
    gbps = _whole(float(told[3]) * int(told[2] or 1))
    if not told[1]:
        return gbps, None
    lasting = next((card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards", ())), None)
    return (_whole(float(lasting)) if lasting is not None else None), gbps


def _architecture(listed: Sequence[str]) -> str:
    """Return the one that machines of today run: older types list i386 first."""
    return "x86_64" if not listed or "x86_64" in listed else str(listed[0])


def _whole(gbps: float) -> float:
    return int(gbps) if gbps == int(gbps) else gbps


def _without(packaged: Catalog, whole: Catalog) -> Catalog:
    """Return what of the whole the package does not have: what was asked for before."""
    return Catalog(
        machines={name: one for name, one in whole.machines.items() if one != packaged.machines.get(name)},
        prices={name: one for name, one in whole.prices.items() if one != packaged.prices.get(name)},
        zones={name: one for name, one in whole.zones.items() if one != packaged.zones.get(name)},
        spot=whole.spot,
        scores=whole.scores,
    )


def _prices(aws: Aws, region: str) -> Iterator[tuple[str, Decimal]]:
    """Yield instance types with USD an hour: Linux, shared hardware, on demand, nothing reserved."""
    wanted = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    place = _PRICE_LISTS.get(aws.partition, "us-east-1")
    with aws.calling("pricing", f"read the price list of {region}", place) as pricing:
        for page in pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters):
            for text in page["PriceList"]:
                yield from _price(json.loads(text))


def _price(product: dict[str, Any]) -> Iterator[tuple[str, Decimal]]:
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            usd = Decimal(dimension["pricePerUnit"].get("USD", "0"))
            if usd > 0 and dimension.get("unit") == "Hrs":
                yield str(product["product"]["attributes"]["instanceType"]), usd


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


# What EC2 says of a region now, and the history of spot prices, asked once a minute.


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
