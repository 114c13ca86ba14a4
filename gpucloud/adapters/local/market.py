"""The embedded cloud's market: a spot price series recorded on EC2 in 2020, replayed for ever."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from importlib import resources
from typing import Any

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job import RENTED, Market, Resources
from gpucloud.domain.offer import Offer, Pool, PricePoint

_ANCHOR = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""The wall time at which the recorded series starts to be replayed; fixed, so that a time has one price for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One zone's spot prices: offsets from the start of a replay, ascending from 0, and the price from each on."""

    offsets: tuple[timedelta, ...]
    prices: tuple[Decimal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One instance type: worker slots, the list price, the spot series of each zone that has it."""

    gpus: int
    on_demand: Decimal
    spot: dict[str, _Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    length: timedelta
    kinds: dict[str, _Kind]


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class LocalMarket:
    """Implements `MarketData` from the package's own recording; plain reading, the same answer at the same time.

    The source of the recording and its licence are in `prices.NOTICE`.
    """

    def __init__(self, *, now: Callable[[], datetime] = _utc_now) -> None:
        self._now = now

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:  # noqa: ARG002  few enough to give them all
        """Return a spot and an on-demand offer for every type and zone, with the prices of this moment."""
        now = self._now()
        found = []
        for instance_type, kind in self._recording.kinds.items():
            for zone in kind.spot:
                for market in RENTED:
                    pool = Pool(instance_type=instance_type, zone=zone, market=market)
                    (point,) = self.prices(pool, now, now)
                    found.append(
                        Offer(
                            pool=pool,
                            usd_per_hour=point.usd_per_hour,
                            cap_usd_per_hour=kind.on_demand,
                            as_of=now,
                            gpus=kind.gpus,
                        )
                    )
        return tuple(found)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's points that cover start..end; ProvisionError for a pool that was not recorded."""
        kind = self._recording.kinds.get(pool.instance_type)
        series = kind.spot.get(pool.zone) if kind else None
        if kind is None or series is None:
            known = ", ".join(self._recording.kinds)
            raise ProvisionError(f"the embedded cloud has no {pool}", hint=f"take one of {known} in us-east-2a")
        if pool.market is Market.ON_DEMAND:
            return (PricePoint(since=start, usd_per_hour=kind.on_demand),)
        return tuple(_replayed(series, self._recording.length, start, end))

    @cached_property
    def _recording(self) -> _Recording:
        text = resources.files("gpucloud.adapters.local").joinpath("prices.json").read_text(encoding="utf-8")
        raw = json.loads(text)
        kinds = {name: _kind(kind) for name, kind in raw["types"].items()}
        return _Recording(length=timedelta(seconds=raw["length_s"]), kinds=kinds)


def _kind(raw: dict[str, Any]) -> _Kind:
    spot = {
        zone: _Series(
            offsets=tuple(timedelta(seconds=offset) for offset, _ in points),
            prices=tuple(Decimal(price) for _, price in points),
        )
        for zone, points in raw["spot"].items()
    }
    return _Kind(gpus=raw["gpus"], on_demand=Decimal(raw["on_demand_usd_per_hour"]), spot=spot)


def _replayed(series: _Series, length: timedelta, start: datetime, end: datetime) -> list[PricePoint]:
    """Return the point that covers `start` and every later one up to `end`, over as many replays as that takes."""
    replay, into = divmod(start - _ANCHOR, length)
    index = bisect_right(series.offsets, into) - 1
    points: list[PricePoint] = []
    while True:
        since = _ANCHOR + replay * length + series.offsets[index]
        if points and since > end:
            return points
        points.append(PricePoint(since=since, usd_per_hour=series.prices[index]))
        index += 1
        if index == len(series.offsets):
            replay, index = replay + 1, 0
