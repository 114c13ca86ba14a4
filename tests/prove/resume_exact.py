"""Scripts of any make, killed or noticed at any moment, end with the very bits of runs that nothing disturbed.

On another number of ranks they see the same samples, with the same noise, in the same order of global batches.
`python -m tests.prove.resume_exact 7 20-29 1003` repeats the random scripts of these seeds alone, a cell's name that
cell, and `--list` tells the cells. On a machine with GPUs `--device cuda --cells 1-12` takes cells of its own; where it
has one GPU, ranks share it. With `--within 500` no cell is begun after so many seconds.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.prove.cells import Cell, Device, apart, covering, every_plain, on_one_gpu, sample
from tests.prove.disturbing import Matrix, Sample, Verdict, die_after, die_in, result, seen
from tests.prove.framework_cells import FrameworkCell, FrameworkMatrix, every, quick
from tests.prove.goal import Figure, Form, Goal
from tests.standins.any_training import GLOBAL_BATCH, SAMPLES, Recipe, main
from tests.standins.framework_training import FRAMEWORKS
from tests.standins.saved_runs import SavedRun, forking

STEPS = 20
_OTHER_RANKS = 1000
"""Seeds from here on stand for runs that go on with another number of ranks after each kill."""

_SEEDS = {Form.SHORT: (33,), Form.LONG: tuple(range(50))}
_SEEDS_OTHER_RANKS = {Form.SHORT: (_OTHER_RANKS + 3,), Form.LONG: tuple(range(_OTHER_RANKS, _OTHER_RANKS + 10))}
_MOST_WORKERS = 4
_BATCHES_PER_EPOCH = SAMPLES // GLOBAL_BATCH

_CELLS = {Form.SHORT: 14, Form.LONG: 264}
_EXACT = {Form.SHORT: 9, Form.LONG: 216}
_LEAST_WITHIN = 12
"""Cells that a call which is given a time must get through."""

_ON_GPUS = 24
_ON_ONE_GPU = 30
"""Cells of all that there are on GPUs: the first half in one call, the others in the next."""


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


@dataclass
class _Judged:
    """What became of cells."""

    verdicts: list[Verdict] = field(default_factory=list)

    def take(
        self,
        cells: Iterable[Cell | FrameworkCell],
        device: Device = Device.CPU,
        *,
        tell: bool = False,
        within_s: float = math.inf,
    ) -> None:
        """Judge each, those that train alike after each other; say what does not hold, or, with `tell`, all.

        After `within_s` no other is begun.
        """
        deadline = time.monotonic() + within_s
        with tempfile.TemporaryDirectory() as folder, forking():
            matrices = {Cell: Matrix(Path(folder), device), FrameworkCell: FrameworkMatrix(Path(folder) / "frameworks")}
            for cell in sorted(cells, key=lambda one: one.training):
                began = time.monotonic()
                if began > deadline:
                    sys.stderr.write(f"resume-exact: {cell}: not begun, for its time is over\n")
                    continue
                verdict = matrices[type(cell)].judge(cell)
                self.verdicts.append(verdict)
                if tell or not verdict.holds:
                    sys.stderr.write(f"resume-exact: {verdict} ({time.monotonic() - began:.1f} s)\n")
                    sys.stderr.flush()

    @property
    def wrong(self) -> int:
        """How many did not end as they must."""
        return sum(not verdict.holds for verdict in self.verdicts)

    def figures(self, cells: int, exact: int) -> Iterator[Figure]:
        """Yield how many there were, and were exact, at least; and how many were called so and were not, or missed."""
        counted = {
            "cells": (len(self.verdicts), cells),
            "exact": (sum(verdict.exact for verdict in self.verdicts), exact),
        }
        for name, (value, least) in counted.items():
            yield Figure(name=f"resume-exact.{name}", value=value, limit=least, least=True)
        yield Figure(name="resume-exact.false", value=sum(verdict.false for verdict in self.verdicts), limit=0)
        yield Figure(name="resume-exact.missed", value=sum(verdict.missed for verdict in self.verdicts), limit=0)


def run(form: Form) -> Iterator[Figure]:
    """Yield how many runs ended otherwise, how many kills there were, and what became of the cells."""
    same, other, judged = _Tally(), _Tally(), _Judged()
    same.take(_SEEDS[form])
    other.take(_SEEDS_OTHER_RANKS[form])
    judged.take([*cells_of(form), *(quick() if form is Form.SHORT else every())])
    yield Figure(name="resume-exact", value=same.wrong + other.wrong + judged.wrong, limit=0)
    yield Figure(name="resume-exact.kills", value=same.kills, limit=len(_SEEDS[form]), least=True)
    least = 2 * len(_SEEDS_OTHER_RANKS[form])
    yield Figure(name="resume-exact.kills-other-ranks", value=other.kills, limit=least, least=True)
    frameworks = len(list(quick() if form is Form.SHORT else every()))
    yield from judged.figures(_CELLS[form] + frameworks, _EXACT[form] + frameworks)


def cells_of(form: Form) -> tuple[Cell, ...]:
    """Return the cells that train on the CPU: in the long form every plain one, and every pair of values."""
    return sample(_CELLS[form]) if form is Form.SHORT else covering(_CELLS[form], first=every_plain())


def cells_on_gpus() -> tuple[Cell, ...]:
    """Return the cells that train on GPUs: on this machine's, or, where there is none, on two."""
    return on_one_gpu(_ON_ONE_GPU) if _gpus() == 1 else sample(_ON_GPUS, Device.CUDA)


def _gpus() -> int:
    """Return how many GPUs there are; asked by another process, for this one is to be forked and must not touch any."""
    asked = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


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
    expected, found = seen(whole.folder, most), seen(killed.folder, most)
    repeated = _repeated(expected)
    if repeated:
        return f"samples come twice in epoch {repeated[0]}"
    if found != expected:
        batch = next(number for number, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other)
        return f"other samples from batch {batch} on, of {len(found)} and {len(expected)}"
    levels = {result(killed, rank)["level"] for rank in range(killed.ranks)}
    others = len(set(case.ranks)) > 1
    # A run of which nothing was saved begins anew, and is exact on any number of ranks.
    level = "same_samples" if others and result(killed, 0)["started"] else "exact"
    if levels != {level}:
        return f"it is said to be {levels}"
    if others:
        return None
    losses = [result(run, 0)["losses"] for run in (whole, killed)]
    if losses[0] != losses[1]:
        step = next(number for number, (one, other) in enumerate(zip(*losses, strict=True), 1) if one != other)
        return f"other losses from step {step} on"
    return None if killed.digests() == whole.digests() else "equal losses, and another state at the end"


def _repeated(batches: list[list[Sample]]) -> list[int]:
    """Return the epochs in which a sample comes more than once, or too few come."""
    starts = range(0, len(batches), _BATCHES_PER_EPOCH)
    epochs = [[index for batch in batches[at : at + _BATCHES_PER_EPOCH] for index, _ in batch] for at in starts]
    short = [number for number, epoch in enumerate(epochs[:-1]) if len(epoch) != _BATCHES_PER_EPOCH * GLOBAL_BATCH]
    return sorted({*short, *(number for number, epoch in enumerate(epochs) if len(set(epoch)) != len(epoch))})


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
                die_in(from_the_start_s)
            die_after(step, after_s)

    return hook


GOAL = Goal(
    promise="a run killed or noticed at any moment ends with the bits of an undisturbed one where it is called exact; "
    "on another number of ranks it sees the same samples, none twice and none left out",
    real="training scripts of any make (1 to 4 ranks, 0 to 4 workers, another number in each attempt, dropout, "
    "BatchNorm, bfloat16, float16 with a scaler, accumulation, averages, schedules, kinds of DDP), and cells of a "
    "matrix (DDP, FSDP2, tensor parallelism, alone; eager and compiled; the run's loader and the script's own, with a "
    "sampler, a state or neither; collation that draws; memory formats, fused and foreach "
    "optimizers, fp32 masters) over gloo; SIGKILL, and the agent's notice",
    simulated="the ranks are processes of one machine, started again by this proof and not by a supervisor; compiled "
    "is by aot_eager, whose code is not generated (on GPUs it is)",
    run=run,
)


def repeat(arguments: list[str]) -> int:
    """Run what is named alone, say of each how it stands, and return the exit code."""
    options = _parser().parse_args(arguments)
    device = Device(options.device)
    cells = cells_on_gpus() if device is Device.CUDA else cells_of(Form.LONG)
    if options.list:
        return _tell(cells, device)
    if device is Device.CUDA and not _gpus():
        sys.exit("there is no GPU here: run it where torch finds one")
    if options.cells:
        first, _, last = options.cells.partition("-")
        named: list[Cell | FrameworkCell] = list(cells[int(first) - 1 : int(last or first)])
    else:
        named = [_named(name) for name in options.names if "." in name]
    code = _repeat_seeds([name for name in options.names if "." not in name])
    if named:
        judged = _Judged()
        judged.take(named, device, tell=True, within_s=options.within)
        exact = sum(verdict.promise == "exact" for verdict in judged.verdicts)
        least = min(len(named), _LEAST_WITHIN) if options.within < math.inf else len(named)
        figures = [Figure(name="resume-exact", value=judged.wrong, limit=0), *judged.figures(least, exact)]
        print(*figures, sep="\n")
        code = max(code, *(0 if figure.holds else 1 for figure in figures))
    return code


def _named(name: str) -> Cell | FrameworkCell:
    return FrameworkCell.read(name) if name.partition(".")[0] in FRAMEWORKS else Cell.read(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.prove.resume_exact", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cells, seeds of random scripts (7) or ranges of them")
    parser.add_argument("--list", action="store_true", help="tell the cells, and which values no cell has together")
    parser.add_argument("--cells", metavar="1-12", help="the cells of these numbers, as --list tells them")
    parser.add_argument("--within", metavar="SECONDS", type=float, default=math.inf, help="begin no cell after that")
    parser.add_argument("--device", choices=[one.value for one in Device], default="cpu", help="what cells train on")
    return parser


def _tell(cells: tuple[Cell, ...], device: Device) -> int:
    for number, cell in enumerate(cells, 1):
        print(number, cell)
    if device is Device.CPU:
        print(*every(), sep="\n")
    for (one, other), why in apart(device).items():
        print(f"never {one} with {other}: {why}")
    return 0


def _repeat_seeds(names: list[str]) -> int:
    tally = _Tally()
    for text in names:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            tally.take([seed])
            print(f"up to seed {seed}: {tally.kills} kills, {tally.wrong} runs ended otherwise", flush=True)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(repeat(sys.argv[1:]))
