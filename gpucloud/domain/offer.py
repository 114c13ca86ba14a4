"""Offers: what can be rented, and which to take first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from gpucloud.domain.job.spec import Access, Market, Resources

_WITH_RESTARTS = Decimal("1.1")
"""Of a spot hour's price: recorded machines live for 2.2 h when they are new, and a restart takes about 12 min."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Instance type × zone × market: what has one price at a time."""

    instance_type: str
    zone: str
    market: Market

    @property
    def region(self) -> str:
        """The zone's region: `us-east-1` of `us-east-1a`, and of the local zone `us-east-1-bos-1a`."""
        return region_of(self.zone)

    def __str__(self) -> str:
        if self.market is Market.OWNED:
            return "own host"
        return f"{self.instance_type} {self.market.value} in {self.zone}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EfaLayout:
    """How a machine's EFA interfaces lie on its network cards; each lies on a card of its own.

    Where cards are more than EFA interfaces, the first ones are plain: p6-b300 has 17 cards, and EFA on 1 to 16.
    """

    interfaces: int = 0
    cards: int = 1

    def __str__(self) -> str:
        """Return what launch templates are told apart by: `0`, `1`, `16`, `16of17`."""
        partly = 0 < self.interfaces < self.cards
        return f"{self.interfaces}of{self.cards}" if partly else str(self.interfaces)

    @property
    def several(self) -> bool:
        """Whether such a machine is started with several interfaces: AWS then gives it no public address."""
        return self.interfaces > 0 and self.cards > 1

    def access(self, desired: Access) -> Access:
        """Return how SSH reaches such a machine: as is wished, but without an address through Session Manager."""
        return Access.SESSION_MANAGER if self.several and desired is Access.PUBLIC else desired


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A pool with its price per node-hour as of a time; `cap_usd_per_hour` is the price it cannot pass.

    `gpu` is None where the type has no GPU (the embedded fleet's nodes): `gpus` then counts worker slots. `vcpus` is
    what quotas count; `efa` says what a job of so many nodes has of EFA there. `zones` is more than 1 where the pool is
    a whole region, whose zones nobody asked.
    """

    pool: Pool
    usd_per_hour: Decimal
    cap_usd_per_hour: Decimal
    as_of: datetime
    gpus: int
    gpu: str | None = None
    vram_gib: int | None = None
    vcpus: int = 0
    efa: EfaLayout = EfaLayout()
    zones: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePoint:
    """From `since` on, the pool costs `usd_per_hour` per node."""

    since: datetime
    usd_per_hour: Decimal


def matches(offer: Offer, wanted: Resources) -> bool:
    """Whether the offer's machines do what the job asked for; own hosts have neither type nor region."""
    owned = offer.pool.market is Market.OWNED
    return (
        wanted.market.allows(offer.pool.market)
        and (not wanted.types or owned or offer.pool.instance_type in wanted.types)
        and offer.gpus >= wanted.gpus
        and (not wanted.gpu or offer.gpu in wanted.gpu)
        and (wanted.vram_gib is None or (offer.vram_gib or 0) >= wanted.vram_gib)
        and (not wanted.regions or owned or offer.pool.region in wanted.regions)
    )


def rank(offers: tuple[Offer, ...], wanted: Resources) -> tuple[Offer, ...]:
    """Offers that match, the cheapest work first, as `worth` has it; equal ones in the order of their names."""
    fitting = [offer for offer in offers if matches(offer, wanted)]
    return tuple(sorted(fitting, key=_order))


def region_of(zone: str) -> str:
    """Return the region of a zone's name."""
    m = re.match(r"[a-z]+(-[a-z]+)+-\d+", zone)
    return m[0] if m else zone


def worth(offer: Offer, usd: Decimal) -> Decimal:
    """Return what to compare offers by where one costs `usd`: spot machines cost more than that, for their restarts.

    So spot comes before on demand only where it saves more than restarts take.
    """
    return usd * _WITH_RESTARTS if offer.pool.market is Market.SPOT else usd


def _order(offer: Offer) -> tuple[Decimal, bool, str, str]:
    pool = offer.pool
    return worth(offer, offer.usd_per_hour), pool.market is Market.ON_DEMAND, pool.instance_type, pool.zone
