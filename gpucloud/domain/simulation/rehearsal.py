"""One job on one recorded market, replayed from as many moments as is asked: what `plan` and `simulate` say of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.ledger import Terms
from gpucloud.domain.markets import RecordedMarket, RecordedZone
from gpucloud.domain.offer import region_of
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.bill import bill_usd
from gpucloud.domain.simulation.fleet import ON_DEMAND
from gpucloud.domain.simulation.outcome import Outcome
from gpucloud.domain.simulation.recovery import Recovery
from gpucloud.domain.simulation.replay import Decide, Run, replay
from gpucloud.domain.simulation.timeline import LOOK_S, Timeline

_SINGLE = ("p3.2xlarge-2023-02",)
_PATIENCE = 3.0  # a job that may wait for ever is followed for so many times its work
_EIGHT = ("p3.16xlarge-2022-10", "p3.16xlarge-2022-11", "p3.16xlarge-2022-12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is replayed: the task as policies are told of it, the market as it sees it, what a launch takes and costs.

    The task's price on demand and the market's views have in them what stands beside a machine; the bill has it by the
    `terms`. Whatever passes `budget_usd` ends there, as the supervisor ends it; policies are told of `spendable_usd`.
    """

    task: Task
    market: Timeline
    recovery: Recovery
    budget_usd: Decimal
    spendable_usd: Decimal
    terms: Terms


def outcomes(decide: Decide, of: Rehearsal, starts: Iterable[int]) -> Iterator[Outcome]:
    """Yield how the job goes that is submitted at these looks.

    One that does not come to its end before the recording does has missed its deadline: nobody knows what it costs.
    """
    for start in starts:
        run = replay(decide, of.task, of.market, start, of.recovery, float(of.spendable_usd))
        usd = bill_usd(run, of.market, of.terms)
        over = usd > of.budget_usd
        took = None if over or run.finished_s is None else timedelta(seconds=run.finished_s)
        yield Outcome(
            usd=min(usd, of.budget_usd),
            took=took,
            missed=took is None or took.total_seconds() > of.task.span_s,
            over_budget=over,
            interruptions=run.interruptions,
            launches=run.launches,
            on_spot=_on_spot(run),
        )


def recordings(gpus: int) -> tuple[str, ...]:
    """Return the names of the recordings that stand for machines with so many GPUs."""
    return _EIGHT if gpus > 2 else _SINGLE


def zone_sets(market: RecordedMarket, zones: int) -> tuple[tuple[tuple[RecordedZone, ...], ...], ...]:
    """Return, for each recorded region, every set of so many of its zones: what a job in one region would have.

    All of the region's where it has no more. A set that is too small would be another job's.
    """
    found = []
    for region in market.regions:
        there = [zone for zone in market.zones if region_of(zone.name) == region]
        found.append(tuple(itertools.combinations(there, min(zones, len(there)))))
    return tuple(found)


def spread(room: int, sets: int, windows: int) -> tuple[tuple[int, ...], ...]:
    """Return starts for each of so many sets of zones: about so many in all, all apart, and as many for every set."""
    each = -(-windows // sets)
    last = max(1, each * sets - 1)
    at = [round(room * number / last) for number in range(each * sets)]
    return tuple(tuple(sorted(set(at[own::sets]))) for own in range(sets))


def room_for(market: Timeline, followed_s: float) -> int:
    """Return the last look at which a job may begin that is followed for so long."""
    return max(0, market.looks - math.ceil(followed_s / LOOK_S) - 1)


def followed_s(task: Task, *, fallback: bool) -> float:
    """Return for how long a replay is followed: to its deadline, or where nothing ends it for a few times its work."""
    if math.isfinite(task.span_s):
        return task.span_s
    return (task.work_s * (2.0 if fallback else _PATIENCE)) + task.changeover_s


def _on_spot(run: Run) -> timedelta:
    """Return for how long spot machines were held; of several at once, such as those of a gang, once."""
    lives: Sequence[tuple[float, float]] = sorted(
        (life.launched_s, life.ended_s) for life in run.lives if life.zone != ON_DEMAND
    )
    held_s = until_s = 0.0
    for start_s, end_s in lives:
        held_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return timedelta(seconds=held_s)
