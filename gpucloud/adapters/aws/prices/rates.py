"""What AWS's regions charge beside machines: gp3 disks, public IPv4 addresses, S3, the way out to the internet, drills.

List prices in USD, as AWS's pages for EBS, VPC, S3, EC2 (data transfer) and FIS give them; set down in November 2026
and asked of nobody. A region that is not listed counts as the dearest known. What is cheaper in truth (S3 above 50 TB,
the account's first 100 GB out in a month) is not taken off: `gpucloud cost --reconcile` sets AWS's own figures beside.
gp3's own 3,000 IOPS and 125 MiB/s are free, and no disk of ours is given more.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from gpucloud.domain.rates import Rates

_AS_IN_VIRGINIA = Rates(
    region="us-east-1",
    disk_usd_per_gib_month=Decimal("0.08"),
    address_usd_per_hour=Decimal("0.005"),  # in every region, since February 2024
    storage_usd_per_gib_month=Decimal("0.023"),
    puts_usd_per_1000=Decimal("0.005"),
    gets_usd_per_1000=Decimal("0.0004"),
    transfer_usd_per_gib=Decimal("0.09"),
    drill_usd=Decimal("0.20"),  # Fault Injection Service: 0.10 an action-minute, for the two minutes of the notice
)
_LISTED = {
    rates.region: rates
    for rates in (
        _AS_IN_VIRGINIA,
        replace(_AS_IN_VIRGINIA, region="us-east-2"),
        replace(_AS_IN_VIRGINIA, region="us-west-2"),
        replace(_AS_IN_VIRGINIA, region="eu-west-1", disk_usd_per_gib_month=Decimal("0.088")),
        replace(
            _AS_IN_VIRGINIA,
            region="eu-central-1",
            disk_usd_per_gib_month=Decimal("0.0952"),
            storage_usd_per_gib_month=Decimal("0.0245"),
            puts_usd_per_1000=Decimal("0.0054"),
            gets_usd_per_1000=Decimal("0.00043"),
        ),
        replace(
            _AS_IN_VIRGINIA,
            region="ap-northeast-1",
            disk_usd_per_gib_month=Decimal("0.096"),
            storage_usd_per_gib_month=Decimal("0.025"),
            puts_usd_per_1000=Decimal("0.0047"),
            gets_usd_per_1000=Decimal("0.00037"),
            transfer_usd_per_gib=Decimal("0.114"),
        ),
    )
}
_NOWHERE_DEARER = Rates(  # São Paulo; the way out: Cape Town
    region="",
    disk_usd_per_gib_month=Decimal("0.152"),
    address_usd_per_hour=Decimal("0.005"),
    storage_usd_per_gib_month=Decimal("0.0405"),
    puts_usd_per_1000=Decimal("0.007"),
    gets_usd_per_1000=Decimal("0.00056"),
    transfer_usd_per_gib=Decimal("0.154"),
    drill_usd=Decimal("0.20"),
)


def region_rates(region: str) -> Rates:
    """Return what the region charges."""
    return _LISTED.get(region) or replace(_NOWHERE_DEARER, region=region)
