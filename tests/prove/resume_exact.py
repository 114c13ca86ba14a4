"""Scripts of any make, killed at random moments, end with the very bits of runs that nothing disturbed.

On another number of ranks they see the same samples, with the same noise, in the same order of global batches.
`python -m tests.prove.resume_exact 7 20-29 1003` repeats the cases of these seeds alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpucloud.resume.run import Run
from tests.prove.goal import Figure, Form, Goal
from tests.standins.any_training import GLOBAL_BATCH, SAMPLES, Recipe, main
from tests.standins.saved_runs import SavedRun, forking

STEPS = 20
_OTHER_RANKS = 1000
"""Seeds from here on stand for runs that go on with another number of ranks after each kill."""

_SEEDS = {Form.SHORT: (33,), Form.LONG: tuple(range(50))}
_SEEDS_OTHER_RANKS = {Form.SHORT: (_OTHER_RANKS + 3,), Form.LONG: tuple(range(_OTHER_RANKS, _OTHER_RANKS + 10))}
_MOST_WORKERS = 4
_BATCHES_PER_EPOCH = SAMPLES // GLOBAL_BATCH

Sample = tuple[int, float]
"""Its index, and what its noise made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One training, and what befalls it: `ranks` of its attempts, all but the last killed; saved `every` steps."""

    seed: int
    ranks: tuple[int, ...]
    every: int
    recipe: Recipe

    @classmethod
    def of(cls, seed: int) -> _Case:
        chance = random.Random(f"resume-exact {seed}")
        recipe, every = Recipe.drawn(chance), chance.randint(1, 5)
        if seed >= _OTHER_RANKS:
            ranks = tuple(chance.sample([1, 2, 3, 4], 3))
        else:
            ranks = (1 + seed % 4,) * chance.choice([2, 2, 3])
        return cls(seed=seed, ranks=ranks, every=every, recipe=recipe)


@dataclass
class _Tally:
    """How many runs were killed how often, and how many of them did not end as they must."""

    kills: int = 0
    wrong: int = 0

    def take(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            case = _Case.of(seed)
            with tempfile.TemporaryDirectory() as folder, forking():
                kills, wrong = _tried(case, Path(folder))
            self.kills += kills
            if wrong is not None:
                self.wrong += 1
                sys.stderr.write(f"resume-exact: {case}: {wrong}\n")


def run(form: Form) -> Iterator[Figure]:
    """Yield how many runs ended otherwise, and how many kills there were."""
    same, other = _Tally(), _Tally()
    same.take(_SEEDS[form])
    other.take(_SEEDS_OTHER_RANKS[form])
    yield Figure(name="resume-exact", value=same.wrong + other.wrong, limit=0)
    yield Figure(name="resume-exact.kills", value=same.kills, limit=len(_SEEDS[form]), least=True)
    least = 2 * len(_SEEDS_OTHER_RANKS[form])
    yield Figure(name="resume-exact.kills-other-ranks", value=other.kills, limit=least, least=True)


def _tried(case: _Case, folder: Path) -> tuple[int, str | None]:
    """Return how many kills befell the case's run, and what did not hold of it."""
    chance = random.Random(case.seed)
    whole = SavedRun(folder / "whole", ranks=case.ranks[0], steps=STEPS, every=case.every, script=main)
    began = time.monotonic()
    codes = _attempt(whole, case, chance)
    if any(codes):
        return 0, f"undisturbed, it ended with {codes}: {whole.said()[-2000:]}"
    step_s = (time.monotonic() - began) / STEPS
    killed = replace(whole, folder=folder / "killed")
    done = 0
    for killed.ranks in case.ranks[:-1]:
        done += -signal.SIGKILL in _attempt(killed, case, chance, _killing(killed, chance, step_s))
    killed.ranks = case.ranks[-1]
    codes = _attempt(killed, case, chance)
    if any(codes):
        return done, f"after {done} kills, it ended with {codes}: {killed.said()[-2000:]}"
    return done, _wrong(case, whole, killed)


def _attempt(
    run: SavedRun, case: _Case, chance: random.Random, hook: Callable[[int], None] = lambda _rank: None
) -> list[int]:
    """Run the next attempt, with any number of workers, and return the exit codes."""
    run.arguments = ("--recipe", case.recipe.text(), "--workers", str(chance.randint(0, _MOST_WORKERS)))
    return run.attempt(hook)


def _wrong(case: _Case, whole: SavedRun, killed: SavedRun) -> str | None:
    """Say what of the run that was killed is not as in the other."""
    most = max(case.ranks)
    expected, seen = _seen(whole.folder, most), _seen(killed.folder, most)
    repeated = _repeated(expected)
    if repeated:
        return f"samples come twice in epoch {repeated[0]}"
    if seen != expected:
        batch = next(number for number, (one, other) in enumerate(zip(seen, expected, strict=False)) if one != other)
        return f"other samples from batch {batch} on, of {len(seen)} and {len(expected)}"
    levels = {_result(killed, rank)["level"] for rank in range(killed.ranks)}
    others = len(set(case.ranks)) > 1
    # A run of which nothing was saved begins anew, and is exact on any number of ranks.
    level = "same_samples" if others and _result(killed, 0)["started"] else "exact"
    if levels != {level}:
        return f"it is said to be {levels}"
    if others:
        return None
    losses = [_result(run, 0)["losses"] for run in (whole, killed)]
    if losses[0] != losses[1]:
        step = next(number for number, (one, other) in enumerate(zip(*losses, strict=True), 1) if one != other)
        return f"other losses from step {step} on"
    return None if killed.digests() == whole.digests() else "equal losses, and another state at the end"


def _seen(folder: Path, most_ranks: int) -> list[list[Sample]]:
    """Return the global batches that the job was trained on, those of a step by the last attempt that took it."""
    by_step: dict[int, dict[int, dict[int, Any]]] = {}
    for rank in range(most_ranks):
        file = folder / f"seen-{rank}.jsonl"
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else ():
            attempt, step, batches = json.loads(line)
            by_step.setdefault(step, {}).setdefault(attempt, {})[rank] = batches
    found = []
    for step in sorted(by_step):
        parts = by_step[step][max(by_step[step])].values()
        batches = zip(*parts, strict=True)
        found += [sorted((index, value) for share in shares for index, value in share) for shares in batches]
    return found


def _repeated(batches: list[list[Sample]]) -> list[int]:
    """Return the epochs in which a sample comes more than once, or too few come."""
    starts = range(0, len(batches), _BATCHES_PER_EPOCH)
    epochs = [[index for batch in batches[at : at + _BATCHES_PER_EPOCH] for index, _ in batch] for at in starts]
    short = [number for number, epoch in enumerate(epochs[:-1]) if len(epoch) != _BATCHES_PER_EPOCH * GLOBAL_BATCH]
    return sorted({*short, *(number for number, epoch in enumerate(epochs) if len(set(epoch)) != len(epoch))})


def _result(run: SavedRun, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run.folder / f"result-{rank}.json").read_text())
    return result


def _killing(run: SavedRun, chance: random.Random, step_s: float) -> Callable[[int], None]:
    """Return what kills some ranks at a random moment: from the start on, or of a step, before the run is over."""
    found = run.restored()
    step = chance.randrange(found.commit.step if found else 0, STEPS - 1) + 1
    victims = chance.sample(range(run.ranks), chance.randint(1, run.ranks))
    after_s = chance.uniform(0.0, 2 * step_s)
    from_the_start_s = chance.uniform(0.0, STEPS * step_s) if chance.random() < 0.25 else None

    def hook(rank: int) -> None:
        if rank in victims:
            if from_the_start_s is not None:
                _die_in(from_the_start_s)
            _die_after(step, after_s)

    return hook


def _die_after(step: int, after_s: float) -> None:
    """Die so long after that step begins to end, and before the next one ends: no run is over by then.

    A moment counted from the start may come when the run has ended: how long it takes is the machine's affair.
    """
    ends = Run.step

    def step_or_die(self: Run, *, loss: Any = None) -> None:
        if self.steps_done + 1 == step:
            _die_in(after_s)
        if self.steps_done + 1 > step:
            _die()
        ends(self, loss=loss)

    Run.step = step_or_die  # type: ignore[method-assign]


def _die_in(seconds: float) -> None:
    timer = threading.Timer(seconds, _die)
    timer.daemon = True
    timer.start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


GOAL = Goal(
    promise="a run killed at random moments ends with the bits of an undisturbed one; on another number of ranks it "
    "sees the same samples, none twice and none left out",
    real="training scripts of any make (1 to 4 ranks, 0 to 4 workers, another number in each attempt, dropout, "
    "BatchNorm, bfloat16, float16 with a scaler, accumulation, averages, schedules, kinds of DDP) over gloo; SIGKILL",
    simulated="the ranks are processes of one machine, started again by this proof and not by a supervisor",
    run=run,
)


def repeat(arguments: list[str]) -> int:
    """Run the cases of the seeds (`7`, `20-29`) alone, say after each how it stands, and return the exit code."""
    tally = _Tally()
    for text in arguments:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            tally.take([seed])
            print(f"up to seed {seed}: {tally.kills} kills, {tally.wrong} runs ended otherwise", flush=True)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(repeat(sys.argv[1:]))
