"""Whatever goes wrong, and however much of it at once, a job comes to its right end, and nothing is left behind."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.commandline import command_line
from tests.prove.goal import Figure, Form, Goal
from tests.sim import setting
from tests.sim.many import each
from tests.sim.runs import tell, verdict
from tests.standins.real_storm import Storm, undisturbed

_RUNS = {Form.SHORT: 20, Form.LONG: 1000}
_REAL_RUNS = 20


def run(form: Form) -> Iterator[Figure]:
    """Count the runs in which anything was wrong at any moment."""
    wrong, supervisors, machines, attempts, on_a_part = 0, 0, 0, 0, 0
    for seed, found in each(partial(verdict, draw=setting.storm), _RUNS[form], form):
        wrong += bool(found.wrong)
        supervisors += found.supervisors
        machines += found.machines
        attempts += found.attempts
        on_a_part += found.on_a_part
        tell("storm", seed, found.wrong)
    yield Figure(name="storm", value=wrong, limit=0)
    yield Figure(name="storm.runs", value=_RUNS[form], limit=_RUNS[form], least=True)
    yield Figure(name="storm.supervisors", value=supervisors, limit=2 * _RUNS[form], least=True)
    yield Figure(name="storm.machines", value=machines, limit=3 * _RUNS[form], least=True)
    yield Figure(name="storm.attempts", value=attempts, limit=_RUNS[form], least=True)
    yield Figure(name="storm.on-a-part", value=on_a_part, limit=_RUNS[form] // 20, least=True)
    if form is Form.LONG:
        yield from _real()


def _real() -> Iterator[Figure]:
    wrong = events = attempts = 0
    with tempfile.TemporaryDirectory(prefix="gpucloud-") as name:
        expected = undisturbed(Path(name) / "undisturbed")
        for seed in range(_REAL_RUNS):
            folder = Path(name) / str(seed)
            folder.mkdir()
            with command_line(folder) as line:
                storm = Storm(line, seed)
                storm.rage(expected)
                attempts += storm.attempts
            wrong += bool(storm.wrong)
            events += len(storm.events)
            sys.stderr.write(f"storm: real, seed {seed}: {'; '.join(storm.wrong) or 'right'}: {storm.events}\n")
    yield Figure(name="storm.real", value=wrong, limit=0)
    yield Figure(name="storm.real-runs", value=_REAL_RUNS, limit=_REAL_RUNS, least=True)
    yield Figure(name="storm.real-events", value=events, limit=2 * _REAL_RUNS, least=True)
    yield Figure(name="storm.real-attempts", value=attempts, limit=2 * _REAL_RUNS, least=True)


GOAL = Goal(
    promise="notices, deaths, freezes, hangs, lost agents, cuts, offline and dead supervisors and rivals, full zones, "
    "store outages, stale lists, lost replies and clocks an hour off, over jobs on all of their nodes or on a range of "
    "them: machines live only under an armed shut-off that "
    "the budget pays, never two attempts at once, no committed step is lost, and the job ends rightly, billed, with "
    "nothing left",
    real="supervisor (observe, decide, act), lease, books, cashier, preparer, the agent with its fence, the checkpoint "
    "protocol, the embedded cloud's rule for a group; in 20 more of the long form everything of the embedded fleet: "
    "commands, machines with SSH, agents, torchrun, the store, and their weights are those of an undisturbed run",
    simulated="time, processes, SSH, the bootstrap's steps, the store, the cloud's machines and prices, the ranks; in "
    "the 20: the cloud",
    run=run,
)
