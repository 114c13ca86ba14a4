"""What a machine of the simulated cloud costs, worked out second by second: the other opinion on the product's meter.

The rules are those of `gpucloud.domain.money.ledger`, written down a second time and in another way: nothing of
it is used.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

from gpucloud.adapters.local.records import NodeRecord
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import PricePoint


def invoice(node: NodeRecord, prices: tuple[PricePoint, ...]) -> Decimal:
    """Return the price of an ended machine's life, to 1e-8 USD."""
    ended_at = node.ended_at
    assert ended_at is not None
    lived = ended_at - node.launched_at
    taken = node.ending is EndCause.INTERRUPTED and node.pool.market is Market.SPOT
    if taken and lived < timedelta(hours=1):
        return Decimal(0)
    second, last, due = 0, max(60, -(-lived // timedelta(seconds=1))), Fraction(0)
    while second < last:
        due += _price(node.launched_at + timedelta(seconds=second), prices) / 3600
        second += 1
    return (Decimal(due.numerator) / Decimal(due.denominator)).quantize(Decimal("0.00000001"), ROUND_HALF_UP)


def _price(moment: datetime, prices: tuple[PricePoint, ...]) -> Fraction:
    in_force = prices[0]
    for point in prices:
        if point.since <= moment:
            in_force = point
    return Fraction(in_force.usd_per_hour)
