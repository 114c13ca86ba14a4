"""Charges summed by what people ask for (job, attempt, node, day, kind, tag), and the cloud's bill beside them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta, timezone
from decimal import ROUND_HALF_UP, Decimal
from enum import Enum

from gpucloud.domain.errors import UsageError
from gpucloud.domain.money.ledger import ZERO, Charge, ChargeKind

_SMALLEST = Decimal("0.00000001")
_TAG = "tag:"
_UNTAGGED = "-"
_KINDS = {kind: number for number, kind in enumerate(ChargeKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A charge, whose job's it is, and that job's tags."""

    job: str
    tags: tuple[tuple[str, str], ...]
    charge: Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The sum of some charges; `name` says which, a word for each of the grouping's columns."""

    name: tuple[str, ...]
    start: datetime
    end: datetime
    machine_time: timedelta
    usd: Decimal
    usd_by_kind: Mapping[ChargeKind, Decimal]
    estimated: bool

    def usd_of(self, kind: ChargeKind) -> Decimal:
        """Return what of it is of that kind."""
        return self.usd_by_kind.get(kind, ZERO)


class Way(str, Enum):
    """How charges are summed; beside these, by a tag."""

    JOB = "job"
    ATTEMPT = "attempt"
    NODE = "node"
    DAY = "day"
    KIND = "kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """A way of summing: its columns' heads, and what each charge belongs to (first to sort by, then the words)."""

    heads: tuple[str, ...]
    key: Callable[[Item], tuple[tuple[object, ...], tuple[str, ...]]]
    by_day: bool = False


def grouping(word: str, *, many_jobs: bool) -> Grouping:
    """Return the grouping that `--by` names: a `Way`, or `tag:KEY`. UsageError for any other word.

    With `many_jobs` attempts and nodes are each job's own.
    """
    if word.startswith(_TAG) and word != _TAG:
        tag = word.removeprefix(_TAG)
        return Grouping(heads=(tag,), key=lambda item: _same(dict(item.tags).get(tag, _UNTAGGED)))
    try:
        way = Way(word)
    except ValueError:
        known = ", ".join(one.value for one in Way)
        raise UsageError(f"costs cannot be summed by {word!r}", hint=f"--by {known} or tag:KEY") from None
    match way:
        case Way.JOB:
            return Grouping(heads=("job",), key=lambda item: _same(item.job))
        case Way.DAY:
            return Grouping(heads=("day",), key=lambda item: _same(f"{item.charge.start:%Y-%m-%d}"), by_day=True)
        case Way.KIND:
            return Grouping(heads=("kind",), key=lambda item: ((_KINDS[item.charge.kind],), (item.charge.kind.value,)))
        case Way.ATTEMPT:
            return _of_jobs("attempt", _attempt, many_jobs=many_jobs)
        case Way.NODE:
            return _of_jobs("node", lambda charge: _same(charge.node_id or "-"), many_jobs=many_jobs)


def grouped(items: Iterable[Item], by: Grouping) -> tuple[Row, ...]:
    """Return a row for each group, in order; days are UTC's, and a charge over midnight is in both."""
    groups: dict[tuple[tuple[object, ...], tuple[str, ...]], list[Charge]] = {}
    for item in items:
        if not by.by_day:
            groups.setdefault(by.key(item), []).append(item.charge)
            continue
        for charge in split_by_day((item.charge,)):
            part = item if charge is item.charge else replace(item, charge=charge)
            groups.setdefault(by.key(part), []).append(charge)
    return tuple(_row(name, groups[order, name]) for order, name in sorted(groups))


def after(items: Iterable[Item], since: datetime) -> Iterator[Item]:
    """Yield what was spent from `since` on; of a charge over that time, the later part."""
    for item in items:
        if item.charge.end > since:
            yield replace(item, charge=split(item.charge, (since,))[-1])


def split_by_day(charges: Iterable[Charge]) -> Iterator[Charge]:
    """Yield the charges, each cut at midnight, UTC."""
    for charge in charges:
        yield from split(charge, _midnights(charge.start, charge.end))


def split(charge: Charge, cuts: Iterable[datetime]) -> tuple[Charge, ...]:
    """Return the charge in parts that sum to it; cuts outside it are none."""
    inside = [cut for cut in cuts if charge.start < cut < charge.end]
    if not inside:
        return (charge,)
    whole, told, parts = charge.end - charge.start, ZERO, []
    for start, end in itertools.pairwise([charge.start, *inside, charge.end]):
        share = Decimal((end - charge.start) // timedelta(microseconds=1)) / Decimal(whole // timedelta(microseconds=1))
        until = (charge.usd * share).quantize(_SMALLEST, ROUND_HALF_UP)
        parts.append(replace(charge, start=start, end=end, usd=until - told))
        told = until
    return tuple(parts)


def _midnights(start: datetime, end: datetime) -> list[datetime]:
    days = (end.date() - start.date()).days
    if not days:
        return []
    first = datetime.combine(start.date(), time(0), timezone.utc)
    return [first + timedelta(days=day) for day in range(1, days + 1)]


def _same(word: str) -> tuple[tuple[object, ...], tuple[str, ...]]:
    return (word,), (word,)


def _attempt(charge: Charge) -> tuple[tuple[object, ...], tuple[str, ...]]:
    return (charge.attempt or 0,), (str(charge.attempt or "-"),)


def _of_jobs(
    head: str, key: Callable[[Charge], tuple[tuple[object, ...], tuple[str, ...]]], *, many_jobs: bool
) -> Grouping:
    if not many_jobs:
        return Grouping(heads=(head,), key=lambda item: key(item.charge))

    def with_job(item: Item) -> tuple[tuple[object, ...], tuple[str, ...]]:
        order, name = key(item.charge)
        return (item.job, *order), (item.job, *name)

    return Grouping(heads=("job", head), key=with_job)


def _row(name: tuple[str, ...], charges: list[Charge]) -> Row:
    sums: dict[ChargeKind, Decimal] = {}
    start, end, machine_time = charges[0].start, charges[0].end, timedelta(0)
    for charge in charges:  # thousands of times: one pass
        sums[charge.kind] = sums.get(charge.kind, ZERO) + charge.usd
        start, end = min(start, charge.start), max(end, charge.end)
        if charge.kind is ChargeKind.COMPUTE:
            machine_time += charge.end - charge.start
    return Row(
        name=name,
        start=start,
        end=end,
        machine_time=machine_time,
        usd=sum(sums.values(), ZERO),
        usd_by_kind=sums,
        estimated=any(charge.estimated for charge in charges),
    )


# What the cloud says that a job has cost, set beside what its ledger says, by day and kind.


# Usage types as AWS's bills name them, in us-west-2 with USW2- in front (Cost and Usage Report user guide).
_BILLED_KINDS = (
    (r"(Spot|Box)Usage(:|$)", ChargeKind.COMPUTE),
    (r"EBS:Volume", ChargeKind.DISK),
    (r"PublicIPv4:|ElasticIP:", ChargeKind.ADDRESS),
    (r"TimedStorage-", ChargeKind.STORAGE),
    (r"Requests-Tier", ChargeKind.REQUESTS),
    (r"(DataTransfer|AWS|NatGateway).*-Bytes$", ChargeKind.TRANSFER),
    (r"NatGateway-Hours$", ChargeKind.GATEWAY),
)
_OF_NO_JOB = (ChargeKind.STORAGE, ChargeKind.REQUESTS, ChargeKind.DATA, ChargeKind.DRILL)
LAG = timedelta(days=2)
"""After so long a day's figures hardly change any more: billing data comes about 24 h late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledLine:
    """One usage type on one day (`2026-11-21`, UTC), as the cloud tells it."""

    day: str
    usage: str
    usd: Decimal

    @property
    def kind(self) -> ChargeKind | None:
        """What it pays for; None for a usage type that is not known."""
        return next((kind for pattern, kind in _BILLED_KINDS if re.search(pattern, self.usage)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Billed:
    """The cloud's figures for one job from the day `first` on, as they were at `asked_at`, in so many paid requests."""

    asked_at: datetime
    first: str
    lines: tuple[BilledLine, ...]
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Our sum and the cloud's for one day and kind. `final`: the cloud's figure will hardly change."""

    day: str
    kind: ChargeKind | None
    ours_usd: Decimal
    billed_usd: Decimal
    final: bool

    @property
    def drift_usd(self) -> Decimal:
        """How much more the cloud says than we do."""
        return self.billed_usd - self.ours_usd


def beside(charges: Iterable[Charge], billed: Billed) -> tuple[Beside, ...]:
    """Return the two sums for every day and kind that either knows, up to the moment that the cloud was asked.

    What no job's tag is on is left out: a bucket is billed for what it stores, is asked and sends to another region,
    and a drill bears the tag of no machine.
    """
    ours: dict[tuple[str, ChargeKind | None], Decimal] = {}
    theirs: dict[tuple[str, ChargeKind | None], Decimal] = {}
    for charge in split_by_day(charge for charge in charges if charge.kind not in _OF_NO_JOB):
        _add(ours, (f"{charge.start:%Y-%m-%d}", charge.kind), charge.usd)
    for line in billed.lines:
        _add(theirs, (line.day, line.kind), line.usd)
    last, final = f"{billed.asked_at:%Y-%m-%d}", f"{billed.asked_at - LAG:%Y-%m-%d}"
    days = sorted({(day, kind) for day, kind in (*ours, *theirs) if billed.first <= day <= last}, key=_order)
    return tuple(
        Beside(
            day=day,
            kind=kind,
            ours_usd=ours.get((day, kind), ZERO),
            billed_usd=theirs.get((day, kind), ZERO),
            final=day < final,
        )
        for day, kind in days
        if ours.get((day, kind)) or theirs.get((day, kind))
    )


def _add(sums: dict[tuple[str, ChargeKind | None], Decimal], key: tuple[str, ChargeKind | None], usd: Decimal) -> None:
    sums[key] = sums.get(key, ZERO) + usd


def _order(key: tuple[str, ChargeKind | None]) -> tuple[str, int]:
    day, kind = key
    return day, list(ChargeKind).index(kind) if kind is not None else len(ChargeKind)
