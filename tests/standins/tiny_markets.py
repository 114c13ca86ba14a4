"""Recorded markets of a few ticks, written down as they are read: one digit a tick, how many machines there were."""

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import groupby

from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone

START = datetime(2023, 2, 16, tzinfo=timezone.utc)


def tiny_market(zones: dict[str, tuple[str, str]], *, nodes: int = 1, on_demand: str = "3.00") -> RecordedMarket:
    """Return a market of three-minute ticks; each zone has its machines at each tick, and its price."""
    recorded = tuple(
        RecordedZone(name=name, nodes=_changes(ticks), prices=((0, Decimal(usd)),))
        for name, (ticks, usd) in zones.items()
    )
    return RecordedMarket(
        name="tiny",
        about="made up",
        source="this test",
        instance_type="p9.large",
        gpus=1,
        gpu="X1",
        nodes=nodes,
        started_at=START,
        tick=timedelta(seconds=180),
        ticks=len(next(iter(zones.values()))[0]),
        on_demand_usd_per_hour=Decimal(on_demand),
        prices_recorded=True,
        zones=recorded,
    )


def _changes(ticks: str) -> tuple[tuple[int, int], ...]:
    changes, at = [], 0
    for digit, run in groupby(ticks):
        changes.append((at, int(digit)))
        at += len(list(run))
    return tuple(changes)
