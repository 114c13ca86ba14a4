"""When the budget ends, the last step is saved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict

_RUNS = {Form.SHORT: 12, Form.LONG: 500}


def run(form: Form) -> Iterator[Figure]:
    """Count the runs whose last steps were not in a committed checkpoint when the machines went."""
    unsaved, wrong, commits = 0, 0, 0
    for seed, found in each(partial(verdict, draw=setting.short_of_money), _RUNS[form], form):
        unsaved += found.unsaved_at_the_end > 0
        wrong += bool(found.wrong)
        commits += found.commits
        tell("budget-save", seed, found.wrong)
        if found.unsaved_at_the_end:
            tell("budget-save", seed, [f"{found.unsaved_at_the_end} steps were not saved at the end"])
    yield Figure(name="budget-save", value=unsaved, limit=0)
    yield Figure(name="budget-save.wrong", value=wrong, limit=0)
    yield Figure(name="budget-save.runs", value=_RUNS[form], limit=_RUNS[form], least=True)
    yield Figure(name="budget-save.commits", value=commits, limit=_RUNS[form], least=True)


GOAL = Goal(
    promise="a budget that ends at a random moment of the work, some supervisors dead or offline: every rank saves "
    "before the machines go, and the newest step is committed",
    real="prepaid rule, supervisor, the agent's own wall, the checkpoint protocol",
    simulated="time, machines, prices, the store, the ranks; steps take up to 10 s, saves up to 25 s",
    run=run,
)
