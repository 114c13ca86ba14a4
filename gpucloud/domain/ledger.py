"""What nodes cost: charges from prices and lives, and their sums.

The rules are AWS's for Linux spot instances (EC2 user guide, "Billing for interrupted Spot Instances" and "Amazon
EC2 pricing"): per second, at the zone's own price at each moment, 60 seconds at the least, and nothing for an
instance that EC2 itself interrupts in its first hour.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from gpucloud.domain.job import Market
from gpucloud.domain.node import EndCause
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state import Attempt, NodeLife

ZERO = Decimal(0)
FREE_WHEN_TAKEN_WITHIN = timedelta(hours=1)
"""AWS charges nothing for a spot machine that it takes this soon."""

_HOUR = Decimal(3600)
_SMALLEST = Decimal("0.00000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a cloud bills: the least time of a node, and how young a node may be taken without a charge.

    `beside_usd_per_hour` is what else a node costs (its disk, its public address): charged even where the node is not.
    """

    minimum: timedelta = timedelta(seconds=60)
    free_when_taken_within: timedelta = FREE_WHEN_TAKEN_WITHIN
    beside_usd_per_hour: Decimal = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One metered interval of one node at one price; `attempt` is None before there was any."""

    node_id: str
    attempt: int | None
    pool: Pool
    start: datetime
    end: datetime
    usd_per_hour: Decimal
    usd: Decimal
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """The money of a job: spent + promised + left = budget.

    `promised` is what the machines that live now may still cost until `paid_until`, at the highest price that
    they can have. `forecast_usd` is what the whole job will have cost at today's price, None when unknown.
    """

    budget_usd: Decimal
    spent_usd: Decimal
    promised_usd: Decimal
    forecast_usd: Decimal | None = None

    @property
    def left_usd(self) -> Decimal:
        """What is neither spent nor promised; below zero only if a price passed its cap."""
        return self.budget_usd - self.spent_usd - self.promised_usd


def meter(
    life: NodeLife,
    prices: tuple[PricePoint, ...],
    attempts: tuple[Attempt, ...],
    now: datetime,
    terms: Terms = Terms(),
) -> tuple[Charge, ...]:
    """Return the node's charges from its launch to its end, or to `now` while it lives.

    Whole seconds, rounded up; cut where the price changes and where an attempt ended that another one followed, so
    that every charge has one price and one attempt. Time between two attempts belongs to the later one.
    """
    end = life.ended_at or now
    seconds = max(math.ceil((end - life.launched_at).total_seconds()), int(terms.minimum.total_seconds()))
    end = life.launched_at + timedelta(seconds=seconds)
    free = _is_free(life, terms)
    followed = [(_whole_second(life, a.ended_at), a.number) for a in attempts[:-1] if a.ended_at is not None]
    ends = [end for end, _ in followed]
    numbers = [*(number for _, number in followed), *(a.number for a in attempts[-1:]), None]
    cuts = {*ends, *(_whole_second(life, point.since) for point in prices)}
    edges = [life.launched_at, *sorted(cut for cut in cuts if life.launched_at < cut < end), end]
    charges = []
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            price = _price_at(start, prices) + terms.beside_usd_per_hour
            due = terms.beside_usd_per_hour if free else price
            attempt = numbers[bisect.bisect_right(ends, start)]
            charges.append(_charge(life, attempt, (start, stop), price, due))
    return tuple(charges)


def with_beside(offers: Iterable[Offer], terms: Terms) -> tuple[Offer, ...]:
    """Return the offers at what a node costs with what it has beside: the price to plan and to promise with."""
    return tuple(
        replace(
            offer,
            usd_per_hour=offer.usd_per_hour + terms.beside_usd_per_hour,
            cap_usd_per_hour=offer.cap_usd_per_hour + terms.beside_usd_per_hour,
        )
        for offer in offers
    )


def total(charges: Iterable[Charge]) -> Decimal:
    """Return the sum of the charges, in USD."""
    return sum((charge.usd for charge in charges), ZERO)


def usd_for(usd_per_hour: Decimal, span: timedelta) -> Decimal:
    """Return the price of a span, to 1e-8 USD."""
    seconds = Decimal(span.days * 86400 + span.seconds) + Decimal(span.microseconds) / 1_000_000
    return (usd_per_hour * seconds / _HOUR).quantize(_SMALLEST, ROUND_HALF_UP)


def _is_free(life: NodeLife, terms: Terms) -> bool:
    return (
        life.end_cause is EndCause.INTERRUPTED
        and life.pool.market is Market.SPOT
        and life.ended_at is not None
        and life.ended_at - life.launched_at < terms.free_when_taken_within
    )


def _whole_second(life: NodeLife, moment: datetime) -> datetime:
    return life.launched_at + timedelta(seconds=math.ceil((moment - life.launched_at).total_seconds()))


def _charge(
    life: NodeLife, attempt: int | None, span: tuple[datetime, datetime], usd_per_hour: Decimal, due_per_hour: Decimal
) -> Charge:
    start, end = span
    return Charge(
        node_id=life.node_id,
        attempt=attempt,
        pool=life.pool,
        start=start,
        end=end,
        usd_per_hour=usd_per_hour,
        usd=usd_for(due_per_hour, end - start),
        note="" if due_per_hour == usd_per_hour else "taken in its first hour: not charged",
    )


def _price_at(moment: datetime, prices: tuple[PricePoint, ...]) -> Decimal:
    known = [point for point in prices if point.since <= moment]
    return (known[-1] if known else prices[0]).usd_per_hour
