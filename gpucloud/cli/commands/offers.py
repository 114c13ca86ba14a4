"""`offers`: the GPU machines that a cloud rents, filtered and ranked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpucloud.cli.render.words import say, say_json, table, tell, usd
from gpucloud.cli.target import read_target
from gpucloud.domain.errors import CredentialsError, ProvisionError, UsageError
from gpucloud.domain.job.quantities import parse_usd
from gpucloud.domain.job.spec import AwsChoices, Cloud, Market, MarketPolicy, Resources
from gpucloud.domain.market.catalog import Catalog, ListPrice, aged
from gpucloud.domain.market.listing import Listing, Order, Query, SpotRange
from gpucloud.usecases.machines import Found, look, understood
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
            f"~ and risk: savings and monthly interruptions as AWS's Spot Instance advisor had them on"
            f" {aged(catalog.advisor.as_of, now)}"
        )


def _assumed(catalog: Catalog, listed: list[Listing]) -> str:
    parts = [said] if (said := catalog.assumed(one.region for one in listed)) else []
    if any(one.on_demand is not None and one.on_demand.bound for one in listed):
        parts.append("≤ where none is listed: gpucloud catalog refresh")
    return "".join(f"; {part}" for part in parts)


# Listings as a table for people, and as JSON for programs.


_Cell = Callable[[Listing, MarketPolicy], str]


def offers_text(shown: Sequence[Listing], market: MarketPolicy, *, width: int) -> str:
    """Return the listings as a table; on a terminal of `width` columns (0: none) without the columns least needed.

    A column in which nothing stands is left out.
    """
    columns = [(name, [cell(one, market) for one in shown]) for name, cell in _COLUMNS.items()]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    for least in _LEAST_NEEDED:
        if not width or _width(columns) <= width:
            break
        columns = [column for column in columns if column[0] != least]
    return table(list(zip(*(_column(name, cells) for name, cells in columns), strict=True)))


def offers_json(found: Found) -> dict[str, Any]:
    """Return the query as it was understood, and all listings."""
    query = found.query
    return {
        "query": {
            "gpu": list(query.gpu),
            "gpus": query.gpus,
            "vram_gib": query.vram_gib,
            "network_gbps": query.network_gbps,
            "efa": query.efa,
            "nvlink": query.nvlink,
            "types": list(query.types),
            "regions": list(query.regions),
            "market": query.market.value,
            "max_usd_per_hour": _usd(query.usd_per_hour),
        },
        "offers": [_listing_json(one, query.market) for one in found.listings],
    }


def _column(name: str, cells: Sequence[str]) -> list[str]:
    """Return the head and the cells; numbers stand at the right."""
    lines = [name, *cells]
    return lines if name in _WORDS else [line.rjust(max(map(len, lines))) for line in lines]


def _width(columns: Sequence[tuple[str, Sequence[str]]]) -> int:
    return sum(max(map(len, (name, *cells))) for name, cells in columns) + 2 * (len(columns) - 1)


def _gpus(one: Listing, _: MarketPolicy) -> str:
    machine = one.machine
    return f"{machine.gpus or f'{machine.gpu_part:g}'} × {machine.gpu}"


def _network(one: Listing, _: MarketPolicy) -> str:
    lasting, burst = one.machine.network_gbps, one.machine.burst_gbps
    if lasting is None:
        return ""
    return f"{lasting:g}–{burst:g}" if burst else f"{lasting:g}"


def _spot(one: Listing, market: MarketPolicy) -> str:
    if not market.allows(Market.SPOT):
        return ""
    if one.spot is None:
        return "none" if one.spot_asked else "?"
    low, high = _price(one.spot.low_usd_per_hour), _price(one.spot.high_usd_per_hour)
    return f"~{low}" if one.spot.estimated else low if low == high else f"{low}–{high}"


def _on_demand(one: Listing, _: MarketPolicy) -> str:
    if one.on_demand is None:
        return "?"
    return f"{'≤' if one.on_demand.bound else ''}{_price(one.on_demand.usd_per_hour)}"


def _at_most(one: Listing, market: MarketPolicy) -> str:
    """Mark what is made of a bound."""
    bound = one.on_demand if one.on_demand is not None and one.on_demand.bound else None
    return "≤" if bound is not None and one.usd_per_hour(market) == bound.usd_per_hour else ""


def _saving(one: Listing, market: MarketPolicy) -> str:
    percent = one.saving_percent
    if percent is None or not market.allows(Market.SPOT):
        return ""
    return f"{percent}%" if percent >= 0 else f"{-percent}% dearer"


def _zones(one: Listing, _: MarketPolicy) -> str:
    spot = one.spot.zones if one.spot is not None else 0
    if spot and one.zones is not None:
        return f"{spot} of {one.zones}"
    return str(spot or one.zones or "")


def _optional(price: Decimal | None) -> str:
    return "?" if price is None else _price(price)


def _price(amount: Decimal) -> str:
    """Return a price as it is compared here: bills are exact, and elsewhere."""
    return f"{amount:.3f}" if amount < 10 else f"{amount:.2f}"


_COLUMNS: dict[str, _Cell] = {
    "machine": lambda one, _: one.machine.name,
    "GPUs": _gpus,
    "GB": lambda one, _: str(one.machine.vram_gib),
    "link": lambda one, _: "NVLink" if one.machine.nvlink else "PCIe" if one.machine.gpus > 1 else "",
    "Gbps": _network,
    "EFA": lambda one, _: str(one.machine.efa or ""),
    "region": lambda one, _: one.region,
    "zones": _zones,
    "spot": _spot,
    "on demand": _on_demand,
    "saves": _saving,
    "risk": lambda one, _: one.band.value if one.band else "",
    "score": lambda one, _: str(one.score or ""),
    "per GPU": lambda one, market: _at_most(one, market) + _optional(one.usd_per_gpu_hour(market)),
    "per PFLOP": lambda one, market: _at_most(one, market) + _optional(one.usd_per_pflop_hour(market)),
    "not run": lambda one, _: one.machine.why_not or "",
}
_WORDS = {"machine", "GPUs", "link", "region", "not run"}
_LEAST_NEEDED = ("EFA", "link", "zones", "Gbps", "per PFLOP", "saves", "score", "GB", "risk", "not run")


def _listing_json(one: Listing, market: MarketPolicy) -> dict[str, Any]:
    machine, sheet = one.machine, one.machine.sheet
    return {
        "instance_type": machine.name,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "gpu_part": machine.gpu_part,
        "vram_gib": machine.vram_gib,
        "nvlink": machine.nvlink,
        "tflops": dict(sheet.tflops) if sheet else {},
        "cuda": sheet.cuda if sheet else None,
        "driver": sheet.driver if sheet else None,
        "vcpus": machine.vcpus,
        "memory_gib": machine.memory_gib,
        "network_gbps": machine.network_gbps,
        "burst_gbps": machine.burst_gbps,
        "efa": machine.efa,
        "nvme_gb": machine.nvme_gb,
        "architecture": machine.architecture,
        "not_run": machine.why_not,
        "region": one.region,
        "zones": one.zones,
        "on_demand": _on_demand_json(one.on_demand),
        "spot": _spot_json(one.spot),
        "spot_asked": one.spot_asked,
        "saving_percent": one.saving_percent,
        "interruptions": one.band.value if one.band else None,
        "placement_score": one.score,
        "usd_per_gpu_hour": _usd(one.usd_per_gpu_hour(market)),
        "usd_per_pflop_hour": _usd(one.usd_per_pflop_hour(market)),
    }


def _on_demand_json(price: ListPrice | None) -> dict[str, Any] | None:
    if price is None:
        return None
    return {"usd_per_hour": usd(price.usd_per_hour), "as_of": price.as_of.isoformat(), "bound": price.bound}


def _spot_json(spot: SpotRange | None) -> dict[str, Any] | None:
    if spot is None:
        return None
    return {
        "low_usd_per_hour": usd(spot.low_usd_per_hour),
        "high_usd_per_hour": usd(spot.high_usd_per_hour),
        "zones": spot.zones,
        "as_of": spot.as_of.isoformat(),
        "estimated": spot.estimated,
    }


def _usd(amount: Decimal | None) -> str | None:
    return None if amount is None else usd(amount)
