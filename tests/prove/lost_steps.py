"""What a taken machine costs in steps: none with notice, at most one interval without, nothing committed ever."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict

_RUNS = {Form.SHORT: 12, Form.LONG: 600}


def run(form: Form) -> Iterator[Figure]:
    """Count the runs in which a committed step was lost, and the steps that were lost otherwise."""
    wrong, left, lost, killed, beyond = 0, 0, 0, 0, 0
    for seed, found in each(partial(verdict, draw=setting.taken_machines), _RUNS[form], form):
        wrong += bool(found.wrong)
        left += found.left_with_notice
        lost += found.lost_with_notice
        killed += found.killed
        beyond += found.lost_beyond_interval
        tell("lost-steps", seed, found.wrong)
    yield Figure(name="lost-steps", value=wrong, limit=0)
    yield Figure(name="lost-steps.with-notice", value=lost, limit=0)
    yield Figure(name="lost-steps.beyond-interval", value=beyond, limit=0)
    yield Figure(name="lost-steps.notices", value=left, limit=_RUNS[form] / 2, least=True)
    yield Figure(name="lost-steps.kills", value=killed, limit=_RUNS[form] / 2, least=True)


GOAL = Goal(
    promise="machines taken at random: with notice no step is lost, without at most those since the last save that "
    "was whole (one interval, and what was trained while its save was on its way), a committed step never",
    real="supervisor, agent, the checkpoint protocol with its order of restoring",
    simulated="time, machines, the store, the ranks",
    run=run,
)
