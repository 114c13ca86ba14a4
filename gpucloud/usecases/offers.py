"""Looking around: which machines answer a question, with spot prices of now where the cloud can be asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from gpucloud.domain.catalog import Catalog
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Market
from gpucloud.domain.listing import Listing, listings, rank, suits
from gpucloud.domain.query import Order, Query
from gpucloud.ports import SpotQuotes


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
