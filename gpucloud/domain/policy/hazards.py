"""How likely a spot zone comes and goes by the age of that state, counted on recorded markets.

Up-times are heavy-tailed: half of them end within the hour, and what has lived through a day mostly lives through
another. A rate per age bucket catches that; one rate for all ages does not.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EDGES_H = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Where the age buckets begin, in hours; the last has no end."""
BUCKETS = len(EDGES_H)
_LONGEST_H = 48.0
_WEIGHT_OF_MEAN = 2.0
_WEIGHT_OF_POOLED = 8.0

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a recording shows, by age bucket: hours up and down, and how often that state ended.

    Of several zones one is watched at a time: the one that a job would be on. `replaced` of the `lost` times another
    zone was up at once, whose age then lay in the bucket counted in `entered`.
    """

    up_ends: Row
    up_h: Row
    down_ends: Row
    down_h: Row
    lost: float
    replaced: float
    entered: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """Rates per hour at which an up or a down time ends, by age bucket.

    `replaced` is the probability that another zone is up when one is lost, `entered` of which age.
    """

    up_per_h: Row
    down_per_h: Row
    replaced: float
    entered: Row


def bucket(age_h: float) -> int:
    """Return the index of the age bucket."""
    return bisect_right(EDGES_H, age_h) - 1


def pooled(counts: Iterable[Counts]) -> Counts:
    """Return the sum of all that was counted."""
    every = list(counts)
    return Counts(
        up_ends=_sum([one.up_ends for one in every]),
        up_h=_sum([one.up_h for one in every]),
        down_ends=_sum([one.down_ends for one in every]),
        down_h=_sum([one.down_h for one in every]),
        lost=sum(one.lost for one in every),
        replaced=sum(one.replaced for one in every),
        entered=_sum([one.entered for one in every]),
    )


def learned_from(others: Counts, *nearer: Counts) -> Hazards:
    """Return the rates that other zones show, drawn to what each of the nearer shows: machines of that size, own past.

    Each rate is (events + a) / (hours + a / prior): a bucket with few hours says little, and takes after the prior,
    which for the others is their rate over all ages (a = 2), and for the nearer what came before them (a = 8).
    """
    found = Hazards(
        up_per_h=_rates(others.up_ends, others.up_h, _mean(others.up_ends, others.up_h), _WEIGHT_OF_MEAN),
        down_per_h=_rates(others.down_ends, others.down_h, _mean(others.down_ends, others.down_h), _WEIGHT_OF_MEAN),
        replaced=(others.replaced + 0.5) / (others.lost + 1.0),
        entered=_shares(others.entered, (1.0 / BUCKETS,) * BUCKETS),
    )
    a = _WEIGHT_OF_POOLED
    for counts in nearer:
        found = Hazards(
            up_per_h=_rates(counts.up_ends, counts.up_h, found.up_per_h, a),
            down_per_h=_rates(counts.down_ends, counts.down_h, found.down_per_h, a),
            replaced=(counts.replaced + a * found.replaced) / (counts.lost + a),
            entered=_shares(counts.entered, tuple(a * share for share in found.entered)),
        )
    return found


def remaining_h(hazards: Hazards) -> Row:
    """Return the up-time that may be expected still, in hours, by age bucket; two days at the most."""
    expected = [1 / hazards.up_per_h[-1]]
    spans = [end - start for start, end in itertools.pairwise(EDGES_H)]
    for span, rate in reversed(list(zip(spans, hazards.up_per_h[:-1], strict=True))):
        survives = math.exp(-rate * span)
        expected.append((1 - survives) / rate + survives * expected[-1])
    return tuple(min(hours, _LONGEST_H) for hours in reversed(expected))


def _sum(rows: Sequence[Row]) -> Row:
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0.0,) * BUCKETS


def _mean(ends: Row, hours: Row) -> Row:
    return (max(sum(ends), 0.5) / max(sum(hours), 1.0),) * BUCKETS


def _rates(ends: Row, hours: Row, prior: Row, weight: float) -> Row:
    return tuple((n + weight) / (h + weight / rate) for n, h, rate in zip(ends, hours, prior, strict=True))


def _shares(counted: Row, prior: Row) -> Row:
    whole = sum(counted) + sum(prior)
    return tuple((n + p) / whole for n, p in zip(counted, prior, strict=True))
