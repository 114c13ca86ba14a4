"""Whatever goes wrong, and however much of it at once, a job comes to its right end, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict

_RUNS = {Form.SHORT: 20, Form.LONG: 1000}


def run(form: Form) -> Iterator[Figure]:
    """Count the runs in which anything was wrong at any moment."""
    wrong, supervisors, machines, attempts = 0, 0, 0, 0
    for seed, found in each(partial(verdict, draw=setting.storm), _RUNS[form], form):
        wrong += bool(found.wrong)
        supervisors += found.supervisors
        machines += found.machines
        attempts += found.attempts
        tell("storm", seed, found.wrong)
    yield Figure(name="storm", value=wrong, limit=0)
    yield Figure(name="storm.runs", value=_RUNS[form], limit=_RUNS[form], least=True)
    yield Figure(name="storm.supervisors", value=supervisors, limit=2 * _RUNS[form], least=True)
    yield Figure(name="storm.machines", value=machines, limit=3 * _RUNS[form], least=True)
    yield Figure(name="storm.attempts", value=attempts, limit=_RUNS[form], least=True)


GOAL = Goal(
    promise="notices, deaths, freezes, hangs, lost agents, cuts, offline and dead supervisors and rivals, full zones, "
    "store outages, stale lists, lost replies and clocks an hour off: machines live only under an armed shut-off that "
    "the budget pays, never two attempts at once, no committed step is lost, and the job ends rightly, billed, with "
    "nothing left",
    real="supervisor (observe, decide, act), lease, books, cashier, preparer, the agent with its fence, the checkpoint "
    "protocol, the embedded cloud's rule for a group",
    simulated="time, processes, SSH, the bootstrap's steps, the store, the cloud's machines and prices, the ranks",
    run=run,
)
