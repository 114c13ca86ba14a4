"""Makes the package's catalog of GPU machines from its sources: the same bytes from the same sources.

    python -m tests.packaged.catalog --karpenter GIT_DIR --advisor spot-advisor.json

- what machines are, and in how many zones of a region they are offered: moto's package data (answers of
  DescribeInstanceTypes and DescribeInstanceTypeOfferings; Apache-2.0), of the moto that is installed here;
- on-demand prices of us-east-1: Karpenter's pkg/providers/pricing/zz_generated.pricing_aws.go at HEAD (Apache-2.0);
- savings and interruption bands: AWS's Spot Instance advisor as alexei-led/spotinfo carries it (Apache-2.0).

`catalog.NOTICE` names their versions; what is written down by hand is below, each with its reason.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import gpucloud.adapters.aws.prices
from gpucloud.adapters.aws.prices.asking import machine_of
from gpucloud.adapters.aws.prices.catalog import written
from gpucloud.domain.market.catalog import Advice, Advisor, Band, Catalog, Machine, PriceList

TARGET = Path(gpucloud.adapters.aws.prices.__file__).parent / "catalog.json"
LISTED = "us-east-1"
SAME_LIST = ("us-east-2", "us-west-2")
"""AWS prices GPU machines alike in its three large regions; no list of these two was read."""
OF_OLD = (
    # AWS lists their prices still and offers them in no region: recorded markets are of them (AWS's type pages).
    Machine(name="p3.2xlarge", gpu="V100", gpus=1, vram_gib=16, vcpus=8, memory_gib=61, efa=0, network_gbps=2.5,
            burst_gbps=10, nvme_gb=0),
    Machine(name="p3.8xlarge", gpu="V100", gpus=4, vram_gib=16, vcpus=32, memory_gib=244, efa=0, network_gbps=10,
            nvme_gb=0),
    Machine(name="p3.16xlarge", gpu="V100", gpus=8, vram_gib=16, vcpus=64, memory_gib=488, efa=0, network_gbps=25,
            nvme_gb=0),
)  # fmt: skip
BOUNDS = {"p5e.48xlarge": Decimal("84.8")}
"""No list has it; it is what p5en.48xlarge cost before it fell, from above."""
_BANDS = tuple(Band)


def catalog(karpenter: str, advisor: Path) -> Catalog:
    """Return the catalog that the sources make."""
    known = {machine.name: machine for machine in (*machines(), *OF_OLD)}
    as_of, usd = _prices(karpenter)
    listed = {name: price for name, price in usd.items() if name in known}
    whole = PriceList(as_of=as_of, usd_per_hour={**BOUNDS, **listed}, bounds=frozenset(set(BOUNDS) - set(listed)))
    same = PriceList(as_of=as_of, usd_per_hour=whole.usd_per_hour, bounds=whole.bounds, taken_from=LISTED)
    return Catalog(
        machines=known,
        prices={LISTED: whole, **dict.fromkeys(SAME_LIST, same)},
        zones=dict(zones(set(known))),
        advisor=Advisor(as_of=date(2025, 6, 28), advice=dict(_advice(advisor, set(known)))),
    )


def machines() -> Iterator[Machine]:
    """Yield the machines of moto's package data."""
    for kind in _moto("instance_types.json.gz").values():
        machine = machine_of(kind)
        if machine is not None:
            yield machine


def zones(names: set[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each region with the number of zones that offer each type."""
    places = resources.files("moto").joinpath("ec2", "resources", "instance_type_offerings", "availability-zone-id")
    for file in sorted(place.name for place in places.iterdir() if place.name.endswith(".json.gz")):
        offering: dict[str, set[str]] = {}
        for one in _moto("instance_type_offerings", "availability-zone-id", file):
            if one["InstanceType"] in names and is_own(one["Location"]):
                offering.setdefault(one["InstanceType"], set()).add(one["Location"])
        if offering:
            yield file.removesuffix(".json.gz"), {name: len(found) for name, found in offering.items()}


def is_own(zone_id: str) -> bool:
    """Whether the zone is its region's own; local and Wavelength zones must be opted in to, and have longer names."""
    return re.fullmatch(r"[a-z0-9]+-az\d+", zone_id) is not None


def _moto(*path: str) -> Any:
    return json.loads(gzip.decompress(resources.files("moto").joinpath("ec2", "resources", *path).read_bytes()))


def _prices(git_dir: str) -> tuple[date, dict[str, Decimal]]:
    file = "HEAD:pkg/providers/pricing/zz_generated.pricing_aws.go"
    text = subprocess.run(["git", f"--git-dir={git_dir}", "show", file], check=True, capture_output=True, text=True)
    made = re.search(rf"generated at (\d{{4}}-\d\d-\d\d)T\S+ for {LISTED}", text.stdout)
    assert made, f"{file} does not say when it was made"
    pairs = re.findall(r'"([a-z0-9-]+\.[a-z0-9-]+)": ([\d.]+)', text.stdout)
    return date.fromisoformat(made[1]), {name: _shortest(usd) for name, usd in pairs}


def _shortest(usd: str) -> Decimal:
    return Decimal(usd.rstrip("0").rstrip("."))


def _advice(file: Path, names: set[str]) -> Iterator[tuple[str, dict[str, Advice]]]:
    for region, systems in json.loads(file.read_text())["spot_advisor"].items():
        found = {
            name: Advice(saving=one["s"], band=_BANDS[one["r"]])
            for name, one in systems.get("Linux", {}).items()
            if name in names
        }
        if found:
            yield region, found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--karpenter", required=True, metavar="GIT_DIR")
    parser.add_argument("--advisor", required=True, type=Path, metavar="FILE")
    asked = parser.parse_args()
    TARGET.write_text(written(catalog(asked.karpenter, asked.advisor)), encoding="utf-8")


if __name__ == "__main__":
    main()
