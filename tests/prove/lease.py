"""Supervisors that pause, die and lose replies never overwrite each other, and no old one is obeyed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.prove.goal import Figure, Form, Goal
from tests.sim.leases import Outcome, Schedule
from tests.sim.many import each

_RUNS = {Form.SHORT: 200, Form.LONG: 20_000}


def run(form: Form) -> Iterator[Figure]:
    """Count the schedules in which anything went wrong, and how much was tried."""
    wrong, owners, acknowledged, refused = 0, 0, 0, 0
    for seed, outcome in each(schedule, _RUNS[form], form):
        wrong += bool(outcome.wrong)
        owners += outcome.owners
        acknowledged += outcome.acknowledged
        refused += outcome.refused_commands
        for line in outcome.wrong[:3]:
            sys.stderr.write(f"lease: seed {seed}: {line}\n")
    yield Figure(name="lease", value=wrong, limit=0)
    yield Figure(name="lease.schedules", value=_RUNS[form], limit=_RUNS[form], least=True)
    yield Figure(name="lease.owners", value=owners, limit=2 * _RUNS[form], least=True)
    yield Figure(name="lease.updates", value=acknowledged, limit=10 * _RUNS[form], least=True)
    yield Figure(name="lease.stale-commands-refused", value=refused, limit=_RUNS[form] / 10, least=True)


def schedule(seed: int) -> Outcome:
    """Return what the schedule of that seed showed."""
    with tempfile.TemporaryDirectory() as folder:
        return Schedule(seed, Path(folder) / "agent").run()


GOAL = Goal(
    promise="two to four supervisors of one job are killed, paused past their lease, lose replies and are up to an "
    "hour off: no update is lost, no epoch is given twice or falls, no node obeys an older one, nobody is told of a "
    "loss that was none",
    real="the lease with its renewals, the job's state as it is stored, the agent's inbox with its fence",
    simulated="the object store, time, processes and their deaths",
    run=run,
)
