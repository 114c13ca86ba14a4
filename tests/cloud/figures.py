"""What the run on a real account concludes, and when it must stop: nothing here asks AWS."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal

MOST_USD = Decimal(5)
# The guard looks every few seconds, and what it has ended is charged for some seconds more.
STOP_AT_USD = Decimal("4.5")


class TooDear(Exception):
    """What was rented so far has cost as much as the whole run may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An instance of ours, alive or not; `ended_at` is None while it is charged."""

    id: str
    launched_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that stands in the account; `base` when it belongs to the region and not to a job."""

    kind: str
    id: str
    base: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(slots=True)
class Figures:
    """Prints each figure as it is known, and remembers those that missed their limit."""

    missed: list[str] = field(default_factory=list)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Tell a figure that must not be above its limit."""
        self._tell(name, _number(value), f"<={_number(limit)}", kept=value <= limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Tell a figure that must not be below its limit."""
        self._tell(name, _number(value), f">={_number(limit)}", kept=value >= limit)

    def equal(self, name: str, value: object, wanted: object) -> None:
        """Tell what must be so."""
        self._tell(name, _word(value), f"={_word(wanted)}", kept=value == wanted)

    def told(self, name: str, value: object) -> None:
        """Tell what is only to be known."""
        self._tell(name, _word(value), "-", kept=True)

    def _tell(self, name: str, value: str, limit: str, *, kept: bool) -> None:
        print(f"FIGURE {name} {value} {limit} {'pass' if kept else 'fail'}", flush=True)
        if not kept:
            self.missed.append(name)


def left_over(before: frozenset[Resource], after: frozenset[Resource]) -> tuple[Resource, ...]:
    """Return what stands now, stood not before, and is no part of the base."""
    return tuple(sorted((one for one in after - before if not one.base), key=str))


def appeared(before: frozenset[Resource], after: frozenset[Resource]) -> tuple[Resource, ...]:
    """Return whatever stands now and stood not before."""
    return tuple(sorted(after - before, key=str))


def vanished(before: frozenset[Resource], after: frozenset[Resource]) -> tuple[Resource, ...]:
    """Return what stood before and is gone: this run must not have touched it."""
    return tuple(sorted(before - after, key=str))


def cost_usd(machines: Iterable[Machine], usd_per_hour: Decimal, now: datetime) -> Decimal:
    """Return what the machines have cost at the most: the highest price, a minute at least, no refund counted."""
    seconds = sum((max(_lived(machine, now), timedelta(minutes=1)).total_seconds() for machine in machines), start=0.0)
    return (Decimal(seconds) * usd_per_hour / 3600).quantize(Decimal("0.0001"))


def guard(spent_usd: Decimal) -> None:
    """Raise TooDear when the run must be broken off."""
    if spent_usd >= STOP_AT_USD:
        raise TooDear(f"{spent_usd} USD are spent; the run is broken off at {STOP_AT_USD} USD")


def median(values: Sequence[float]) -> float:
    """Return the middle of an odd number of values."""
    return sorted(values)[len(values) // 2]


def refund_command(instance_id: str, day: date) -> str:
    """Return the command that reads what the bill says of one instance (resource level must be on in Cost Explorer)."""
    compute = {"Dimensions": {"Key": "SERVICE", "Values": ["Amazon Elastic Compute Cloud - Compute"]}}
    this = {"Dimensions": {"Key": "RESOURCE_ID", "Values": [instance_id]}}
    return (
        f"aws ce get-cost-and-usage-with-resources --time-period Start={day},End={day + timedelta(days=2)}"
        " --granularity DAILY --metrics UnblendedCost --group-by Type=DIMENSION,Key=RESOURCE_ID"
        f" --filter '{json.dumps({'And': [compute, this]})}'"
    )


def _lived(machine: Machine, now: datetime) -> timedelta:
    return (machine.ended_at or now) - machine.launched_at


def _number(value: float) -> str:
    return f"{float(value):.4f}".rstrip("0").rstrip(".")


def _word(value: object) -> str:
    return str(value).replace(" ", "_") or "none"
