"""A job whose deadline machines on demand can keep is over in time, and within its budget, whatever spot does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpucloud.domain.state.state import ExitReason
from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict

_RUNS = {Form.SHORT: 8, Form.LONG: 1000}


def run(form: Form) -> Iterator[Figure]:
    """Count the runs that were late, those that cost more than their budget, and those in which anything was wrong."""
    runs = _RUNS[form]
    late, over, wrong, dear, moved, on_a_part = 0, 0, 0, 0, 0, 0
    for seed, found in each(partial(verdict, draw=setting.due), runs, form):
        late += found.reason is not ExitReason.SUCCEEDED
        over += found.spent_usd > found.budget_usd
        wrong += bool(found.wrong)
        dear += bool(found.on_demand)
        moved += found.moved
        on_a_part += found.on_a_part
        tell("deadline", seed, found.wrong)
    yield Figure(name="deadline", value=late, limit=0)
    yield Figure(name="deadline.over-budget", value=over, limit=0)
    yield Figure(name="deadline.wrong", value=wrong, limit=0)
    yield Figure(name="deadline.runs", value=runs, limit=runs, least=True)
    yield Figure(name="deadline.on-demand", value=dear, limit=runs // 8, least=True)
    yield Figure(name="deadline.moved", value=moved, limit=runs // 8, least=True)
    yield Figure(name="deadline.on-a-part", value=on_a_part, limit=runs // 100, least=True)


GOAL = Goal(
    promise="spot pools that are full most of the time, come back, and take their machines when they are full again;"
    " some jobs on a range of nodes, which lose a part of them; machines that die, supervisors that are killed, lost"
    " replies; work known from the job file, a tenth too much, or not at all: no job is late whose deadline leaves 15 %"
    " and five starts, and none costs more than its budget",
    real="supervisor with policies and nets, succession of machines, books, cashier, prepaid rule, the agent, the"
    " checkpoint protocol, the embedded cloud's rule for a group",
    simulated="time, processes, SSH, the bootstrap's steps, the store, the cloud's machines and prices, the ranks;"
    " machines on demand can always be had",
    run=run,
)
