"""Recorded spot markets: machines of a type in each zone, tick by tick; and one as a job would have seen it."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from difflib import get_close_matches
from typing import TypeVar

from gpucloud.domain.errors import UsageError
from gpucloud.domain.market.policies import ZoneState
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import PricePoint, region_of

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
            known = dict.fromkeys([*(zone.name for zone in market.zones), *market.regions, "all"])
            close = get_close_matches(word.lower(), [*market.regions, *known], n=1)
            near = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"{market.name} has no zone or region {word!r}", hint=f"there are {', '.join(known)}{near}"
            )
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


# A recorded market as a job would have seen it: some of its zones, for so many nodes, look by look.


LOOK_S = 180
"""How often a replayed job looks at its market, and may act: three minutes, as in the published replays."""

_UNDATED = datetime(2021, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneView:
    """A zone between two changes: whether it has all nodes and since which look, how many there are, their price."""

    zone: str
    up: bool
    since: int
    nodes: int
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a job of `nodes` nodes sees: from look `changes[i]` on `views[i]`, one view a zone; `looks` looks in all.

    `prices` are each zone's points, for the bill; the views' are `extras_usd_per_hour` higher, what a machine's disk
    and address cost, as policies are told them.
    """

    market: RecordedMarket
    nodes: int
    looks: int
    changes: tuple[int, ...]
    views: tuple[tuple[ZoneView, ...], ...]
    prices: tuple[tuple[PricePoint, ...], ...]
    extras_usd_per_hour: float = 0.0
    bills: dict[Terms, dict[Hashable, Decimal]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What machines cost by these terms whose lives were metered: replays from other starts live through the same."""

    _told: dict[int, tuple[ZoneState, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def told(self, change: int, look: int) -> tuple[ZoneState, ...]:
        """Return what a policy is told of the zones at a look; `change` is the newest by then. It is kept, too."""
        if look not in self._told:
            self._told[look] = tuple(
                ZoneState(
                    zone=view.zone,
                    up=view.up,
                    age_s=(look - view.since) * LOOK_S,
                    usd_per_hour=view.usd_per_hour,
                    nodes=view.nodes,
                )
                for view in self.views[change]
            )
        return self._told[look]

    def when(self, seconds: float) -> datetime:
        """Return the moment so many seconds after the recording's first look."""
        return moment(self.market, seconds)


def timeline(
    market: RecordedMarket, zones: Sequence[RecordedZone], nodes: int, extras_usd_per_hour: Decimal = Decimal(0)
) -> Timeline:
    """Return the market as a job of `nodes` nodes sees it.

    Where only one node was looked for, all of the job's are taken to come and go together. What came and went between
    two looks is not seen. Raises UsageError for more nodes than the recorded group had.
    """
    if 1 < market.nodes < nodes:
        raise UsageError(
            f"{market.name} was recorded with {market.nodes} nodes, and the job wants {nodes}",
            hint="gpucloud simulate --list says with how many nodes each market was recorded",
        )
    each = nodes if market.nodes == 1 else 1
    supplies = [_seen(market, [(tick, there * each) for tick, there in zone.nodes]) for zone in zones]
    prices = [_seen(market, zone.prices) for zone in zones]
    changes = tuple(sorted({look for supply in supplies for look in supply} | {look for usd in prices for look in usd}))
    told = [{look: usd + extras_usd_per_hour for look, usd in track.items()} for track in prices]
    columns = [_views(zone.name, s, p, changes, nodes) for zone, s, p in zip(zones, supplies, told, strict=True)]
    return Timeline(
        market=market,
        nodes=nodes,
        looks=int(market.length.total_seconds()) // LOOK_S,
        changes=changes,
        views=tuple(zip(*columns, strict=True)),
        prices=tuple(
            tuple(PricePoint(since=moment(market, look * LOOK_S), usd_per_hour=usd) for look, usd in track.items())
            for track in prices
        ),
        extras_usd_per_hour=float(extras_usd_per_hour),
    )


def moment(market: RecordedMarket, seconds: float) -> datetime:
    """Return the moment so many seconds after the recording began; of an undated one, counted from 2021."""
    return (market.started_at or _UNDATED) + timedelta(seconds=seconds)


def _seen(market: RecordedMarket, changes: Sequence[tuple[int, _Value]]) -> dict[int, _Value]:
    """Return each change at the first look that is not before it, the last of several at one look."""
    tick_s = market.tick.total_seconds()
    return {math.ceil(tick * tick_s / LOOK_S): value for tick, value in changes}


def _views(
    name: str, supply: Mapping[int, int], prices: Mapping[int, Decimal], changes: Sequence[int], nodes: int
) -> list[ZoneView]:
    """Return the zone's view from each of the changes on, the same one where nothing of it changed."""
    view = ZoneView(
        zone=name, up=supply[0] >= nodes, since=0, nodes=min(supply[0], nodes), usd_per_hour=float(prices[0])
    )
    views = []
    for look in changes:
        if look in supply:
            there = supply[look]
            up = there >= nodes
            view = replace(view, up=up, since=view.since if up == view.up else look, nodes=min(there, nodes))
        if look in prices:
            view = replace(view, usd_per_hour=float(prices[look]))
        views.append(view)
    return views
