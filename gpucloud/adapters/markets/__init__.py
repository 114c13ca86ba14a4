"""The recorded spot markets that come with the package; sources and licences are in `recordings/NOTICE`.

A market is a JSON file whose zones are written run by run ("25x0 3x1": 25 ticks of 0, 3 of 1).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from importlib import resources

from gpucloud.domain.errors import UsageError
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone


class PackagedMarkets:
    """Implements `Markets` from the package's own files, which `python -m tests.recordings` makes."""

    def __init__(self) -> None:
        self._folder = resources.files("gpucloud.adapters.markets").joinpath("recordings")

    def names(self) -> tuple[str, ...]:
        """Return the markets' names, in order."""
        files = (file.name for file in self._folder.iterdir())
        return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))

    def market(self, name: str) -> RecordedMarket:
        """Return the market of that name; UsageError, with the nearest name, when there is none."""
        names = self.names()
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "gpucloud simulate --list shows them"
            raise UsageError(f"no recorded market is called {name!r}", hint=hint)
        return read_market(name, self._folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))


def read_market(name: str, text: str) -> RecordedMarket:
    """Return the market that a file's text describes."""
    raw = json.loads(text)
    zones = (
        RecordedZone(
            name=zone,
            nodes=tuple((tick, int(nodes)) for tick, nodes in _changes(runs["nodes"])),
            prices=tuple((tick, Decimal(price)) for tick, price in _changes(runs["usd_per_hour"])),
        )
        for zone, runs in raw["zones"].items()
    )
    return RecordedMarket(
        name=name,
        about=raw["about"],
        source=raw["source"],
        instance_type=raw["instance_type"],
        gpus=raw["gpus"],
        gpu=raw["gpu"],
        nodes=raw["nodes"],
        started_at=datetime.fromisoformat(raw["started_at"]) if raw["started_at"] else None,
        tick=timedelta(seconds=raw["tick_s"]),
        ticks=raw["ticks"],
        on_demand_usd_per_hour=Decimal(raw["on_demand_usd_per_hour"]),
        prices_recorded=raw["prices_recorded"],
        zones=tuple(zones),
    )


def _changes(runs: str) -> Iterator[tuple[int, str]]:
    tick = 0
    for run in runs.split():
        length, _, value = run.partition("x")
        yield tick, value
        tick += int(length)
