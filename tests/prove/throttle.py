"""A cloud that refuses many calls is not asked much more often for it, and the machines still come."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict

_RUNS = {Form.SHORT: 20, Form.LONG: 400}
_THROTTLED = 0.3


def run(form: Form) -> Iterator[Figure]:
    """Count runs that did not come up, or were wrong, and the calls until all machines are up against a quiet cloud."""
    wrong, quiet, throttled = 0, 0, 0
    drawn = partial(setting.coming_up, throttled=_THROTTLED)
    undisturbed = each(partial(verdict, draw=setting.coming_up), _RUNS[form], form)
    for (seed, found), (_, before) in zip(
        each(partial(verdict, draw=drawn), _RUNS[form], form), undisturbed, strict=True
    ):
        wrong += bool(found.wrong) or not found.calls_until_up or bool(before.wrong)
        quiet += before.calls_until_up
        throttled += found.calls_until_up
        tell("throttle", seed, [*found.wrong, *before.wrong])
    yield Figure(name="throttle", value=wrong, limit=0)
    yield Figure(name="throttle.runs", value=_RUNS[form], limit=_RUNS[form], least=True)
    yield Figure(name="throttle.calls", value=round(throttled / quiet, 2), limit=1.5)


GOAL = Goal(
    promise="with 30 % of all calls refused in the first minute, the machines are up after at most 1.5 times the calls "
    "of a quiet run, and nothing else goes wrong",
    real="supervisor with its patience, books, the embedded cloud's rule for a group",
    simulated="time, the cloud and its refusals (the AWS library's own repetitions are not among the calls), machines",
    run=run,
)
