"""Counts what the package's recorded markets show of how zones come and go: `python -m tests.prior`.

Writes `gpucloud/adapters/markets/prior.json`, from which the learned policy starts. Markets of a week and more are
counted, each zone by itself and all zones of a region, of each two regions, and of the market together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.domain.market.learned import Counts, count, watch
from gpucloud.domain.market.recordings import LOOK_S, RecordedMarket, RecordedZone, timeline

PRIOR = Path(__file__).resolve().parent.parent / "gpucloud" / "adapters" / "tables" / "prior.json"
SHORTEST = timedelta(days=7)


def main() -> None:
    markets = map(PackagedMarkets().market, PackagedMarkets().names())
    rows = [row(market, zones) for market in markets for zones in zone_sets(market)]
    PRIOR.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def row(market: RecordedMarket, zones: Sequence[RecordedZone]) -> dict[str, object]:
    found = dataclasses.asdict(counted(market, zones))
    rounded = {
        name: [round(n, 2) for n in value] if isinstance(value, tuple) else value for name, value in found.items()
    }
    return {"market": market.name, "gpus": market.gpus, "zones": [zone.name for zone in zones], "counts": rounded}


def counted(market: RecordedMarket, zones: Sequence[RecordedZone]) -> Counts:
    observation = timeline(market, zones, market.nodes)
    ends = [*observation.changes[1:], observation.looks]
    views = [
        views
        for views, start, end in zip(observation.views, observation.changes, ends, strict=True)
        for _ in range(end - start)
    ]
    up = [[view.up for view in now] for now in views]
    price = [[view.usd_per_hour for view in now] for now in views]
    return count(watch(up, price, LOOK_S / 3600), LOOK_S / 3600)


def zone_sets(market: RecordedMarket) -> Iterator[Sequence[RecordedZone]]:
    if market.length < SHORTEST:
        return
    regions = [[zone for zone in market.zones if zone.name.startswith(region)] for region in market.regions]
    groups = [[*a, *b] for a, b in itertools.combinations(regions, 2)] if len(regions) > 2 else []
    sets = [*([zone] for zone in market.zones), *regions, *groups, list(market.zones)]
    yield from {tuple(zone.name for zone in zones): zones for zones in sets}.values()


if __name__ == "__main__":
    main()
