"""Nobody is there any more when the paid time ends: the cloud's own schedule has every machine off."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.adapters.local.records import CLOCK_FACTOR
from tests.commandline import until
from tests.prove.goal import Figure, Form, Goal
from tests.standins.quick_fleet import QuickFleet, living, quick_fleet

_SEEDS = {Form.SHORT: range(1), Form.LONG: range(20)}
_HORIZON_S = {Form.SHORT: 4.0, Form.LONG: 12.0}
_KILL_WITHIN_S = {Form.SHORT: 3.0, Form.LONG: 15.0}
_LIMIT_S = 150.0 / CLOCK_FACTOR
_PATIENCE_S = 60.0
"""After which a machine counts as never switched off; no promise, so that a busy computer fails nothing."""


@dataclass
class _Round:
    wrong: list[str]
    machines: int
    late_s: float


def run(form: Form) -> Iterator[Figure]:
    """Kill the command line at random times, and the agents of half the machines, and wait for the end."""
    rounds = []
    for seed in _SEEDS[form]:
        with tempfile.TemporaryDirectory() as folder, quick_fleet(Path(folder), horizon_s=_HORIZON_S[form]) as line:
            rounds.append(_one(line, random.Random(seed), _KILL_WITHIN_S[form]))
        for what in rounds[-1].wrong:
            sys.stderr.write(f"deadman: seed {seed}: {what}\n")
    yield Figure(name="deadman", value=sum(bool(one.wrong) for one in rounds), limit=0)
    yield Figure(name="deadman.machines", value=sum(one.machines for one in rounds), limit=len(rounds), least=True)
    if form is Form.LONG:
        yield Figure(name="deadman.off-after-paid-s", value=max(one.late_s for one in rounds), limit=_LIMIT_S)


def _one(line: QuickFleet, dice: random.Random, within_s: float) -> _Round:
    train = line.start("train", line.quick_job(steps=100_000, step_s=0.05))
    until(line.nodes, "machines")
    kill_at = time.monotonic() + dice.uniform(0, within_s)
    wrong: list[str] = []
    while time.monotonic() < kill_at:
        wrong = wrong or _unarmed(line)
        time.sleep(0.01)
    train.send_signal(signal.SIGKILL)
    train.wait()
    machines = line.nodes()
    for node in dice.sample(machines, len(machines) // 2):
        with contextlib.suppress(AssertionError):  # it had none yet
            os.kill(line.agent_of(node), signal.SIGKILL)
    wrong += _unarmed(line)
    return _watch(line, wrong, machines)


def _watch(line: QuickFleet, wrong: list[str], machines: list[str]) -> _Round:
    """Return when no process of any machine is left, or patience is at its end."""
    record = line.record
    paid_until = record.armed_until if record is not None else None
    if paid_until is None:
        return _Round([*wrong, "no machine was paid for"], len(machines), 0.0)
    while left := living(line):
        late_s = (datetime.now(timezone.utc) - paid_until).total_seconds()
        if late_s > _PATIENCE_S:
            return _Round([*wrong, f"still on {late_s:.0f} s after the paid time: {left}"], len(machines), late_s)
        time.sleep(0.02)
    late_s = (datetime.now(timezone.utc) - paid_until).total_seconds()
    # One that went long before was not ended by the schedule, and shows nothing.
    early = [f"all were off {-late_s:.1f} s before the paid time"] if late_s < -1 else []
    return _Round([*wrong, *early], len(machines), max(0.0, late_s))


def _unarmed(line: QuickFleet) -> list[str]:
    """Say so if a machine is there and no end of its time is."""
    record = line.record
    armed = record is not None and record.armed_until is not None
    return [] if armed or not line.nodes() else ["machines without a shut-off"]


GOAL = Goal(
    promise="with the command line killed, and agents too, every machine is off soon after its paid time",
    real="command line, supervisor, agents and machines, killed by SIGKILL; the schedule of the embedded cloud",
    simulated=f"the cloud is the embedded one, {CLOCK_FACTOR:g} times as quick: 150 s are {_LIMIT_S:g} s",
    run=run,
)
