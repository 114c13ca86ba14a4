"""A recorded market as a job would have seen it: some of its zones, for so many nodes, look by look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import TypeVar

from gpucloud.domain.errors import UsageError
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone
from gpucloud.domain.offer import PricePoint

LOOK_S = 180
"""How often a replayed job looks at its market, and may act: three minutes, as in the published replays."""

_UNDATED = datetime(2021, 1, 1, tzinfo=timezone.utc)
_Value = TypeVar("_Value")


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

    `prices` are each zone's points, for the books; the views' are `beside_usd_per_hour` higher, what a machine's disk
    and address cost, as policies are told them.
    """

    market: RecordedMarket
    nodes: int
    looks: int
    changes: tuple[int, ...]
    views: tuple[tuple[ZoneView, ...], ...]
    prices: tuple[tuple[PricePoint, ...], ...]
    beside_usd_per_hour: float = 0.0

    def when(self, seconds: float) -> datetime:
        """Return the moment so many seconds after the recording's first look."""
        return moment(self.market, seconds)


def timeline(
    market: RecordedMarket, zones: Sequence[RecordedZone], nodes: int, beside_usd_per_hour: Decimal = Decimal(0)
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
    told = [{look: usd + beside_usd_per_hour for look, usd in track.items()} for track in prices]
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
        beside_usd_per_hour=float(beside_usd_per_hour),
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
