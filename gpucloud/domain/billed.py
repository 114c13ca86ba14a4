"""What the cloud says that a job has cost, set beside what its ledger says, by day and kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.costs import split_by_day
from gpucloud.domain.ledger import ZERO, Charge, ChargeKind

# Usage types as AWS's bills name them, in us-west-2 with USW2- in front (Cost and Usage Report user guide).
_KINDS = (
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
        return next((kind for pattern, kind in _KINDS if re.search(pattern, self.usage)), None)


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
