"""What the embedded cloud rents: GPUs here, a spot market recorded on EC2 in 2020; and a census of what lives there."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from gpucloud.adapters.local.records import Folder, GroupRecord, NodeRecord
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import RENTED, Market, Resources
from gpucloud.domain.node.hardware import Gpu, model_of
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.supervision.strays import CLUSTER, MANAGED, STORE, Thing
from gpucloud.ports import MarketData, Provisioner
from gpucloud.system import smi

_EMBEDDED = "local."
_TYPE = re.compile(r"local\.gpu([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of this machine that its user lets us see (CUDA_VISIBLE_DEVICES), by their UUIDs; all of one model."""

    uuids: tuple[str, ...] = ()
    model: str | None = None
    vram_gib: int | None = None

    def free(self, count: int, taken: Collection[str]) -> tuple[str, ...] | None:
        """Return `count` devices that are not taken; None when there are not so many."""
        left = [uuid for uuid in self.uuids if uuid not in taken]
        return tuple(left[:count]) if len(left) >= count else None


def devices_here() -> Devices:
    """Return this machine's; none when its `nvidia-smi` does not answer.

    A part of one (MIG) is none: a node that is given the whole device may take another's part.
    """
    names_part = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Devices() if names_part else of(smi.gpus()[0] or ())


def of(gpus: tuple[Gpu, ...]) -> Devices:
    """Return those of the first device's model: a job's ranks want equal ones."""
    if not gpus:
        return Devices()
    equal = [gpu for gpu in gpus if (gpu.name, gpu.memory_mib) == (gpus[0].name, gpus[0].memory_mib)]
    return Devices(
        uuids=tuple(gpu.uuid for gpu in equal),
        model=model_of(gpus[0].name),
        vram_gib=round(gpus[0].memory_mib / 1024) if gpus[0].memory_mib is not None else None,
    )


def type_with(count: int) -> str:
    """Return the name of the type that has so many GPUs."""
    return f"local.gpu{count}"


def gpus_of(instance_type: str) -> int:
    """Return how many GPUs a node of the type gets: 0 for the recorded types, which are processes only."""
    m = _TYPE.fullmatch(instance_type)
    return int(m[1]) if m else 0


# The embedded cloud's market, a spot price series recorded on EC2 in 2020, and a census of all that lives there.


_ANCHOR = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""The wall time at which the recorded series starts to be replayed; fixed, so that a time has one price for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One zone's spot prices: offsets from the start of a replay, ascending from 0, and the price from each on."""

    offsets: tuple[timedelta, ...]
    prices: tuple[Decimal, ...]

    def times(self, count: int) -> _Series:
        return replace(self, prices=tuple(price * count for price in self.prices))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One instance type: worker slots or GPUs, the list price, the spot series of each zone that has it."""

    gpus: int
    on_demand: Decimal
    spot: dict[str, _Series]
    gpu: str | None = None
    vram_gib: int | None = None


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

    def __init__(
        self, *, now: Callable[[], datetime] = _utc_now, devices: Callable[[], Devices] = devices_here
    ) -> None:
        self._now = now
        self._find_devices = devices

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return a spot and an on-demand offer for every type and zone, with the prices of this moment.

        Where this machine has GPUs for the whole job, its nodes get them; else they are processes on the CPU.
        """
        now = self._now()
        found = []
        for instance_type, kind in self._kinds_for(wanted).items():
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
                            gpu=kind.gpu,
                            vram_gib=kind.vram_gib,
                        )
                    )
        return tuple(found)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's points that cover start..end; UsageError for a pool that was not recorded."""
        kind = self._recording.kinds.get(pool.instance_type) or self._gpu_kind(gpus_of(pool.instance_type))
        series = kind.spot.get(pool.zone) if kind else None
        if kind is None or series is None:
            known = ", ".join(self._recording.kinds)
            raise UsageError(f"the embedded cloud has no {pool}", hint=f"take one of {known} in us-east-2a")
        if pool.market is Market.ON_DEMAND:
            return (PricePoint(since=start, usd_per_hour=kind.on_demand),)
        return tuple(_replayed(series, self._recording.length, start, end))

    def _kinds_for(self, wanted: Resources) -> dict[str, _Kind]:
        here = self._devices
        if not here.uuids or wanted.nodes * wanted.gpus > len(here.uuids):
            return self._recording.kinds
        kind = self._gpu_kind(wanted.gpus)
        return {type_with(wanted.gpus): kind} if kind else {}

    def _gpu_kind(self, count: int) -> _Kind | None:
        """Return a type with so many of this machine's GPUs, at as many times the recorded price of one."""
        if count == 0:
            return None
        one = next(kind for kind in self._recording.kinds.values() if kind.gpus == 1)
        return _Kind(
            gpus=count,
            gpu=self._devices.model,
            vram_gib=self._devices.vram_gib,
            on_demand=one.on_demand * count,
            spot={zone: series.times(count) for zone, series in one.spot.items()},
        )

    @cached_property
    def _devices(self) -> Devices:
        return self._find_devices()

    @cached_property
    def _recording(self) -> _Recording:
        text = resources.files("gpucloud.adapters.local").joinpath("prices.json").read_text(encoding="utf-8")
        raw = json.loads(text)
        kinds = {name: _kind(kind) for name, kind in raw["types"].items()}
        return _Recording(length=timedelta(seconds=raw["length_s"]), kinds=kinds)


class MarketBesideEmbedded:
    """Implements `MarketData`: another cloud's, which knows what a machine of the embedded fleet costs, too.

    A job that was on the embedded fleet may have gone on in another cloud while machines which it let go still cost.
    """

    def __init__(self, market: MarketData, embedded: MarketData) -> None:
        self._market, self._embedded = market, embedded

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        """Return what that cloud offers."""
        return self._market.offers(wanted)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's points that cover start..end."""
        market = self._embedded if pool.instance_type.startswith(_EMBEDDED) else self._market
        return market.prices(pool, start, end)


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


# Everything of the embedded cloud: its node groups and the nodes that live.


ACCOUNT = "embedded"


class LocalCensus:
    """Implements `Census` for the embedded cloud at `root`."""

    account = ACCOUNT
    regional = False
    regions = ()

    def __init__(self, root: Path, provisioner: Provisioner) -> None:
        self._folder = Folder(root)
        self._provisioner = provisioner

    def things(self) -> tuple[Thing, ...]:
        """Return every group, and every node that lives."""
        if not self._folder.exists:
            return ()
        with self._folder.locked():
            groups = tuple(record for name in self._folder.groups() if (record := self._folder.group(name)))
            nodes = {record.name: self._folder.nodes(record.name) for record in groups}
        found = [_thing(record) for record in groups]
        found += [_machine(record, node) for record in groups for node in nodes[record.name] if node.alive]
        return tuple(found)

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """End the group's nodes and remove it."""
        del things
        self._provisioner.destroy(self._provisioner.group(cluster, region), story=story)


def _thing(record: GroupRecord) -> Thing:
    own = ((MANAGED, "true"), (CLUSTER, record.name), (STORE, record.store))
    tags = {**dict(record.tags), **dict(own)}
    return Thing(kind="node-group", id=record.name, account=ACCOUNT, region=record.region, tags=tuple(tags.items()))


def _machine(record: GroupRecord, node: NodeRecord) -> Thing:
    group, prices = _thing(record), LocalMarket().prices(node.pool, node.launched_at, node.launched_at)
    return Thing(
        kind="instance",
        id=node.id,
        account=ACCOUNT,
        region=record.region,
        tags=group.tags,
        since=node.launched_at,
        usd_per_hour=prices[-1].usd_per_hour,
    )
