"""Work that does not fit into its budget costs no more than the budget, and uses nearly all of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict
from tests.sim.world import Verdict

_RUNS = {Form.SHORT: 10, Form.LONG: 10_000}
_HOURS = 50  # one run in so many is of hours


def run(form: Form) -> Iterator[Figure]:
    """Count the runs that cost more than their budget, or were wrong otherwise; and how much of it was used."""
    over, wrong, runs, on_a_part, grown, used = 0, 0, 0, 0, 0, []
    for seed, found in each(spend_it, _RUNS[form], form):
        runs += 1
        over += found.spent_usd > found.budget_usd
        wrong += bool(found.wrong)
        on_a_part += found.on_a_part
        grown += found.grown
        if seed % _HOURS == 0:
            used.append(float(100 * found.spent_usd / found.budget_usd))
        tell("budget", seed, found.wrong)
    yield Figure(name="budget", value=over, limit=0)
    yield Figure(name="budget.wrong", value=wrong, limit=0)
    yield Figure(name="budget.runs", value=runs, limit=_RUNS[form], least=True)
    yield Figure(name="budget.on-a-part", value=on_a_part, limit=_RUNS[form] // 10, least=True)
    yield Figure(name="budget.grown", value=grown, limit=_RUNS[form] // 100, least=True)
    yield Figure(name="budget.used", value=round(statistics.median(used), 2), limit=98, least=True)


def spend_it(seed: int) -> Verdict:
    """Return how the run of that seed ended."""
    return verdict(seed, setting.too_much_work if seed % _HOURS == 0 else setting.too_much_for_an_hour)


GOAL = Goal(
    promise="a quarter of an hour to 10 hours of budget and endless work, half of the runs at the capped price, some "
    "jobs on a range of nodes, with interruptions, dead and offline supervisors, clocks an hour off, and a shut-off up "
    "to 120 s late: overshoot 0, and in the median of the budgets of 4 hours and more at least 98 % used",
    real="supervisor, lease, prepaid rule, cashier and ledger, the agent's own wall, the embedded cloud's rule",
    simulated="time, machines, prices as a walk up to the cap, the store, the ranks",
    run=run,
)
