"""Charges of one job or many, summed by what people ask for: job, attempt, node, day, kind or tag."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta, timezone
from decimal import ROUND_HALF_UP, Decimal
from enum import Enum

from gpucloud.domain.errors import UsageError
from gpucloud.domain.ledger import ZERO, Charge, ChargeKind

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
