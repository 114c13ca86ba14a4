"""The hard wall: machines are paid for until a time, and that time never promises more than the budget.

    paid_until = now + min(horizon, (budget − spent − reserve) / (nodes × price cap))

The reserve pays for what comes after that time. Machines are launched only where the promise lasts for their start and
for the least time of training: a start that comes to nothing is charged all the same. Nothing here asks anybody: the
cloud's schedule and the node's own timer end the machines at `paid_until` unless it was moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.money.ledger import ZERO, usd_for

_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepaidRule:
    """The lengths that the prepaid rule uses.

    The reserve: a shut-off may come two minutes late, machines take some seconds to end, and where one is lost in this
    time the group starts another, which costs a minute at the least (EC2's shortest charge).
    """

    horizon: timedelta = timedelta(minutes=30)
    reserve: timedelta = timedelta(seconds=210)
    least: timedelta = timedelta(seconds=60)
    """For less training than that no attempt is begun."""
    start: timedelta = timedelta(seconds=60)
    """From a machine's launch until it can train, as it is reckoned with; no less than the cloud's shortest charge."""
    ahead: timedelta = timedelta(0)
    """With less time than this ahead of the shut-off, the cloud starts no machine."""


def reserve_usd(nodes: int, cap_usd_per_hour: Decimal, prepaid_rule: PrepaidRule) -> Decimal:
    """Return what is kept aside for the last save and the teardown of all nodes."""
    return usd_for(cap_usd_per_hour * nodes, prepaid_rule.reserve)


def least_budget_usd(nodes: int, cap_usd_per_hour: Decimal, prepaid_rule: PrepaidRule) -> Decimal:
    """Return the least budget that trains at all: every node's start, its least time of training, and the reserve."""
    return usd_for(cap_usd_per_hour * nodes, prepaid_rule.start + prepaid_rule.least) + reserve_usd(
        nodes, cap_usd_per_hour, prepaid_rule
    )


def trains_for(
    usd: Decimal, *, nodes: int, usd_per_hour: Decimal, cap_usd_per_hour: Decimal, prepaid_rule: PrepaidRule
) -> timedelta:
    """Return how long `nodes` machines at that price train for the sum: their start and the reserve are paid of it."""
    spendable = usd - reserve_usd(nodes, cap_usd_per_hour, prepaid_rule)
    return max(timedelta(0), span_of(float(spendable * 3600 / (usd_per_hour * nodes))) - prepaid_rule.start)


def paid_until(  # noqa: PLR0913  each is a part of the sum
    now: datetime,
    *,
    left_usd: Decimal,
    nodes: int,
    cap_usd_per_hour: Decimal,
    prepaid_rule: PrepaidRule,
    launched: bool = True,
    coming_usd: Decimal = ZERO,
) -> datetime | None:
    """Return until when `nodes` machines can be paid at their highest price; None when it is not worth a start.

    `left_usd` is the budget less everything spent. The time is `now + horizon` at the latest. Machines that are still
    to be `launched` are paid for their start, too. `coming_usd` is what some of them are charged as soon as they are
    there: kept out of the time, so that it need not come closer, and be told anew, a second after they are asked for.
    """
    spendable = left_usd - reserve_usd(nodes, cap_usd_per_hour, prepaid_rule)
    rate = cap_usd_per_hour * nodes
    if rate <= 0:
        return now + prepaid_rule.horizon
    least = prepaid_rule.least if launched else prepaid_rule.start + prepaid_rule.least
    if spendable < usd_for(rate, least):  # in the same sums as `least_budget_usd`: what that accepts is enough here
        return None
    return now + min(prepaid_rule.horizon, max(least, span_of(float((spendable - coming_usd) * 3600 / rate))))


def may_launch(until: datetime | None, now: datetime, prepaid_rule: PrepaidRule) -> bool:
    """Whether the time until which machines are armed, or can be paid, lies far enough ahead for any to be started."""
    return until is not None and until > now and until - now >= prepaid_rule.ahead


def sooner(armed: datetime | None, until: datetime | None) -> datetime | None:
    """Return `until` where the shut-off that is armed comes noticeably later; None where it may stay."""
    return until if armed is not None and until is not None and armed - until > _SECOND else None
