"""The price of own hosts: what the user says they cost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

from gpucloud.adapters.hosts.records import POOL
from gpucloud.domain.job import Resources
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.ports import Clock


class SshMarket:
    """Implements `MarketData`: one offer at one price. `check` raises when the hosts cannot be used at all.

    What is asked of the GPUs is taken as given: the node's own facts and the gate hold it against what is there.
    """

    def __init__(self, usd_per_hour: Decimal, clock: Clock, check: Callable[[], object]) -> None:
        self._usd_per_hour = usd_per_hour
        self._clock = clock
        self._check = check

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return the one offer."""
        self._check()
        offer = Offer(
            pool=POOL,
            usd_per_hour=self._usd_per_hour,
            cap_usd_per_hour=self._usd_per_hour,
            as_of=self._clock.now(),
            gpus=wanted.gpus,
            gpu=wanted.gpu[0] if wanted.gpu else None,
            vram_gib=wanted.vram_gib,
        )
        return (offer,)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:  # noqa: ARG002
        """Return the price, which does not change."""
        return (PricePoint(since=start, usd_per_hour=self._usd_per_hour),)
