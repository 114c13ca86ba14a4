"""A market without AWS: the catalog's prices, for whoever looks around before having an account."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time, timezone
from decimal import Decimal

from gpucloud.domain.catalog import Catalog
from gpucloud.domain.job import Market, Resources
from gpucloud.domain.listing import Listing, listings
from gpucloud.domain.offer import Offer, Pool, PricePoint


class ListedMarket:
    """Implements `MarketData`; a pool is a whole region, since nobody asks its zones. Prices are as old as the catalog.

    Where no spot price was ever read, it is the list price less what AWS's advisor once said that spot saves.
    """

    def __init__(self, catalog: Catalog, regions: tuple[str, ...]) -> None:
        """`regions` are those of jobs that name none."""
        self._catalog = catalog
        self._regions = regions

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return an offer for each machine, region and market that has a price."""
        found = listings(self._catalog, wanted.regions or self._regions)
        return tuple(offer for listing in found if listing.machine.fits(wanted) for offer in _offers(listing, wanted))

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the list price as the only point. UsageError: the catalog has no such machine."""
        del end
        listed = self._catalog.price(pool.instance_type, pool.region).usd_per_hour
        return (PricePoint(since=start, usd_per_hour=listed),)


def _offers(listing: Listing, wanted: Resources) -> Iterator[Offer]:
    listed, spot = listing.on_demand, listing.spot
    if listed is None:
        return
    if wanted.market.allows(Market.SPOT) and spot is not None:
        low = min(spot.low_usd_per_hour, listed.usd_per_hour)
        yield _offer(listing, wanted.nodes, Market.SPOT, low, listed.usd_per_hour, min(spot.as_of, listed.as_of))
    if wanted.market.allows(Market.ON_DEMAND):
        yield _offer(listing, wanted.nodes, Market.ON_DEMAND, listed.usd_per_hour, listed.usd_per_hour, listed.as_of)


def _offer(listing: Listing, nodes: int, market: Market, usd: Decimal, cap: Decimal, as_of: date) -> Offer:
    machine = listing.machine
    return Offer(
        pool=Pool(instance_type=machine.name, zone=listing.region, market=market),
        usd_per_hour=usd,
        cap_usd_per_hour=cap,
        as_of=datetime.combine(as_of, time(), timezone.utc),
        gpus=machine.gpus,
        gpu=machine.gpu,
        vram_gib=machine.vram_gib,
        vcpus=machine.vcpus,
        efa=machine.fabric(nodes),
        zones=listing.zones or 1,
    )
