"""What it costs when nodes read data from a bucket in another region."""

from __future__ import annotations

from decimal import Decimal

from gpucloud.domain.data import DataSet, gigabytes
from gpucloud.domain.quantities import format_usd

PRICES_OF = "2025"
"""The year of the list prices below (aws.amazon.com/ec2/pricing/on-demand, Data Transfer OUT to other regions)."""

_USD_PER_GB = {
    "af-south-1": Decimal("0.147"),
    "ap-east-1": Decimal("0.09"),
    "ap-northeast-1": Decimal("0.09"),
    "ap-northeast-2": Decimal("0.08"),
    "ap-northeast-3": Decimal("0.09"),
    "ap-south-1": Decimal("0.086"),
    "ap-southeast-1": Decimal("0.09"),
    "ap-southeast-2": Decimal("0.098"),
    "me-south-1": Decimal("0.1105"),
    "sa-east-1": Decimal("0.138"),
}
_ELSEWHERE_USD_PER_GB = Decimal("0.02")  # North America and Europe


def transfer_usd(found: DataSet, region: str, nodes: int) -> Decimal:
    """Return what S3 charges when `nodes` nodes in `region` read the set once each; nothing within a region."""
    if found.region is None or found.region == region:
        return Decimal(0)
    per_gb = _USD_PER_GB.get(found.region, _ELSEWHERE_USD_PER_GB)
    return (per_gb * found.size * nodes / 10**9).quantize(Decimal("0.01"))


def remark(found: DataSet, region: str, nodes: int) -> str | None:
    """Return what the user should know before machines are rented; None where reading is free."""
    usd = transfer_usd(found, region, nodes)
    if not usd:
        return None
    return (
        f"data: {found.source} is in {found.region}, the machines are in {region}: reading {gigabytes(found.size)} on"
        f" {nodes} nodes costs about {format_usd(usd)} (list prices of {PRICES_OF}), again for each replacement;"
        " the budget does not count it"
    )
