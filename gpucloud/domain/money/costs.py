"""Charges summed by what people ask for, the cloud's bill beside them, and what the budget does not count."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta, timezone
from decimal import ROUND_HALF_UP, Decimal
from enum import Enum

from gpucloud.domain.checkpoint.objects import PART_BYTES
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.data import DataSet, gigabytes
from gpucloud.domain.job.quantities import counted, format_size, format_usd
from gpucloud.domain.money.ledger import ZERO, Charge, ChargeKind, Rates, total

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
class BillDifference:
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


def bill_differences(charges: Iterable[Charge], billed: Billed) -> tuple[BillDifference, ...]:
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
        BillDifference(
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


# What an attempt costs that the budget does not count: checkpoints' room, requests, bytes from other regions.


_SOME_MONTH = datetime(2026, 1, 1, tzinfo=timezone.utc)  # of 31 days; a shorter one costs up to a tenth more
_COLLECTED_LASTS = timedelta(hours=36)
"""A deleted object's day begins at the midnight (UTC) after it: S3 keeps it for 24 to 48 hours, and charges them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sundries:
    """What was used from `start` to `end`, an attempt's end; of no attempt where a command used it later.

    `stored` bytes of checkpoints were there at the end, and `saves` of `save_bytes` in `save_puts` requests are thought
    to have been made by the machines, of which nobody counts the requests. `puts` and `gets` were counted, and `sent`
    bytes left the cloud. `read` bytes of data are thought to have been read from buckets in other regions, for
    `read_usd`.
    """

    attempt: int | None
    start: datetime
    end: datetime
    stored: int = 0
    saves: int = 0
    save_bytes: int = 0
    save_puts: int = 0
    puts: int = 0
    gets: int = 0
    sent: int = 0
    read: int = 0
    read_usd: Decimal = ZERO


def charges_of(used: Sundries, rates: Rates) -> tuple[Charge, ...]:
    """Return the charges, one a kind; none for what costs nothing.

    Storage is what there was at the end, for the whole time, and each checkpoint that was collected meanwhile for the
    day and a half for which the bucket keeps deleted objects.
    """
    collected = max(0, used.saves * used.save_bytes - used.stored)
    storage = rates.storage_usd(used.stored, used.start, used.end)
    storage += rates.storage_usd(collected, used.end, used.end + _COLLECTED_LASTS)
    puts = used.puts + used.saves * used.save_puts
    return tuple(
        _charge(used, kind, usd, note, estimated=estimated)
        for kind, usd, note, estimated in (
            (ChargeKind.STORAGE, storage, f"{format_size(used.stored)} of checkpoints", True),
            (ChargeKind.REQUESTS, rates.requests_usd(puts, used.gets), f"{puts} PUT, {used.gets} GET", used.saves > 0),
            (ChargeKind.TRANSFER, rates.transfer_usd(used.sent), f"{format_size(used.sent)} brought home", False),
            (ChargeKind.DATA, used.read_usd, f"{format_size(used.read)} of data from another region", True),
        )
        if usd.quantize(_SMALLEST) > ZERO
    )


def usd_of_saves(size: int, saves: int, keep: int, span: timedelta, rates: Rates) -> Decimal:
    """Return what so many checkpoints of `size` bytes cost in S3 over the span, of which `keep` stay at a time."""
    end = _SOME_MONTH + span
    puts = -(-size // PART_BYTES) + 2  # its parts, the manifest, and the list of what may be collected
    used = Sundries(
        attempt=None,
        start=_SOME_MONTH,
        end=end,
        stored=min(keep, saves) * size,
        saves=saves,
        save_bytes=size,
        save_puts=puts,
    )
    return total(charges_of(used, rates))


def drill_charges(attempt: int, at: datetime, rates: Rates) -> tuple[Charge, ...]:
    """Return the charge for one machine that is interrupted on request; none where that costs nothing."""
    used = Sundries(attempt=attempt, start=at, end=at)
    note = "a notice on request"
    return (_charge(used, ChargeKind.DRILL, rates.drill_usd, note, estimated=False),) if rates.drill_usd else ()


def saves_made(first: int | None, last: int | None, committed: tuple[int, ...]) -> int:
    """Return how many checkpoints an attempt's steps are thought to have made.

    `committed` are the steps of those that are left: their least distance is taken for the distance of all.
    """
    own = sorted({step for step in committed if first is not None and last is not None and first <= step <= last})
    if first is None or last is None or len(own) < 2:
        return len(own)
    apart = min(later - earlier for earlier, later in itertools.pairwise(own))
    return max(len(own), (last - first + 1) // apart)


def _charge(used: Sundries, kind: ChargeKind, usd: Decimal, note: str, *, estimated: bool) -> Charge:
    return Charge(
        node_id="",
        attempt=used.attempt,
        start=used.start,
        end=used.end,
        usd_per_hour=ZERO,
        usd=usd.quantize(_SMALLEST, ROUND_HALF_UP),
        kind=kind,
        note=note,
        estimated=estimated,
    )


# What it costs when nodes read data from a bucket in another region.


# Between regions of North America and Europe: AWS re:Post, "Cost effective methods for accessing S3 buckets
# cross-region", prices of January 2026. Elsewhere prices differ by region, and none is known to be above this.
_USD_PER_GB = Decimal("0.02")
_CHEAP = ("us-", "ca-", "eu-")
_MOST_USD_PER_GB = Decimal("0.15")


def transfer_usd(found: DataSet, region: str, nodes: int) -> Decimal:
    """Return the most that S3 charges when `nodes` nodes in `region` read the set once each; nothing in its region."""
    if found.region is None or found.region == region:
        return Decimal(0)
    per_gb = _USD_PER_GB if found.region.startswith(_CHEAP) else _MOST_USD_PER_GB
    return per_gb * found.size * nodes / 10**9


def remark(found: DataSet, region: str, nodes: int) -> str | None:
    """Return what the user should know before machines are rented; None where reading is free."""
    usd = transfer_usd(found, region, nodes).quantize(Decimal("0.01"))
    if not usd:
        return None
    return (
        f"data: {found.source} is in {found.region}, the machines are in {region}: reading {gigabytes(found.size)} on"
        f" {counted(nodes, 'node')} costs up to {format_usd(usd)} (list prices of January 2026), again for each"
        " replacement; the budget does not count it"
    )
