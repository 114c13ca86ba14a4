"""A run that is killed at random moments ends with the very bits of one that nothing disturbed."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpucloud.resume.run import Run
from tests.prove.goal import Figure, Form, Goal
from tests.standins.saved_runs import SavedRun, forking

STEPS = 24
_KILLS = 2  # of each run


def run(form: Form) -> Iterator[Figure]:
    """Yield how many runs ended otherwise, and how many kills there were."""
    runs = [1] if form is Form.SHORT else [1, 2, 3, 4, 2]
    wrong = kills = 0
    with tempfile.TemporaryDirectory() as folder, forking():
        for seed, ranks in enumerate(runs):
            whole = SavedRun(Path(folder) / f"whole-{seed}", ranks=ranks, steps=STEPS)
            began = time.monotonic()
            assert whole.attempt() == [0] * ranks, whole.said()
            step_s = (time.monotonic() - began) / STEPS
            killed = SavedRun(Path(folder) / f"killed-{seed}", ranks=ranks, steps=STEPS)
            kills += _killed(killed, random.Random(seed), step_s)
            if killed.attempt() != [0] * ranks or killed.digests() != whole.digests():
                wrong += 1
                sys.stderr.write(f"resume-exact: seed {seed}, {ranks} ranks: other bits\n{killed.said()[-500:]}\n")
    yield Figure(name="resume-exact", value=wrong, limit=0)
    yield Figure(name="resume-exact.kills", value=kills, limit=_KILLS * len(runs), least=True)


def _killed(run: SavedRun, chance: random.Random, step_s: float) -> int:
    """Start attempts, and kill a rank of each at a random moment; return how many died of it."""
    done = 0
    for _ in range(_KILLS):
        found = run.restored()
        step = chance.randrange(found.commit.step if found else 0, STEPS - 1) + 1
        hook = _killing(chance.randrange(run.ranks), step, chance.uniform(0.0, 2 * step_s))
        done += -signal.SIGKILL in run.attempt(hook)
    return done


def _killing(victim: int, step: int, after_s: float) -> Callable[[int], None]:
    """Kill the victim so long after it began to end that step, and before it ends the next: no run is over by then.

    A moment counted from the start may come when the run has ended: how long it takes is the machine's affair.
    """

    def hook(rank: int) -> None:
        if rank != victim:
            return
        ends = Run.step

        def step_or_die(self: Run, *, loss: Any = None) -> None:
            if self.steps_done + 1 == step:
                timer = threading.Timer(after_s, _die)
                timer.daemon = True
                timer.start()
            if self.steps_done + 1 > step:
                _die()
            ends(self, loss=loss)

        Run.step = step_or_die  # type: ignore[method-assign]

    return hook


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


GOAL = Goal(
    promise="a run killed at random moments ends with the bits of an undisturbed one",
    real="the training script with dropout, augmentation, workers of data and a schedule, over gloo; SIGKILL",
    simulated="the ranks are processes of one machine, started again by this proof and not by a supervisor",
    run=run,
)
