"""A machine is cut off in mid-training: the job goes on without it, and what it writes from then on is refused."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.checkpoint.manifest import Commit, commits, generations
from gpucloud.store import open_store
from gpucloud.store.checkpoints import base_of, listed
from tests.commandline import until
from tests.emulation.group import OWN_SPACES
from tests.prove.goal import Figure, Form, Goal
from tests.standins.quick_fleet import GROUP, QuickFleet, living, quick_fleet

_SEEDS = {Form.SHORT: range(1), Form.LONG: range(10)}
_STEPS, _STEP_S = 160, 0.05
_PREFIX = "jobs/small/checkpoints"


@dataclass
class _Round:
    wrong: list[str]
    alone: int  # commits of the old attempt after it was cut off


def run(form: Form) -> Iterator[Figure]:
    """Cut off the machine whose rank commits and goes on alone, and let a new attempt start without it."""
    rounds = []
    for seed in _SEEDS[form]:
        with tempfile.TemporaryDirectory() as folder, quick_fleet(Path(folder), daemon=OWN_SPACES) as line:
            rounds.append(_one(line, random.Random(seed)))
        for what in rounds[-1].wrong:
            sys.stderr.write(f"partition: seed {seed}: {what}\n")
    yield Figure(name="partition", value=sum(bool(one.wrong) for one in rounds), limit=0)
    yield Figure(name="partition.rounds", value=len(rounds), limit=len(_SEEDS[form]), least=True)
    # The old attempt has to write on for its refusal to show anything.
    yield Figure(name="partition.commits-while-cut-off", value=sum(one.alone for one in rounds), limit=1, least=True)


def _one(line: QuickFleet, dice: random.Random) -> _Round:
    train = line.start("train", line.quick_job(steps=_STEPS, step_s=_STEP_S))
    until(lambda: _committed(line), "the first checkpoint")
    time.sleep(dice.uniform(0, 1))
    committing = (line.state() or {})["attempts"][-1]["members"][0]["node_id"]
    line.group.cut(GROUP, committing)
    before = max(commit.step for commit in _committed(line))
    until(lambda: len((line.state() or {})["attempts"]) > 1, "a new attempt")
    alone = sum(commit.generation == 1 and commit.step > before for commit in _committed(line))
    code = train.wait(150)
    wrong = [] if code == 0 else [f"train ended with {code}: {(line.folder / 'err').read_text()[-3000:]}"]
    if living(line):
        wrong.append(f"machines are left: {living(line)}")
    return _Round([*wrong, *_restored_wrongly(line)], alone)


def _restored_wrongly(line: QuickFleet) -> list[str]:
    """Return what is wrong with whose steps the job consists of: each attempt goes on from what its own base says."""
    store = open_store(str(line.home / "store"))
    history = line.history()
    wrong = [] if [part[0] for part in history] == sorted({part[0] for part in history}) else [f"history {history}"]
    if len(history) < 2:
        wrong.append(f"the job was never taken over: {history}")
    for number in generations(listed(store, _PREFIX)):
        base = base_of(store, _PREFIX, number)
        begun = [part[1] for part in history if part[0] == number]
        if begun and begun != [base.step if base else 0]:
            wrong.append(f"generation {number} began from step {begun[0]}, not from {base}")
    last = max(_committed(line))
    return wrong if last.step == _STEPS else [*wrong, f"the last checkpoint is {last}"]


def _committed(line: QuickFleet) -> tuple[Commit, ...]:
    return commits(listed(open_store(str(line.home / "store")), _PREFIX))


GOAL = Goal(
    promise="a machine cut off in mid-training is trained without, and nothing it wrote afterwards comes back",
    real="command line, supervisor, agents, SSH, checkpoints; machines with links that are cut",
    simulated="SSH's cut: its server is stopped, and the link is down; training: a counter without torch",
    run=run,
)
