"""The catalog made new from AWS: what machines are, where they are offered, list and spot prices, placement scores."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.prices.asking import placement_scores, spot_prices, zones_of
from gpucloud.adapters.aws.prices.catalog import load, written
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.market.catalog import Catalog, Machine, PriceList, Scores, SpotList
from gpucloud.wholefile import write_whole

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
