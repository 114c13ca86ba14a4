"""The catalog: which GPU machines a cloud rents, where, for how much; and how many it lets its caller rent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Resources
from gpucloud.domain.node.gate.models import DataSheet, sheet_of
from gpucloud.domain.offer import EfaLayout

_NOWHERE_DEARER = Decimal(2)
"""No region's list price of a GPU machine is further above us-east-1's (São Paulo is the dearest)."""
_DATED_AFTER = timedelta(days=30)
_RISEN = Decimal("1.25")
"""What a list price that nobody could confirm for a month is taken to have risen by at most: AWS's have only fallen."""
_RUN_ON = "x86_64"  # the machine images that gpucloud starts, and the wheels that it installs there


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type. `vram_gib` is one GPU's, as it is sold; `efa` counts its EFA interfaces, `cards` its network
    cards.

    `network_gbps` is what the network carries for hours, `burst_gbps` for minutes where that is more; None: not known.
    `nvme_gb` is its own disks' size. Of a type with a part of a GPU, `gpus` is 0 and `gpu_part` is that part.
    """

    name: str
    gpu: str
    gpus: int
    vram_gib: int
    vcpus: int
    memory_gib: int
    efa: int
    network_gbps: float | None = None
    burst_gbps: float | None = None
    nvme_gb: int | None = None
    architecture: str = _RUN_ON
    cards: int = 1
    gpu_part: float = 1.0

    @property
    def why_not(self) -> str | None:
        """Why gpucloud runs no job on such a machine; None where it does."""
        if self.gpus < 1:
            return "a part of a GPU"
        return None if self.architecture == _RUN_ON else self.architecture

    @property
    def sheet(self) -> DataSheet | None:
        """Its GPU's data sheet."""
        return sheet_of(self.gpu)

    @property
    def nvlink(self) -> bool:
        """Whether its GPUs are joined by NVLink; else they meet over PCIe, or there is one only."""
        return self.gpus > 1 and self.sheet is not None and self.sheet.nvlink_gbps > 0

    @property
    def training_tflops(self) -> float | None:
        """The peak of its GPUs together in mixed precision; None where no data sheet states it."""
        each = self.sheet.training_tflops if self.sheet else None
        return each * (self.gpus or self.gpu_part) if each else None

    def fabric(self, nodes: int) -> EfaLayout:
        """Return the EFA interfaces that a job of so many nodes has there: none alone, which would cost an address."""
        if nodes < 2 or not self.efa:
            return EfaLayout()
        return EfaLayout(interfaces=self.efa, cards=max(self.cards, self.efa))

    def fits(self, wanted: Resources) -> bool:
        """Whether such a machine does what the job asked for."""
        return (
            self.why_not is None
            and (not wanted.types or self.name in wanted.types)
            and self.gpus >= wanted.gpus
            and (not wanted.gpu or self.gpu in wanted.gpu)
            and (wanted.vram_gib is None or self.vram_gib >= wanted.vram_gib)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice:
    """An on-demand price; `bound`: none is listed for the region, and this is what it is at most."""

    usd_per_hour: Decimal
    as_of: date
    bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """One region's on-demand prices by instance type; those in `bounds` are estimates from above.

    `taken_from` is the region whose list it is, where none of its own was read.
    """

    as_of: date
    usd_per_hour: Mapping[str, Decimal]
    bounds: frozenset[str] = frozenset()
    taken_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotList:
    """A region's spot prices at a moment, by instance type and zone; a type that is not there was not offered."""

    as_of: datetime
    usd_per_hour: Mapping[str, Mapping[str, Decimal]]


class Band(Enum):
    """How often AWS took spot machines of a type in a month: the bands of its Spot Instance advisor, best first."""

    UNDER_5 = "<5%"
    UNDER_10 = "5-10%"
    UNDER_15 = "10-15%"
    UNDER_20 = "15-20%"
    OVER_20 = ">20%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the advisor said of a type in a region: how far spot was below on demand, in percent, and the band."""

    saving: int
    band: Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisor:
    """The advisor's word as of a day, by region and instance type."""

    as_of: date
    advice: Mapping[str, Mapping[str, Advice]]

    def of(self, name: str, region: str) -> Advice | None:
        """Return what it said of the type there; None when nothing."""
        return self.advice.get(region, {}).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """AWS's spot placement scores of a GPU model in a region, by zone id: 10 is best, and no promise."""

    as_of: datetime
    by_zone: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Machines by name; by region: price lists, spot prices that were asked for, in how many zones a type is offered.

    `scores` are by region and GPU model.
    """

    machines: Mapping[str, Machine]
    prices: Mapping[str, PriceList]
    zones: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    spot: Mapping[str, SpotList] = field(default_factory=dict)
    advisor: Advisor | None = None
    scores: Mapping[str, Mapping[str, Scores]] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region of which something is known."""
        return tuple(sorted({*self.zones, *self.prices, *self.spot}))

    @property
    def gpus(self) -> tuple[str, ...]:
        """Every GPU model."""
        return tuple(sorted({machine.gpu for machine in self.machines.values()}))

    def fitting(self, wanted: Resources) -> tuple[Machine, ...]:
        """Return the machines that do what the job asked for, by name.

        UsageError where there is none, for a GPU of that name is not made.
        """
        found = tuple(self.machines[name] for name in sorted(self.machines) if self.machines[name].fits(wanted))
        unknown = [name for name in wanted.gpu if name not in self.gpus]
        if not found and unknown:
            by_small = {one.casefold(): one for one in self.gpus}
            near = get_close_matches(unknown[0].casefold(), by_small, n=1)
            hint = f"did you mean {by_small[near[0]]}?" if near else f"there are {', '.join(self.gpus)}"
            raise UsageError(f"the catalog has no GPU {unknown[0]!r}", hint=hint)
        return found

    def machine(self, name: str) -> Machine:
        """Return the instance type; UsageError when the catalog has none of that name."""
        if name not in self.machines:
            raise UsageError(
                f"{name} is not in the catalog of GPU machines",
                hint="correct `resources: {types: […]}`, or `gpucloud catalog refresh` if AWS has it",
            )
        return self.machines[name]

    def price(self, name: str, region: str) -> ListPrice:
        """Return the on-demand price; where none is listed, the highest listed one × 2. UsageError: no such type."""
        known = self.known_price(name, region)
        if known is None:
            self.machine(name)
            raise UsageError(f"no price of {name} is known", hint="gpucloud catalog refresh")
        return known

    def known_price(self, name: str, region: str) -> ListPrice | None:
        """Return the same; None where no region lists the type."""
        prices = self.prices.get(region)
        if prices and name in prices.usd_per_hour:
            bound = name in prices.bounds
            return ListPrice(usd_per_hour=prices.usd_per_hour[name], as_of=prices.as_of, bound=bound)
        elsewhere = [
            ListPrice(usd_per_hour=prices.usd_per_hour[name] * _NOWHERE_DEARER, as_of=prices.as_of, bound=True)
            for prices in self.prices.values()
            if name in prices.usd_per_hour
        ]
        return max(elsewhere, key=lambda price: price.usd_per_hour, default=None)

    def is_dated(self, region: str, today: date) -> bool:
        """Whether the region's own list prices were never read, or not for a month."""
        prices = self.prices.get(region)
        return prices is None or prices.taken_from is not None or today - prices.as_of > _DATED_AFTER

    def price_at_most(self, name: str, region: str, today: date) -> Decimal:
        """Return what the type costs on demand at the most: an old price may have risen. UsageError: no such type."""
        price = self.price(name, region)
        return price.usd_per_hour * (_RISEN if self.is_dated(region, today) and not price.bound else 1)

    def offered(self, region: str) -> tuple[str, ...]:
        """Return the types that can be had in the region; where that was not read, those with a list price there."""
        prices = self.prices.get(region)
        names = self.zones.get(region) or (prices.usd_per_hour if prices else {})
        return tuple(sorted(name for name in names if name in self.machines))

    def priced_on(self, regions: tuple[str, ...]) -> date:
        """Return the date of the regions' oldest list prices; of a region without a list, the oldest of all."""
        every = [prices.as_of for prices in self.prices.values()]
        return min(self.prices[name].as_of if name in self.prices else min(every) for name in regions)

    def assumed(self, regions: Iterable[str]) -> str:
        """Return which of the regions' lists are another region's, as people read it; empty where none is."""
        taken = [name for name in sorted(set(regions)) if name in self.prices and self.prices[name].taken_from]
        return f"{', '.join(taken)} taken to be priced as {self.prices[taken[0]].taken_from}" if taken else ""

    def with_prices(self, region: str, usd_per_hour: Mapping[str, Decimal]) -> Catalog:
        """Return this catalog with on-demand prices of the region that are known otherwise over its own."""
        own = self.prices.get(region) or PriceList(as_of=self.priced_on((region,)), usd_per_hour={})
        bounds = own.bounds - usd_per_hour.keys()
        told = replace(own, usd_per_hour={**own.usd_per_hour, **usd_per_hour}, bounds=bounds)
        return replace(self, prices={**self.prices, region: told})

    def with_news(self, news: Catalog) -> Catalog:
        """Return this catalog with the machines and the regions of a newer one over it."""
        newer = {
            region: prices
            for region, prices in news.prices.items()
            if region not in self.prices or prices.as_of >= self.prices[region].as_of
        }
        return replace(
            self,
            machines={**self.machines, **news.machines},
            prices={**self.prices, **newer},
            zones={**self.zones, **news.zones},
            spot={**self.spot, **news.spot},
            scores={**self.scores, **news.scores},
        )


def aged(as_of: date, now: datetime) -> str:
    """Return the date with its age, such as `2026-07-20 (125 days old)`."""
    days = (now.date() - as_of).days
    age = "today" if days < 1 else "1 day old" if days == 1 else f"{days} days old"
    return f"{as_of} ({age})"


# Who the caller is to the cloud, and how much the cloud lets it rent.


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An identity: the account, its own name (an ARN), the profile that was used, the region and its partition."""

    account: str
    arn: str
    profile: str | None
    region: str
    partition: str

    def __str__(self) -> str:
        profile = f", profile {self.profile}" if self.profile else ""
        return f"account {self.account} as {self.arn.rpartition(':')[2]}{profile}, region {self.region}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A quota in vCPUs: its code and name, the limit, and what of it is in use (running and asked for).

    `limit` and `used` are None where the caller may not read them.
    """

    region: str
    code: str
    name: str
    limit: int | None
    used: int | None

    @property
    def left(self) -> int | None:
        """How many vCPUs can still be started; None when that is not known."""
        return None if self.limit is None or self.used is None else max(0, self.limit - self.used)

    def holds(self, vcpus: int) -> bool:
        """Whether so many can be started, as far as is known."""
        return self.left is None or self.left >= vcpus


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """A wish for a higher quota; `status` is the cloud's own word (PENDING, CASE_OPENED, APPROVED, DENIED …)."""

    region: str
    code: str
    name: str
    wanted: int
    status: str
    asked_at: datetime
