"""A run that is killed at random moments ends with the very bits of one that nothing disturbed."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.prove.goal import Figure, Form, Goal
from tests.standins.saved_runs import SavedRun, forking

STEPS = 24


def run(form: Form) -> Iterator[Figure]:
    """Yield how many runs ended otherwise, and how many kills there were."""
    runs = [1] if form is Form.SHORT else [1, 2, 3, 4, 2]
    wrong = kills = 0
    with tempfile.TemporaryDirectory() as folder, forking():
        for seed, ranks in enumerate(runs):
            whole = SavedRun(Path(folder) / f"whole-{seed}", ranks=ranks, steps=STEPS)
            began = time.monotonic()
            assert whole.attempt() == [0] * ranks, whole.said()
            lasted = time.monotonic() - began
            killed = SavedRun(Path(folder) / f"killed-{seed}", ranks=ranks, steps=STEPS)
            kills += _killed(killed, random.Random(seed), lasted, kills=2)
            if killed.attempt() != [0] * ranks or killed.digests() != whole.digests():
                wrong += 1
                sys.stderr.write(f"resume-exact: seed {seed}, {ranks} ranks: other bits\n{killed.said()[-500:]}\n")
    yield Figure(name="resume-exact", value=wrong, limit=0)
    yield Figure(name="resume-exact.kills", value=kills, limit=2 * len(runs), least=True)


def _killed(run: SavedRun, chance: random.Random, lasted_s: float, *, kills: int) -> int:
    """Start attempts until that many of them were killed; return how many were."""
    done = 0
    for _ in range(10 * kills):
        # What is left of the run is shorter after each kill.
        victim, after_s = chance.randrange(run.ranks), chance.uniform(0.2, 0.9) * lasted_s * 0.6**done

        def hook(rank: int, victim: int = victim, after_s: float = after_s) -> None:
            if rank == victim:
                timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()

        done += -signal.SIGKILL in run.attempt(hook)
        if done == kills:
            break
    return done


GOAL = Goal(
    promise="a run killed at random moments ends with the bits of an undisturbed one",
    real="the training script with dropout, augmentation, workers of data and a schedule, over gloo; SIGKILL",
    simulated="the ranks are processes of one machine, started again by this proof and not by a supervisor",
    run=run,
)
