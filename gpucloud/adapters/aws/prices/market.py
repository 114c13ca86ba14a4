"""AWS's market: which GPU machines are offered where and what they cost, with an account and without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TypeVar

from gpucloud.adapters.aws.prices.asking import SpotPrices, spot_prices, zones_of
from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.job.spec import RENTED, Market, Resources
from gpucloud.domain.market.catalog import Catalog, Machine, SpotList
from gpucloud.domain.market.listing import Listing, listings
from gpucloud.domain.offer import Offer, Pool, PricePoint

_T = TypeVar("_T")
_FRESH = timedelta(minutes=1)
_AT_ONCE = 8  # regions asked side by side


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class AwsMarket:
    """Implements `MarketData`. Thread-safe; asks AWS at most once a minute for the same thing.

    `prices` never fails a running job: where AWS does not answer, the last known prices count, else the on-demand
    price, which spot does not pass. `remarks` says so, each thing once. `renew` reads a region's list prices anew and
    returns the catalog with them: before machines on demand are offered at prices that are not known of late. Where
    that fails, and once there is a `renew`, such prices count for more than they were, so that a budget holds.
    """

    def __init__(
        self,
        aws: Aws,
        regions: tuple[str, ...],
        *,
        catalog: Catalog | None = None,
        renew: Callable[[str], Catalog] | None = None,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """`regions` are asked for jobs that name none."""
        self._aws = aws
        self._regions = regions
        self._now = now
        self._catalog = catalog or load()
        self._renew = renew
        self._renewed: set[str] = set()
        self._spot = SpotPrices(aws, now=now)
        self._offers: dict[Resources, tuple[datetime, tuple[Offer, ...]]] = {}
        self._remarks: dict[str, None] = {}
        self._lock = threading.Lock()

    @property
    def catalog(self) -> Catalog:
        """The machines and list prices that count."""
        return self._catalog

    @property
    def remarks(self) -> tuple[str, ...]:
        """What could not be asked so far, one line each."""
        with self._lock:
            return (*self._remarks, *self._spot.remarks)

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return the offers of the catalog's machines that fit, with their prices now; a minute old at most.

        A region that cannot be asked is left out with a remark; when none can, its error is raised.
        """
        now = self._now()
        with self._lock:
            at, offers = self._offers.get(wanted, (None, ()))
        if at is not None and now - at < _FRESH:
            return offers
        machines = self._catalog.fitting(wanted)
        if not machines:
            return ()
        regions = wanted.regions or self._regions
        if wanted.market.allows(Market.ON_DEMAND):
            self._renew_lists(regions)
        offers = self._ask(regions, machines, wanted)
        with self._lock:
            self._offers[wanted] = (now, offers)
        return offers

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's price points that cover start..end. UsageError: the catalog has no such machine."""
        listed = self._listed(pool)
        if pool.market is Market.ON_DEMAND:
            return (PricePoint(since=start, usd_per_hour=listed),)
        return self._spot.between(pool, start, end, bound=listed)

    def spot_lists(self, regions: tuple[str, ...], names: tuple[str, ...]) -> dict[str, SpotList]:
        """Return the spot prices of these types now, by region.

        A region that cannot be asked is left out with a remark; when none can, its error is raised.
        """
        now = self._now()

        def ask(region: str) -> SpotList:
            return SpotList(as_of=now, usd_per_hour=spot_prices(self._aws, region, list(names), now))

        return self._each(regions, ask)

    def _listed(self, pool: Pool) -> Decimal:
        """Return the on-demand price: what is paid for such machines, and what spot machines are capped at."""
        if self._renew is None or pool.market is Market.SPOT:
            return self._catalog.price(pool.instance_type, pool.region).usd_per_hour
        return self._catalog.price_at_most(pool.instance_type, pool.region, self._now().date())

    def _renew_lists(self, regions: tuple[str, ...]) -> None:
        for region in regions:
            if self._renew is None or region in self._renewed:
                continue
            self._renewed.add(region)
            if not self._catalog.is_dated(region, self._now().date()):
                continue
            try:
                self._catalog = self._renew(region)
            except GpucloudError as error:
                with self._lock:
                    self._remarks[f"on-demand prices of {region} count as 25 % above the list: {error.message}"] = None

    def _ask(self, regions: tuple[str, ...], machines: tuple[Machine, ...], wanted: Resources) -> tuple[Offer, ...]:
        found = self._each(regions, lambda region: self._region(region, machines, wanted))
        return tuple(offer for offers in found.values() for offer in offers)

    def _each(self, regions: tuple[str, ...], ask: Callable[[str], _T]) -> dict[str, _T]:
        """Ask all regions side by side."""
        found: dict[str, _T] = {}
        errors: list[GpucloudError] = []
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            asked = [(region, pool.submit(ask, region)) for region in regions]
        for region, answer in asked:
            try:
                found[region] = answer.result()
            except GpucloudError as error:
                errors.append(error)
                with self._lock:
                    self._remarks[f"{region} is left out: {error.message}"] = None
        if errors and len(errors) == len(regions):
            raise errors[0]
        return found

    def _region(self, region: str, machines: tuple[Machine, ...], wanted: Resources) -> list[Offer]:
        names = [machine.name for machine in machines]
        offered = zones_of(self._aws, region, names)
        spot = spot_prices(self._aws, region, names, self._now()) if wanted.market.allows(Market.SPOT) else {}
        return [
            self._offer(machine, Pool(instance_type=machine.name, zone=zone, market=market), spot, wanted.nodes)
            for machine in machines
            for zone in sorted(offered.get(machine.name, ()))
            for market in RENTED
            if wanted.market.allows(market)
        ]

    def _offer(self, machine: Machine, pool: Pool, spot: dict[str, dict[str, Decimal]], nodes: int) -> Offer:
        listed = self._listed(pool)
        price = spot.get(machine.name, {}).get(pool.zone, listed) if pool.market is Market.SPOT else listed
        return Offer(
            pool=pool,
            usd_per_hour=price,
            # A refreshed spot price above an old list price shows that the list price has risen.
            cap_usd_per_hour=max(listed, price),
            as_of=self._now(),
            gpus=machine.gpus,
            gpu=machine.gpu,
            vram_gib=machine.vram_gib,
            vcpus=machine.vcpus,
            efa=machine.fabric(nodes),
        )


# A market without AWS: the catalog's prices, for whoever looks around before having an account.


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
