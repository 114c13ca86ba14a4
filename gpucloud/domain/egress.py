"""What it costs when nodes read data from a bucket in another region."""

from __future__ import annotations

from decimal import Decimal

from gpucloud.domain.data import DataSet, gigabytes
from gpucloud.domain.quantities import counted, format_usd

# Between regions of North America and Europe: AWS re:Post, "Cost effective methods for accessing S3 buckets
# cross-region", prices of January 2026. Elsewhere prices differ by region, and none is known to be above this.
_USD_PER_GB = Decimal("0.02")
_CHEAP = ("us-", "ca-", "eu-")
_MOST_USD_PER_GB = Decimal("0.15")


def transfer_usd(found: DataSet, region: str, nodes: int) -> Decimal:
    """Return the most that S3 charges when `nodes` nodes in `region` read the set once each; nothing in its region."""
    if found.region is None or found.region == region:
        return Decimal(0)
    per_gb = _USD_PER_GB if found.region.startswith(_CHEAP) else _MOST_USD_PER_GB
    return per_gb * found.size * nodes / 10**9


def remark(found: DataSet, region: str, nodes: int) -> str | None:
    """Return what the user should know before machines are rented; None where reading is free."""
    usd = transfer_usd(found, region, nodes).quantize(Decimal("0.01"))
    if not usd:
        return None
    return (
        f"data: {found.source} is in {found.region}, the machines are in {region}: reading {gigabytes(found.size)} on"
        f" {counted(nodes, 'node')} costs up to {format_usd(usd)} (list prices of January 2026), again for each"
        " replacement; the budget does not count it"
    )
