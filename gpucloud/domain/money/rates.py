"""What a region charges beside its machines: for disks, addresses, stored bytes, requests, transfer, drills."""

from __future__ import annotations

import calendar
import itertools
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import ROUND_UP, Decimal

_ZERO = Decimal(0)
GIB = 1024**3
_SHORTEST_MONTH_HOURS = 28 * 24
_MILLIONTH = Decimal("0.000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One region's prices in USD. A GB on AWS's bill is 2^30 bytes, and a month is as long as the calendar says.

    `puts` are requests that write or list, `gets` those that read; deleting is free. `drill_usd` is for one machine
    that is interrupted on request.
    """

    region: str
    disk_usd_per_gib_month: Decimal = _ZERO
    address_usd_per_hour: Decimal = _ZERO
    storage_usd_per_gib_month: Decimal = _ZERO
    puts_usd_per_1000: Decimal = _ZERO
    gets_usd_per_1000: Decimal = _ZERO
    transfer_usd_per_gib: Decimal = _ZERO
    drill_usd: Decimal = _ZERO

    def most_beside_usd_per_hour(self, gib: int, *, address: bool) -> Decimal:
        """Return what a machine's disk and address cost an hour at the most: in February; a millionth rounded up."""
        disk = self.disk_usd_per_gib_month * gib / _SHORTEST_MONTH_HOURS
        return (disk + (self.address_usd_per_hour if address else _ZERO)).quantize(_MILLIONTH, ROUND_UP)

    def storage_usd(self, size: int, start: datetime, end: datetime) -> Decimal:
        """Return what `size` bytes cost from start to end, exactly."""
        edges = (start, *months_between(start, end), max(start, end))
        months = sum((_seconds(b - a) / (month_hours(a) * 3600) for a, b in itertools.pairwise(edges)), _ZERO)
        return self.storage_usd_per_gib_month * size / GIB * months

    def requests_usd(self, puts: int, gets: int) -> Decimal:
        """Return what so many requests cost, exactly."""
        return (self.puts_usd_per_1000 * puts + self.gets_usd_per_1000 * gets) / 1000

    def transfer_usd(self, size: int) -> Decimal:
        """Return what `size` bytes cost on their way out of the cloud, exactly."""
        return self.transfer_usd_per_gib * size / GIB


def month_hours(when: datetime) -> int:
    """Return how many hours its month has: 744 in January.

    Amazon S3's FAQ computes GB-months so, and EBS's price page those of disks: GB × seconds / seconds of the month.
    """
    return calendar.monthrange(when.year, when.month)[1] * 24


def months_between(start: datetime, end: datetime) -> tuple[datetime, ...]:
    """Return when months begin between the two, in UTC."""
    first, last = (moment.year * 12 + moment.month for moment in (start, end))
    begins = (datetime(month // 12, month % 12 + 1, 1, tzinfo=timezone.utc) for month in range(first, last))
    return tuple(begin for begin in begins if start < begin < end)


def _seconds(span: timedelta) -> Decimal:
    return Decimal(span // timedelta(microseconds=1)) / 1_000_000
