"""`offers`: the GPU machines that a cloud rents, filtered and ranked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING

from gpucloud.cli.offertables import offers_json, offers_text
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.target import read_target
from gpucloud.domain.catalog import Catalog, aged
from gpucloud.domain.errors import CredentialsError, ProvisionError, UsageError
from gpucloud.domain.job import AwsChoices, Cloud, MarketPolicy, Resources
from gpucloud.domain.listing import Listing
from gpucloud.domain.quantities import parse_usd
from gpucloud.domain.query import Order, Query
from gpucloud.usecases.offers import Found, look, understood
from gpucloud.wiring import Gpucloud

if TYPE_CHECKING:
    from gpucloud.wiring.aws import AwsCloud

_UNBOUNDED = (0, 0)  # what is not shown on a terminal has all columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was written on the command line; what is None or empty there is the job file's, if one was named."""

    target: str | None
    query: Query
    market: MarketPolicy | None
    max_price: str | None
    order: Order
    limit: int
    offline: bool


def offers(asked: Asked, *, as_json: bool) -> int:
    """List the machines that fit, best first; return the exit code."""
    cloud = Gpucloud()
    job = read_target(cloud, asked.target, Cloud.AWS).job if asked.target is not None else None
    choices, wanted = (job.aws, job.resources) if job else (AwsChoices(), None)
    catalog = cloud.aws(choices, Resources()).catalog
    query = understood(_query(asked, wanted), catalog)
    live = None if asked.offline else cloud.aws(choices, Resources(regions=query.regions))
    found = _found(query, asked.order, catalog, live)
    shown = found.listings[: asked.limit] if asked.limit and not as_json else found.listings
    for line in _sources(found.catalog, shown, datetime.now(timezone.utc)):
        tell(line)
    if as_json:
        say_json(offers_json(found))
    elif found.listings:
        say(offers_text(shown, found.query.market, width=shutil.get_terminal_size(_UNBOUNDED).columns))
        if len(shown) < len(found.listings):
            tell(f"{len(found.listings) - len(shown)} more: --limit 0 lists all")
    else:
        say("no machine in the catalog fits")
    return 0


def _query(asked: Asked, wanted: Resources | None) -> Query:
    """The command line over the job file."""
    most = _sum(asked.max_price) if asked.max_price is not None else None
    query = replace(asked.query, market=asked.market or MarketPolicy.AUTO, usd_per_hour=most)
    if wanted is None:
        return query
    return replace(
        query,
        gpu=query.gpu or wanted.gpu,
        gpus=query.gpus or wanted.gpus,
        vram_gib=query.vram_gib or wanted.vram_gib,
        types=wanted.types,
        regions=query.regions or wanted.regions,
        market=asked.market or wanted.market,
    )


def _sum(text: str) -> Decimal:
    """Return a sum with or without its unit."""
    try:
        return parse_usd(text if text.strip(" .0123456789") else f"{text} USD")
    except ValueError as error:
        raise UsageError(f"--max-price: {error}", hint="--max-price 4.50") from error


def _found(query: Query, order: Order, catalog: Catalog, live: AwsCloud | None) -> Found:
    """Ask AWS where it can be asked, and say why not where it cannot."""
    if live is not None:
        try:
            tell(f"AWS {live.account().caller()}")
            market = live.market()
            found = look(query, order, catalog, market)
        except (CredentialsError, ProvisionError) as error:
            tell(f"spot prices are not those of now: {error.message}")
        else:
            for line in market.remarks:
                tell(line)
            return found
    return look(query, order, catalog)


def _sources(catalog: Catalog, shown: tuple[Listing, ...], now: datetime) -> Iterator[str]:
    """Say where the prices come from, and how old they are."""
    if shown:
        yield "prices in USD per hour of one machine, without disk and address"
    listed = [one for one in shown if one.on_demand is not None]
    if listed:
        oldest = min(one.on_demand.as_of for one in listed if one.on_demand is not None)
        yield f"on demand: list prices of {aged(oldest, now)}{_assumed(catalog, listed)}"
    read = [one.spot.as_of for one in shown if one.spot is not None and not one.spot.estimated]
    if read:
        yield f"spot: prices of {aged(min(read), now)}"
    if catalog.advisor is not None and any(one.band or (one.spot and one.spot.estimated) for one in shown):
        yield (
            f"~ and taken: savings and monthly interruptions as AWS's Spot Instance advisor had them on"
            f" {aged(catalog.advisor.as_of, now)}"
        )


def _assumed(catalog: Catalog, listed: list[Listing]) -> str:
    parts = [said] if (said := catalog.assumed(one.region for one in listed)) else []
    if any(one.on_demand is not None and one.on_demand.bound for one in listed):
        parts.append("≤ where none is listed: gpucloud catalog refresh")
    return "".join(f"; {part}" for part in parts)
