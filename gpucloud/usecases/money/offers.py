"""Which machines answer a question, with prices of now, and what the account's quotas allow of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from gpucloud.domain.errors import NoCapacity, UsageError
from gpucloud.domain.job.spec import Job, Market
from gpucloud.domain.market.catalog import Catalog, Headroom, QuotaRequest
from gpucloud.domain.market.listing import Listing, Order, Query, listings, rank, suits
from gpucloud.domain.market.plan import fitting
from gpucloud.ports import Account, MarketData, SpotQuotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The listings that answer the query, best first, and the catalog with the prices that count for them."""

    query: Query
    listings: tuple[Listing, ...]
    catalog: Catalog


def understood(query: Query, catalog: Catalog) -> Query:
    """Return the query in the catalog's own words, in the regions whose list prices are known if it names none.

    UsageError with the nearest name for a GPU, a type or a region that the catalog has not got.
    """
    return replace(
        query,
        gpu=tuple(_named(name, "GPU", catalog.gpus) for name in query.gpu),
        types=tuple(_named(name, "GPU machine", tuple(catalog.machines)) for name in query.types),
        regions=tuple(_named(name, "region", catalog.regions) for name in query.regions) or tuple(catalog.prices),
    )


def look(query: Query, order: Order, catalog: Catalog, quotes: SpotQuotes | None = None) -> Found:
    """Return what answers an understood query; `quotes` None: with the spot prices that the catalog has.

    Raises CredentialsError, ProvisionError when no region could be asked for them.
    """
    names = tuple(sorted(name for name, machine in catalog.machines.items() if suits(machine, query)))
    if quotes is not None and names and query.market.allows(Market.SPOT):
        asked = quotes.spot_lists(query.regions, names)
        catalog = replace(catalog, spot={**catalog.spot, **asked})
    return Found(query=query, listings=rank(listings(catalog, query.regions), query, order), catalog=catalog)


def _named(name: str, kind: str, known: Iterable[str]) -> str:
    by_small = {one.casefold(): one for one in known}
    if name.casefold() in by_small:
        return by_small[name.casefold()]
    near = get_close_matches(name.casefold(), by_small, n=1)
    hint = f"did you mean {by_small[near[0]]}?" if near else f"there are {', '.join(sorted(by_small.values()))}"
    raise UsageError(f"the catalog has no {kind} {name!r}", hint=hint)


# What a job needs of the account's quotas, what there is, and asking for more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One quota that the job's machines count against; `vcpus` is the least of it that some offer of the job needs."""

    room: Headroom
    vcpus: int
    instance_type: str

    @property
    def enough(self) -> bool:
        """Whether the machines can be started."""
        return self.room.holds(self.vcpus)

    @property
    def wish(self) -> int:
        """The limit to ask for: what is used and what is needed."""
        return (self.room.used or 0) + self.vcpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Answers about quotas for one market and account."""

    market: MarketData
    account: Account

    def needs(self, job: Job) -> tuple[Need, ...]:
        """Return each quota that the job could use, that of its best offer first; NoCapacity without any offer."""
        found: dict[tuple[str, str], Need] = {}
        for offer in fitting(job, self.market.offers(job.resources)):
            room = self.account.headroom(offer)
            need = Need(room=room, vcpus=offer.vcpus * job.resources.nodes, instance_type=offer.pool.instance_type)
            known = found.get((room.region, room.code))
            if known is None or need.vcpus < known.vcpus:
                found[room.region, room.code] = need
        if not found:
            raise NoCapacity(f"no machine that is known does what {job.name} asks", hint="fewer wishes in `resources:`")
        return tuple(found.values())

    def request(self, job: Job, vcpus: int | None) -> QuotaRequest:
        """Ask for as much as the job needs, or for `vcpus`; UsageError when that is there already."""
        need = self.needs(job)[0]
        wanted = vcpus if vcpus is not None else need.wish
        if need.room.limit is not None and wanted <= need.room.limit:
            raise UsageError(
                f"the quota {need.room.name!r} in {need.room.region} is {need.room.limit} vCPUs already",
                hint="--vcpus N asks for more than that",
            )
        return self.account.ask_for_more(need.room, wanted)
