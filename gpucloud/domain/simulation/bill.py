"""The bill of a replayed job, by the product's own meter."""

from __future__ import annotations

from bisect import bisect_right
from datetime import datetime
from decimal import Decimal

from gpucloud.domain.job import Market
from gpucloud.domain.ledger import PLAIN_TERMS, Charge, Terms, meter, total
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.simulation.fleet import ON_DEMAND, Life
from gpucloud.domain.simulation.replay import Run
from gpucloud.domain.simulation.timeline import Timeline
from gpucloud.domain.state import NodeLife


def charges(run: Run, market: Timeline, terms: Terms = PLAIN_TERMS) -> tuple[tuple[int, tuple[Charge, ...]], ...]:
    """Return, for each life, how many machines lived it and the charges of one of them."""
    return tuple((life.nodes, _metered(life, number, market, terms)) for number, life in enumerate(run.lives, start=1))


def bill_usd(run: Run, market: Timeline, terms: Terms = PLAIN_TERMS) -> Decimal:
    """Return what the run costs."""
    return sum((nodes * total(metered) for nodes, metered in charges(run, market, terms)), Decimal(0))


def _metered(life: Life, number: int, market: Timeline, terms: Terms) -> tuple[Charge, ...]:
    launched_at, ended_at = market.when(life.launched_s), market.when(life.ended_s)
    if life.zone == ON_DEMAND:
        zone, kind = market.views[0][0].zone, Market.ON_DEMAND
        prices: tuple[PricePoint, ...] = (
            PricePoint(since=launched_at, usd_per_hour=market.market.on_demand_usd_per_hour),
        )
    else:
        zone, kind = market.views[0][life.zone].zone, Market.SPOT
        known = market.prices[life.zone]
        first = bisect_right(known, launched_at, key=_since) - 1
        prices = known[first : bisect_right(known, ended_at, key=_since)]
    node = NodeLife(
        node_id=f"machine-{number}",
        pool=Pool(instance_type=market.market.instance_type, zone=zone, market=kind),
        launched_at=launched_at,
        ended_at=ended_at,
        end_cause=life.cause,
    )
    return meter(node, prices, (), ended_at, terms)


def _since(point: PricePoint) -> datetime:
    return point.since
