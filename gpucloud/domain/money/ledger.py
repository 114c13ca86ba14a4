"""What nodes cost: a region's rates, charges from prices and from lives in whole seconds, and their sums.

The rules are AWS's for Linux spot instances (EC2 user guide, "Billing for interrupted Spot Instances" and "Amazon EC2
pricing"): per second, at the zone's price at each moment ("How Spot Instances Work"; the FAQ of 2020 has that at the
beginning of each instance-hour: 0.004 % apart over 360 recordings), 60 seconds at the least, and nothing for one that
EC2 itself interrupts in its first hour. Disk and public address are charged so too, even where the instance is not.

**What the budget counts** is what ends with the machines: they, their disks and their addresses
(`ChargeKind.in_budget`). What is stored, its requests and its way out of the cloud come after the last machine, and no
auto-shutdown ends them: they are charges of the job, and no part of its budget.
"""

from __future__ import annotations

import bisect
import calendar
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import ROUND_HALF_UP, ROUND_UP, Decimal
from enum import Enum

from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state.state import Attempt, UsageInterval

ZERO = Decimal(0)
GIB = 1024**3
_SHORTEST_MONTH_HOURS = 28 * 24
_MILLIONTH = Decimal("0.000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One region's prices in USD. A GB on AWS's bill is 2^30 bytes, and a month is as long as the calendar says.

    `puts` are requests that write or list, `gets` those that read; deleting is free. `drill_usd`: for one interruption.
    """

    region: str
    disk_usd_per_gib_month: Decimal = ZERO
    address_usd_per_hour: Decimal = ZERO
    storage_usd_per_gib_month: Decimal = ZERO
    puts_usd_per_1000: Decimal = ZERO
    gets_usd_per_1000: Decimal = ZERO
    transfer_usd_per_gib: Decimal = ZERO
    drill_usd: Decimal = ZERO

    def most_extras_usd_per_hour(self, gib: int, *, address: bool) -> Decimal:
        """Return what a machine's disk and address cost an hour at the most: in February; a millionth rounded up."""
        disk = self.disk_usd_per_gib_month * gib / _SHORTEST_MONTH_HOURS
        return (disk + (self.address_usd_per_hour if address else ZERO)).quantize(_MILLIONTH, ROUND_UP)

    def storage_usd(self, size: int, start: datetime, end: datetime) -> Decimal:
        """Return what `size` bytes cost from start to end, exactly."""
        edges = (start, *months_between(start, end), max(start, end))
        months = sum((_seconds(b - a) / (month_hours(a) * 3600) for a, b in itertools.pairwise(edges)), ZERO)
        return self.storage_usd_per_gib_month * size / GIB * months

    def requests_usd(self, puts: int, gets: int) -> Decimal:
        """Return what so many requests cost, exactly."""
        return (self.puts_usd_per_1000 * puts + self.gets_usd_per_1000 * gets) / 1000

    def transfer_usd(self, size: int) -> Decimal:
        """Return what `size` bytes cost on their way out of the cloud, exactly."""
        return self.transfer_usd_per_gib * size / GIB


def month_hours(when: datetime) -> int:
    """Return how many hours its month has: 744 in January.

    Amazon S3's FAQ computes GB-months so, and EBS's price page those of disks: GB × seconds / seconds of the month.
    """
    return calendar.monthrange(when.year, when.month)[1] * 24


def months_between(start: datetime, end: datetime) -> tuple[datetime, ...]:
    """Return when months begin between the two, in UTC."""
    first, last = (moment.year * 12 + moment.month for moment in (start, end))
    begins = (datetime(month // 12, month % 12 + 1, 1, tzinfo=timezone.utc) for month in range(first, last))
    return tuple(begin for begin in begins if start < begin < end)


def _seconds(span: timedelta) -> Decimal:
    return Decimal(span // timedelta(microseconds=1)) / 1_000_000


# Charges, and their sums.


FREE_WHEN_INTERRUPTED_WITHIN = timedelta(hours=1)
"""AWS charges nothing for a spot machine that it takes this soon."""

_HOUR = Decimal(3600)
_SMALLEST = Decimal("0.00000001")


class ChargeKind(str, Enum):
    """What is paid for."""

    COMPUTE = "compute"
    DISK = "disk"
    ADDRESS = "address"
    STORAGE = "storage"
    REQUESTS = "requests"
    TRANSFER = "transfer"
    GATEWAY = "gateway"  # a NAT gateway's hours, which are the base's: they are in AWS's bill, and in no ledger
    DATA = "data"  # read from a bucket in another region
    DRILL = "drill"

    @property
    def in_budget(self) -> bool:
        """Whether the budget counts it: what ends with the machines."""
        return self in (ChargeKind.COMPUTE, ChargeKind.DISK, ChargeKind.ADDRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a cloud bills: the least time of a node, and how young a node may be interrupted without a charge.

    Beside each node stand a disk of `disk_gib` and, with `public_address`, an address, at the region's `rates`; a
    region that is not among them has the dearest of these. Types `without_address` get none.
    """

    minimum: timedelta = timedelta(seconds=60)
    free_when_interrupted_within: timedelta = FREE_WHEN_INTERRUPTED_WITHIN
    disk_gib: int = 0
    public_address: bool = False
    without_address: tuple[str, ...] = ()
    rates: tuple[Rates, ...] = ()

    @property
    def extras_usd_per_hour(self) -> Decimal:
        """What a node's disk and address cost an hour at the most, in any region: planned and promised with."""
        return max(map(self._beside, self.rates), default=ZERO)

    def of(self, instance_type: str) -> Terms:
        """Return the terms as they are for that type, whose name does not matter any more."""
        addressed = self.public_address and instance_type not in self.without_address
        return replace(self, public_address=addressed, without_address=())

    def rates_in(self, region: str) -> Rates:
        """Return what the region charges; nothing at all where nothing is known to be charged."""
        found = next((rates for rates in self.rates if rates.region == region), None)
        return found or max(self.rates, key=self._beside, default=Rates(region=region))

    def _beside(self, rates: Rates) -> Decimal:
        return rates.most_extras_usd_per_hour(self.disk_gib, address=self.public_address)


PLAIN_TERMS = Terms()
"""AWS's, with nothing beside a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One metered interval of one thing at one price; `attempt` is None before there was any.

    `node_id` is empty and `pool` None for what is the job's and no node's. Charges that were written before there were
    kinds are of compute, with the disk and the address in them. `estimated`: not all of it could be counted.
    """

    node_id: str
    attempt: int | None
    start: datetime
    end: datetime
    usd_per_hour: Decimal
    usd: Decimal
    pool: Pool | None = None
    kind: ChargeKind = ChargeKind.COMPUTE
    note: str = ""
    estimated: bool = False


def meter(
    interval: UsageInterval,
    prices: tuple[PricePoint, ...],
    attempts: tuple[Attempt, ...],
    now: datetime,
    terms: Terms = Terms(),
) -> tuple[Charge, ...]:
    """Return the node's charges from its launch to its end, or to `now` while it lives: compute, disk, address.

    Whole seconds, rounded up; cut where the price changes and where an attempt ended that another one followed, so
    that every charge has one price and one attempt. Time between two attempts belongs to the later one. However a
    life is cut, its charges sum to the same. `attempts` are in their order.
    """
    span = Lifespan(interval, attempts, now, terms.minimum)
    rates = terms.rates_in(interval.pool.region)
    addressed = terms.of(interval.pool.instance_type).public_address
    return (
        *_compute(interval, span, prices, terms, attempts),
        *_disk(interval, span, rates.disk_usd_per_gib_month * terms.disk_gib),
        *_address(interval, span, rates.address_usd_per_hour if addressed else ZERO),
    )


def with_extras(offers: Iterable[Offer], terms: Terms) -> tuple[Offer, ...]:
    """Return the offers at what a node costs with what it has beside: the price to plan and to promise with."""
    return tuple(
        replace(
            offer,
            usd_per_hour=offer.usd_per_hour + terms.extras_usd_per_hour,
            cap_usd_per_hour=offer.cap_usd_per_hour + terms.extras_usd_per_hour,
        )
        for offer in offers
    )


def total(charges: Iterable[Charge]) -> Decimal:
    """Return the sum of the charges, in USD."""
    return sum((charge.usd for charge in charges), ZERO)


def joined(users: Iterable[Charge], machines: Iterable[Charge]) -> tuple[Charge, ...]:
    """Return the charges of both ledgers, where what machines wrote may raise a sum and never lower it.

    Of a machine with bills in both the dearer one counts; no charge of theirs is below zero.
    """
    own, theirs = list(users), [charge for charge in machines if charge.usd >= 0]
    ours, others = by_node(own), by_node(theirs)
    dearer = {node for node, usd in others.items() if usd > ours.get(node, ZERO)}
    kept = [charge for charge in own if charge.node_id not in dearer]
    return (*kept, *(charge for charge in theirs if charge.node_id in dearer or charge.node_id not in ours))


def by_node(charges: Iterable[Charge]) -> dict[str, Decimal]:
    """Return what each machine's charges add up to, by its id."""
    sums: dict[str, Decimal] = {}
    for charge in charges:
        if charge.node_id:
            sums[charge.node_id] = sums.get(charge.node_id, ZERO) + charge.usd
    return sums


def usd_for(usd_per_hour: Decimal, span: timedelta) -> Decimal:
    """Return the price of a span, to 1e-8 USD."""
    seconds = Decimal(span.days * 86400 + span.seconds) + Decimal(span.microseconds) / 1_000_000
    return _rounded(usd_per_hour * seconds / _HOUR)


def _compute(
    interval: UsageInterval,
    span: Lifespan,
    prices: tuple[PricePoint, ...],
    terms: Terms,
    attempts: tuple[Attempt, ...],
) -> list[Charge]:
    pieces = span.spans(point.since for point in prices)
    charges = _charges(interval, span, ChargeKind.COMPUTE, [(piece, _price_at(piece[0], prices)) for piece in pieces])
    if _was_given_up(interval, attempts):
        return [replace(charge, note="could not be made ready: given up") for charge in charges]
    if not _is_free(interval, terms):
        return charges
    return [replace(charge, usd=ZERO, note="interrupted in its first hour: not charged") for charge in charges]


def _was_given_up(interval: UsageInterval, attempts: tuple[Attempt, ...]) -> bool:
    """Whether it was ended by choice, unfit for an attempt, and was part of none: nothing else is ever said of it."""
    unfit = interval.end_cause is EndCause.CHOICE and interval.unprepared_at is not None
    return unfit and all(member.node_id != interval.node_id for one in attempts for member in one.members)


def _is_free(interval: UsageInterval, terms: Terms) -> bool:
    return (
        interval.end_cause is EndCause.INTERRUPTED
        and interval.pool.market is Market.SPOT
        and interval.ended_at is not None
        and interval.ended_at - interval.launched_at < terms.free_when_interrupted_within
    )


def _disk(interval: UsageInterval, span: Lifespan, usd_per_month: Decimal) -> list[Charge]:
    """A disk is paid by the month, which is as long as the calendar says."""
    if not usd_per_month:
        return []
    pieces = span.spans(months_between(span.start, span.end))
    charges: list[Charge] = []
    for hours, alike in itertools.groupby(pieces, lambda piece: month_hours(piece[0])):
        charges += _charges(interval, span, ChargeKind.DISK, [(piece, usd_per_month) for piece in alike], hours=hours)
    return charges


def _address(interval: UsageInterval, span: Lifespan, usd_per_hour: Decimal) -> list[Charge]:
    if not usd_per_hour:
        return []
    return _charges(interval, span, ChargeKind.ADDRESS, [(piece, usd_per_hour) for piece in span.spans()])


def _charges(
    interval: UsageInterval, span: Lifespan, kind: ChargeKind, pieces: Iterable[tuple[Span, Decimal]], *, hours: int = 1
) -> list[Charge]:
    """Return a charge for each piece at its price for so many hours; they sum to the rounded price of the whole."""
    exact = told = ZERO
    charges = []
    for (start, end), usd in pieces:
        exact += usd * int((end - start).total_seconds())
        due = _rounded(exact / (_HOUR * hours))
        charges.append(
            Charge(
                node_id=interval.node_id,
                attempt=span.attempt_at(start),
                pool=interval.pool,
                start=start,
                end=end,
                usd_per_hour=usd if hours == 1 else _rounded(usd / hours),
                usd=due - told,
                kind=kind,
            )
        )
        told = due
    return charges


def _price_at(moment: datetime, prices: tuple[PricePoint, ...]) -> Decimal:
    return prices[max(bisect.bisect_right(prices, moment, key=_since) - 1, 0)].usd_per_hour


def _since(point: PricePoint) -> datetime:
    return point.since


def _rounded(usd: Decimal) -> Decimal:
    return usd.quantize(_SMALLEST, ROUND_HALF_UP)


# A node's life in whole seconds, cut where attempts ended.


Span = tuple[datetime, datetime]


class Lifespan:
    """From a node's launch on, for `least` at the least; a second that was begun is a whole one."""

    def __init__(self, interval: UsageInterval, attempts: tuple[Attempt, ...], now: datetime, least: timedelta) -> None:
        """`attempts` are in their order. One that no other followed cuts nothing: the time after it is its own."""
        self.start = interval.launched_at
        self.end = max(self._whole(interval.ended_at or now), self._whole(self.start + least))
        # Of thousands of attempts a node has lived through a few.
        last = max(len(attempts) - 1, 0)
        first = bisect.bisect_right(attempts, self.start, hi=last, key=_ended)
        after = bisect.bisect_left(attempts, self.end, lo=first, hi=last, key=_ended)
        through = [attempt for attempt in attempts[first:after] if attempt.ended_at is not None]
        self._ends = [self._whole(_ended(attempt)) for attempt in through]
        self._numbers = [attempt.number for attempt in (*through, *attempts[after : after + 1])]

    def spans(self, cuts: Iterable[datetime] = ()) -> list[Span]:
        """Return the life in pieces, cut there and where attempts ended; none of a life that ended before it began."""
        inside = {cut for cut in (*self._ends, *map(self._whole, cuts)) if self.start < cut < self.end}
        return list(itertools.pairwise([self.start, *sorted(inside), self.end])) if self.start < self.end else []

    def attempt_at(self, moment: datetime) -> int | None:
        """Return the attempt that the time from then on is spent for: between two attempts, the later one."""
        number = bisect.bisect_right(self._ends, moment)
        return self._numbers[number] if number < len(self._numbers) else None

    def _whole(self, moment: datetime) -> datetime:
        return self.start + timedelta(seconds=math.ceil((moment - self.start).total_seconds()))


def _ended(attempt: Attempt) -> datetime:
    return attempt.ended_at or attempt.started_at
