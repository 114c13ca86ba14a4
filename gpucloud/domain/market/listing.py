"""Listings: what a machine costs in a region, what is asked of the catalog, and how the answers are ranked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum

from gpucloud.domain.job.spec import Market, MarketPolicy
from gpucloud.domain.market.catalog import Advice, Band, Catalog, ListPrice, Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a machine must be and have; what is None or empty is all the same. `gpus` and `network_gbps` are at least.

    `usd_per_hour` is the most that a machine may cost on the market.
    """

    gpu: tuple[str, ...] = ()
    gpus: int | None = None
    vram_gib: int | None = None
    network_gbps: float | None = None
    efa: bool = False
    nvlink: bool = False
    types: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    market: MarketPolicy = MarketPolicy.AUTO
    usd_per_hour: Decimal | None = None


class Order(str, Enum):
    """What listings are ranked by, the best first."""

    PRICE = "price"
    GPU_PRICE = "gpu-price"
    TFLOPS_PRICE = "tflops-price"
    INTERRUPTION = "interruption"


# Listings: what a machine costs in a region, on either market, and which listings answer a question best.


_BANDS = tuple(Band)
_MILLIONTH = Decimal("0.000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotRange:
    """Spot prices of a type over a region's zones: the lowest, the highest, and how many zones have one.

    `estimated`: none was read, and it is the on-demand price less what AWS's advisor said spot saves; `zones` is 0.
    """

    low_usd_per_hour: Decimal
    high_usd_per_hour: Decimal
    zones: int
    as_of: date
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A machine in a region. `on_demand` is None where no price is known, `spot` where none is known or none offered.

    `spot_asked` tells the two apart. `zones` is in how many the type can be had, None where that was not read;
    `score` the best zone's placement score.
    """

    machine: Machine
    region: str
    on_demand: ListPrice | None
    spot: SpotRange | None = None
    spot_asked: bool = False
    zones: int | None = None
    advice: Advice | None = None
    score: int | None = None

    def usd_per_hour(self, market: MarketPolicy) -> Decimal | None:
        """Return the lowest price per machine-hour on the market; a bound is a price, too. None: not known."""
        known = [price for of, price in self._prices() if market.allows(of)]
        return min(known, default=None)

    def usd_per_gpu_hour(self, market: MarketPolicy) -> Decimal | None:
        """Return the same for one GPU."""
        return self._per(self.usd_per_hour(market), self.machine.gpus or self.machine.gpu_part)

    def usd_per_pflop_hour(self, market: MarketPolicy) -> Decimal | None:
        """Return the same for 10^15 operations a second in mixed precision, at the data sheet's peak, for an hour."""
        tflops = self.machine.training_tflops
        return self._per(self.usd_per_hour(market), tflops / 1000) if tflops else None

    @property
    def saving_percent(self) -> int | None:
        """How far spot is below on demand, in percent, below 0 where it is above; None where that is not known.

        Of the cheapest zone's price; where none was read, or no list price is known, as the advisor had it.
        """
        if self.spot_asked and self.spot is None:
            return None
        if self.spot is None or self.spot.estimated or self.on_demand is None or self.on_demand.bound:
            return self.advice.saving if self.advice else None
        return int(100 - 100 * self.spot.low_usd_per_hour / self.on_demand.usd_per_hour)

    @property
    def band(self) -> Band | None:
        """How often such machines were interrupted, as the advisor had it."""
        return self.advice.band if self.advice else None

    def _prices(self) -> Iterable[tuple[Market, Decimal]]:
        if self.spot is not None:
            yield Market.SPOT, self.spot.low_usd_per_hour
        if self.on_demand is not None:
            yield Market.ON_DEMAND, self.on_demand.usd_per_hour

    @staticmethod
    def _per(usd: Decimal | None, share: float) -> Decimal | None:
        return None if usd is None else (usd / Decimal(str(share))).quantize(_MILLIONTH)


def listings(catalog: Catalog, regions: tuple[str, ...]) -> tuple[Listing, ...]:
    """Return every machine that the regions offer, with what is known of its prices."""
    return tuple(
        _listing(catalog, catalog.machines[name], region) for region in regions for name in catalog.offered(region)
    )


def suits(machine: Machine, query: Query) -> bool:
    """Whether the machine is what is asked for, whatever it costs."""
    return (
        (not query.types or machine.name in query.types)
        and (not query.gpu or machine.gpu in query.gpu)
        and (query.gpus is None or machine.gpus >= query.gpus)
        and (query.vram_gib is None or machine.vram_gib >= query.vram_gib)
        and (query.network_gbps is None or (machine.network_gbps or 0) >= query.network_gbps)
        and (not query.efa or machine.efa > 0)
        and (not query.nvlink or machine.nvlink)
    )


def matches(listing: Listing, query: Query) -> bool:
    """Whether the listing answers the query: the machine, the region, and a market that is there and cheap enough."""
    if not suits(listing.machine, query) or (query.regions and listing.region not in query.regions):
        return False
    if query.market is MarketPolicy.SPOT and listing.spot is None and listing.spot_asked:
        return False
    usd = listing.usd_per_hour(query.market)
    return query.usd_per_hour is None or (usd is not None and usd <= query.usd_per_hour)


def rank(found: Iterable[Listing], query: Query, order: Order) -> tuple[Listing, ...]:
    """Return the listings that match, best first; machines that gpucloud runs no job on after all others.

    What is not known comes after what is; equals in the order of their price, then of their names.
    """
    return tuple(sorted((one for one in found if matches(one, query)), key=lambda one: _key(one, query, order)))


def _listing(catalog: Catalog, machine: Machine, region: str) -> Listing:
    on_demand = catalog.known_price(machine.name, region)
    advice = catalog.advisor.of(machine.name, region) if catalog.advisor else None
    scores = catalog.scores.get(region, {}).get(machine.gpu)
    asked = catalog.spot.get(region)
    return Listing(
        machine=machine,
        region=region,
        on_demand=on_demand,
        spot=_read(catalog, machine.name, region) if asked else _estimated(catalog, machine.name, region),
        spot_asked=asked is not None,
        zones=catalog.zones.get(region, {}).get(machine.name),
        advice=advice,
        score=max(scores.by_zone.values(), default=None) if scores else None,
    )


def _read(catalog: Catalog, name: str, region: str) -> SpotRange | None:
    by_zone = catalog.spot[region].usd_per_hour.get(name)
    if not by_zone:
        return None
    return SpotRange(
        low_usd_per_hour=min(by_zone.values()),
        high_usd_per_hour=max(by_zone.values()),
        zones=len(by_zone),
        as_of=catalog.spot[region].as_of.date(),
    )


def _estimated(catalog: Catalog, name: str, region: str) -> SpotRange | None:
    listed = catalog.known_price(name, region)
    advice = catalog.advisor.of(name, region) if catalog.advisor else None
    # A saving on a price that is a bound itself would say nothing.
    if catalog.advisor is None or advice is None or listed is None or listed.bound:
        return None
    usd = (listed.usd_per_hour * (100 - advice.saving) / 100).quantize(_MILLIONTH)
    return SpotRange(low_usd_per_hour=usd, high_usd_per_hour=usd, zones=0, as_of=catalog.advisor.as_of, estimated=True)


def _key(listing: Listing, query: Query, order: Order) -> tuple[object, ...]:
    first, price = _measure(listing, query, order), listing.usd_per_hour(query.market)
    return (listing.machine.why_not is not None, *_known_first(first), *_known_first(price), listing.machine.name)


def _measure(listing: Listing, query: Query, order: Order) -> Decimal | int | None:
    match order:
        case Order.PRICE:
            return listing.usd_per_hour(query.market)
        case Order.GPU_PRICE:
            return listing.usd_per_gpu_hour(query.market)
        case Order.TFLOPS_PRICE:
            return listing.usd_per_pflop_hour(query.market)
        case Order.INTERRUPTION:
            return _BANDS.index(listing.band) if listing.band else None


def _known_first(value: Decimal | int | None) -> tuple[bool, Decimal | int]:
    return value is None, value if value is not None else 0
