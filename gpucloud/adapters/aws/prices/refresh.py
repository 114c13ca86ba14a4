"""The catalog made new from AWS: instance types as EC2 describes them, prices from the price list."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpucloud.adapters.aws.prices.catalog import Catalog, Machine, PriceList, load, written
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError

_PRICE_LISTS = {"aws": "us-east-1", "aws-cn": "cn-northwest-1", "aws-us-gov": "us-east-1"}
"""Where AWS answers for prices; the service is in a few regions only."""
_SOLD_AS = {22888: 24, 45776: 48}
"""What a GPU's memory is sold as in GiB, by the MiB that EC2 lists (A10G, L4; L40S)."""


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


def refresh(aws: Aws, region: str, into: Path, *, now: Callable[[], datetime] = _utc_now) -> Catalog:
    """Ask AWS for the region's GPU machines and prices, write them to the file, and return the catalog that counts now.

    Raises CredentialsError, ProvisionError; the file is then as it was.
    """
    machines = {machine.name: machine for machine in _machines(aws, region)}
    prices = {name: usd for name, usd in _prices(aws, region) if name in machines}
    if not prices:
        raise ProvisionError(
            f"AWS lists no price of a GPU machine in {region}", hint="name a region that has GPU machines"
        )
    listed = PriceList(as_of=now().date(), usd_per_hour=prices)
    packaged, before = load(), load(into)
    own = {name: old for name, old in before.prices.items() if old != packaged.prices.get(name)}
    news = Catalog(
        machines={**{k: v for k, v in before.machines.items() if v != packaged.machines.get(k)}, **machines},
        prices={**own, region: listed},
    )
    _write(into, written(news))
    return load(into)


def _machines(aws: Aws, region: str) -> Iterator[Machine]:
    with aws.calling("ec2", f"list the instance types of {region}", region) as ec2:
        x86 = [{"Name": "processor-info.supported-architecture", "Values": ["x86_64"]}]
        for page in ec2.get_paginator("describe_instance_types").paginate(Filters=x86):
            for kind in page["InstanceTypes"]:
                yield from _machine(kind)


def _machine(kind: dict[str, Any]) -> Iterator[Machine]:
    gpus = [gpu for gpu in kind.get("GpuInfo", {}).get("Gpus", ()) if gpu.get("Manufacturer") == "NVIDIA"]
    # Fractions of a GPU (g6f) are listed with a count of 0: no process can have one to itself.
    if not gpus or not gpus[0].get("Count"):
        return
    mib = int(gpus[0]["MemoryInfo"]["SizeInMiB"])
    yield Machine(
        name=str(kind["InstanceType"]),
        gpu=str(gpus[0]["Name"]),
        gpus=sum(int(gpu["Count"]) for gpu in gpus),
        vram_gib=_SOLD_AS.get(mib, mib // 1024),
        vcpus=int(kind["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=int(kind["MemoryInfo"]["SizeInMiB"]) // 1024,
        efa=int(kind.get("NetworkInfo", {}).get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)),
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
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
