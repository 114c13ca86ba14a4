"""The history of spot prices, remembered: it grows with time, and AWS is asked once a minute for each pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from gpucloud.adapters.aws.faults import explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.offer import Pool, PricePoint

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
