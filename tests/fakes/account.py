"""An account in memory: quotas by market, and who asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone

from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.catalog import Caller, Headroom, QuotaRequest
from gpucloud.domain.offer import Offer

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


@dataclass
class FakeAccount:
    """Implements `Account`; `limits` by market, None: not readable."""

    limits: dict[Market, int | None]
    used: int = 0
    asked: list[QuotaRequest] = field(default_factory=list)

    def caller(self) -> Caller:
        arn = "arn:aws:iam::123456789012:user/ada"
        return Caller(account="123456789012", arn=arn, profile=None, region="us-east-1", partition="aws")

    def headroom(self, offer: Offer) -> Headroom:
        market = offer.pool.market
        return Headroom(
            region=offer.pool.region,
            code=f"L-{market.value}",
            name=f"All {market.value}",
            limit=self.limits[market],
            used=self.used,
        )

    def ask_for_more(self, headroom: Headroom, vcpus: int) -> QuotaRequest:
        request = QuotaRequest(
            region=headroom.region,
            code=headroom.code,
            name=headroom.name,
            wanted=vcpus,
            status="PENDING",
            asked_at=NOW,
        )
        self.asked.append(request)
        return request

    def requests(self, region: str) -> tuple[QuotaRequest, ...]:
        return tuple(request for request in self.asked if request.region == region)
