"""Recorded spot markets: how many machines of a type each zone had, tick by tick, and what they cost."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TypeVar

from gpucloud.domain.errors import UsageError
from gpucloud.domain.offer import region_of

_SMALLEST = Decimal("0.0001")  # as AWS writes spot prices
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedZone:
    """One zone: `nodes` are (tick, how many machines there were from then on), `prices` (tick, USD per node-hour).

    Both begin at tick 0 and name only changes.
    """

    name: str
    nodes: tuple[tuple[int, int], ...]
    prices: tuple[tuple[int, Decimal], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMarket:
    """What was recorded of one machine type: `ticks` spans of `tick` each, in every zone at the same times.

    `about` says how it was recorded, `source` where it is published and under which licence. `nodes` is the most that
    were looked for at a time. `started_at` is None where the source does not say when. Where `prices_recorded` is
    false, the prices are an assumed share of the list price.
    """

    name: str
    about: str
    source: str
    instance_type: str
    gpus: int
    gpu: str
    nodes: int
    started_at: datetime | None
    tick: timedelta
    ticks: int
    on_demand_usd_per_hour: Decimal
    prices_recorded: bool
    zones: tuple[RecordedZone, ...]

    @property
    def length(self) -> timedelta:
        """How long was recorded."""
        return self.tick * self.ticks

    @property
    def machine(self) -> str:
        """The machine as people name it: `p3.2xlarge (1 × V100)`."""
        return f"{self.instance_type} ({self.gpus} × {self.gpu})"

    def at_price(self, on_demand_usd_per_hour: Decimal) -> RecordedMarket:
        """Return the market as if its machine cost that much on demand: spot prices keep their share of it."""
        share = on_demand_usd_per_hour / self.on_demand_usd_per_hour
        zones = (
            replace(zone, prices=tuple((tick, (usd * share).quantize(_SMALLEST)) for tick, usd in zone.prices))
            for zone in self.zones
        )
        return replace(self, on_demand_usd_per_hour=on_demand_usd_per_hour, zones=tuple(zones))

    def at_prices(self, on_demand_usd_per_hour: Decimal, spot_usd_per_hour: Decimal) -> RecordedMarket:
        """Return the market as if its machines always cost that much."""
        zones = tuple(replace(zone, prices=((0, spot_usd_per_hour),)) for zone in self.zones)
        return replace(self, on_demand_usd_per_hour=on_demand_usd_per_hour, zones=zones, prices_recorded=False)

    @property
    def regions(self) -> tuple[str, ...]:
        """The zones' regions, in the zones' order."""
        return tuple(dict.fromkeys(region_of(zone.name) for zone in self.zones))


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """How well one zone, or several taken as one, gave `nodes` machines: the share of the time, losses a day."""

    available: float
    interruptions_per_day: float


def zone_set(market: RecordedMarket, asked: str) -> tuple[RecordedZone, ...]:
    """Return the zones that "all", a region, a zone, or several of these joined by commas name; in the market's order.

    Raises UsageError for what the market does not have.
    """
    wanted = set()
    for word in asked.split(","):
        found = {zone.name for zone in market.zones if word in ("all", zone.name, region_of(zone.name))}
        if not found:
            known = ", ".join(dict.fromkeys([*(zone.name for zone in market.zones), *market.regions, "all"]))
            raise UsageError(f"{market.name} has no zone or region {word!r}", hint=f"there are {known}")
        wanted |= found
    return tuple(zone for zone in market.zones if zone.name in wanted)


def recorded_beside(market: RecordedMarket, others: Iterable[RecordedMarket]) -> tuple[str, ...]:
    """Return the names of the markets that were recorded at the same time, its own among them."""
    return tuple(one.name for one in others if one.name == market.name or _overlap(one, market))


def _overlap(one: RecordedMarket, other: RecordedMarket) -> bool:
    if one.started_at is None or other.started_at is None:
        return False
    return one.started_at < other.started_at + other.length and other.started_at < one.started_at + one.length


def supply(zones: Sequence[RecordedZone], ticks: int, tick: timedelta, *, nodes: int = 1) -> Supply:
    """Return how much of the time any of the zones had `nodes` machines, and how often a day none had any more."""
    edges = sorted({at for zone in zones for at, _ in zone.nodes})
    up = [any(value_at(zone.nodes, at) >= nodes for zone in zones) for at in edges]
    spans = [end - start for start, end in zip(edges, [*edges[1:], ticks], strict=True)]
    lost = sum(before and not after for before, after in itertools.pairwise(up))
    return Supply(
        available=sum(span for span, there in zip(spans, up, strict=True) if there) / ticks,
        interruptions_per_day=lost / (ticks * tick / timedelta(days=1)),
    )


def mean_price(zone: RecordedZone, ticks: int) -> Decimal:
    """Return the zone's mean spot price over all ticks, in USD per node-hour."""
    ends = [*(at for at, _ in zone.prices[1:]), ticks]
    return sum((price * (end - at) for (at, price), end in zip(zone.prices, ends, strict=True)), Decimal(0)) / ticks


def value_at(changes: Sequence[tuple[int, _Value]], tick: int) -> _Value:
    """Return the value of the last change at or before `tick`."""
    return changes[bisect_right(changes, tick, key=lambda change: change[0]) - 1][1]
