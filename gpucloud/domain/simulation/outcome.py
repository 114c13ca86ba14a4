"""What replays of one job came to: each one, and all together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

_CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay: its bill, when the work was done (None: not before recording or budget ended), and what went wrong.

    `on_spot` is for how long it had spot machines.
    """

    usd: Decimal
    took: timedelta | None
    missed: bool
    over_budget: bool
    interruptions: int
    launches: int
    on_spot: timedelta = timedelta(0)

    @property
    def ended(self) -> bool:
        """Whether the job came to its end, or to that of its budget: only then is known what it costs."""
        return self.took is not None or self.over_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many replays of one job under one policy: costs in USD to the cent, means of the rest.

    The `unended` of them came to no end before the recording did: their costs are not known, and not in the sums.
    """

    windows: int
    mean_usd: Decimal
    p90_usd: Decimal
    worst_usd: Decimal
    missed: int
    over_budget: int
    interruptions: float
    launches: float
    took: timedelta | None
    on_spot: timedelta = timedelta(0)
    unended: int = 0

    def is_over(self, budget_usd: Decimal, *, once_in: int = 1) -> bool:
        """Whether all that ended, or more than once in so many, had used up the budget before their work was done."""
        if not self.windows:
            return self.mean_usd > budget_usd
        ended = self.windows - self.unended
        return self.over_budget == ended if once_in == 1 else self.over_budget * once_in > ended


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Return the outcomes taken together; `took` is the mean of those that came to their end.

    The 90th percentile is by nearest rank: the least cost that nine in ten did not pass. Where no outcome has an end,
    costs are what was paid until the recording's.
    """
    ended = [one for one in outcomes if one.ended]
    costs = sorted(one.usd for one in ended or outcomes)
    done = [one.took for one in outcomes if one.took is not None]
    return Summary(
        windows=len(outcomes),
        mean_usd=(sum(costs, Decimal(0)) / len(costs)).quantize(_CENT),
        p90_usd=costs[math.ceil(0.9 * len(costs)) - 1].quantize(_CENT),
        worst_usd=costs[-1].quantize(_CENT),
        missed=sum(one.missed for one in outcomes),
        over_budget=sum(one.over_budget for one in outcomes),
        interruptions=_mean(outcomes, lambda one: one.interruptions),
        launches=_mean(outcomes, lambda one: one.launches),
        took=sum(done, timedelta(0)) / len(done) if done else None,
        on_spot=sum((one.on_spot for one in outcomes), timedelta(0)) / len(outcomes),
        unended=len(outcomes) - len(ended),
    )


def _mean(outcomes: Sequence[Outcome], count: Callable[[Outcome], int]) -> float:
    return sum(map(count, outcomes)) / len(outcomes)
