"""What an attempt costs that the budget does not count: checkpoints' room, requests, bytes from other regions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import ROUND_HALF_UP, Decimal

from gpucloud.domain.checkpoint.objects import PART_BYTES
from gpucloud.domain.job.data import DataSet, gigabytes
from gpucloud.domain.job.quantities import counted, format_size, format_usd
from gpucloud.domain.money.ledger import ZERO, Charge, ChargeKind, Rates, total

_SMALLEST = Decimal("0.00000001")
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
