"""What a recorded market shows of how zones come and go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpucloud.domain.policy.hazards import BUCKETS, Counts, bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One tick of a recording: the zone that a job would be on (None: none is up), and the age of that state."""

    zone: int | None
    age_h: float


def watch(up: Sequence[Sequence[bool]], price: Sequence[Sequence[float]], tick_h: float) -> Iterator[Watched]:
    """Yield, tick by tick, the zone that a job would be on: the same while it is up, then the cheapest, the oldest.

    `up` and `price` are by tick and zone.
    """
    ages = [-1] * len(up[0])
    before: Sequence[bool] = up[0]
    zone, down = None, -1
    for now, prices in zip(up, price, strict=True):
        ages = [age + 1 if now[i] == before[i] else 0 for i, age in enumerate(ages)]
        if zone is None or not now[zone]:
            there = [i for i, is_up in enumerate(now) if is_up]
            found = min(there, key=lambda i: (prices[i], -ages[i]), default=None)
            down = down + 1 if found is None and zone is None else 0
            zone = found
        yield Watched(zone=zone, age_h=tick_h * (down if zone is None else ages[zone]))
        before = now


def count(ticks: Iterable[Watched], tick_h: float) -> Counts:
    """Return how long each state was watched and how often it ended, by age bucket."""
    ends = {True: [0.0] * BUCKETS, False: [0.0] * BUCKETS}
    hours = {True: [0.0] * BUCKETS, False: [0.0] * BUCKETS}
    entered = [0.0] * BUCKETS
    lost = replaced = 0.0
    for last, now in itertools.pairwise(ticks):
        is_up, at = last.zone is not None, bucket(last.age_h)
        hours[is_up][at] += tick_h
        if now.zone != last.zone:
            ends[is_up][at] += 1
            lost += is_up
            if is_up and now.zone is not None:
                replaced += 1
                entered[bucket(now.age_h)] += 1
    return Counts(
        up_ends=tuple(ends[True]),
        up_h=tuple(hours[True]),
        down_ends=tuple(ends[False]),
        down_h=tuple(hours[False]),
        lost=lost,
        replaced=replaced,
        entered=tuple(entered),
    )
