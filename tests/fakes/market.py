"""A market in memory: machines of a few types in the zones of one region, at prices that never change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal

from gpucloud.domain.job.spec import RENTED, Market, Resources
from gpucloud.domain.offer import Offer, Pool, PricePoint

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Kind:
    """A type of machine; spot costs a third, a cent more in each further zone."""

    name: str
    gpu: str | None
    gpus: int
    vram_gib: int | None
    on_demand: Decimal
    zones: str = "abc"
    vcpus: int = 8


A100 = Kind("p4d.24xlarge", "A100", 8, 40, Decimal(33), vcpus=96)
H100 = Kind("p5.48xlarge", "H100", 8, 80, Decimal(54), vcpus=192)
V100 = Kind("p3.2xlarge", "V100", 1, 16, Decimal(3))


class FakeMarket:
    """Implements `MarketData`."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        return tuple(
            self._offer(kind, Pool(instance_type=kind.name, zone=f"us-east-1{zone}", market=market))
            for kind in self.kinds
            for zone in kind.zones
            for market in RENTED
            if wanted.market.allows(market) and (not wanted.types or kind.name in wanted.types)
        )

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        kind = next(kind for kind in self.kinds if kind.name == pool.instance_type)
        return (PricePoint(since=start, usd_per_hour=self._offer(kind, pool).usd_per_hour),)

    @staticmethod
    def _offer(kind: Kind, pool: Pool) -> Offer:
        spot = kind.on_demand / 3 + Decimal(ord(pool.zone[-1]) - ord("a")) / 100
        return Offer(
            pool=pool,
            usd_per_hour=kind.on_demand if pool.market is Market.ON_DEMAND else spot,
            cap_usd_per_hour=kind.on_demand,
            as_of=NOW,
            gpus=kind.gpus,
            gpu=kind.gpu,
            vram_gib=kind.vram_gib,
            vcpus=kind.vcpus,
        )
