"""One run beside another: killed or noticed at a step, and looked at for what it was trained on and ended with."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch

from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.resume.attempt import SAVED_AND_LEFT
from gpucloud.resume.run import Run
from tests.prove.cells import Cell, Device
from tests.standins.cell_training import Model, main
from tests.standins.saved_runs import Hook, SavedRun

Sample = tuple[int, float]
"""Its index, and what its noise made of it."""

_KILLED = -signal.SIGKILL
_STEPS = {Device.CPU: 12, Device.CUDA: 20}
"""On GPUs a graph is captured after some steps, and what is saved after that is to be seen."""

_NOTICE = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a disturbed run ended: the level that it was said to have, and which parts of its state are others.

    `promise` is the level that it must have, None where any will do; `wrong` is what did not hold at all: how it ended,
    whether it was disturbed, what it was trained on.
    """

    cell: Cell
    promise: str | None = None
    level: str = ""
    others: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def exact(self) -> bool:
        """Whether it was said to be exact, and was."""
        return self.level == "exact" and not self.others and self.wrong is None

    @property
    def false(self) -> bool:
        """Whether it was said to be exact, and was not."""
        return self.level == "exact" and bool(self.others)

    @property
    def missed(self) -> bool:
        """Whether it was said to be less than it must be."""
        return self.promise is not None and self.wrong is None and self.level != self.promise

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.wrong is None and not self.false and not self.missed

    def __str__(self) -> str:
        if self.wrong is not None:
            return f"{self.cell}: {self.wrong}"
        told = f"{self.cell}: {self.level}"
        ended = f", with another {', '.join(self.others)} than undisturbed" if self.others else ""
        return told + ended + (f", not {self.promise}" if self.missed else "")


class Matrix:
    """Judges cells in a folder; those that train alike, one after the other, have one undisturbed run."""

    def __init__(self, folder: Path, device: Device = Device.CPU, *, compiles: bool = True) -> None:
        self._folder = folder
        self._device = device
        self._whole: SavedRun | None = None
        self._training = ""
        self._number = 0
        if compiles and device is Device.CPU:  # a process that is to be forked must not touch a GPU
            _compile_once()

    def judge(self, cell: Cell) -> Verdict:
        """Run the cell, and its undisturbed run if that is not here yet."""
        if self._whole is None or self._training != cell.training:
            whole = self._run(cell)
            codes = whole.attempt()
            if any(codes):
                return Verdict(cell=cell, wrong=f"undisturbed, it ended with {codes}: {whole.said()[-2000:]}")
            self._whole, self._training = whole, cell.training
        disturbed = self._run(cell)
        plan = planned(cell, disturbed.steps)
        wrong = _disturbed(cell, disturbed, plan)
        return (
            Verdict(cell=cell, wrong=wrong)
            if wrong is not None
            else _judged(cell, self._device, self._whole, disturbed)
        )

    def _run(self, cell: Cell) -> SavedRun:
        self._number += 1
        return SavedRun(
            self._folder / f"{self._number:03}",
            ranks=cell.before,
            steps=_STEPS[self._device],
            every=3 if "accumulation" in cell.settings else 2,  # a window of gradients is open at every other save
            script=main,
            arguments=("--cell", str(cell), "--device", self._device.value),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """What befalls an attempt at a step: a notice on the machine of one rank, or the death of some `ranks`.

    They die before the step counts, or after: then what is saved of it may be on its way.
    """

    notice: bool
    step: int
    ranks: tuple[int, ...]
    before: bool = False


def planned(cell: Cell, steps: int) -> tuple[Blow, ...]:
    """Return what befalls the cell's attempts, one after the other; by then something has been saved.

    A save is certain to count when the next one begins: where gradients are gathered, the second is that of step 6.
    """
    chance = random.Random(str(cell))
    gathers = "accumulation" in cell.settings
    notices = {"notice": (True,), "kill": (False,), "both": (False, True)}[cell.event]
    step = max(8, steps // 2) + chance.randint(0, 1) if gathers else steps // 2 + chance.randint(0, 2)
    blows = []
    for number, notice in enumerate(notices):
        world = cell.before if number == 0 else cell.after
        ranks = tuple(chance.sample(range(world), 1 if notice else chance.randint(1, world)))
        blows.append(Blow(notice=notice, step=step, ranks=ranks, before=chance.random() < 0.5))
        step = min(step + chance.randint(1, 2), steps - 2)  # a notice may wait for a step more, and one is left to do
    return tuple(blows)


def seen(folder: Path, most_ranks: int) -> list[list[Sample]]:
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


def result(run: SavedRun, rank: int) -> dict[str, Any]:
    """Return what the rank told at the end of its last attempt."""
    told: dict[str, Any] = json.loads((run.folder / f"result-{rank}.json").read_text())
    return told


def die_in(seconds: float) -> None:
    """Have this process die so long from now."""
    timer = threading.Timer(seconds, _die)
    timer.daemon = True
    timer.start()


def die_after(step: int, after_s: float) -> None:
    """Die so long after that step begins to end, and before the next one ends: no run is over by then.

    A moment counted from the start may come when the run has ended: how long it takes is the machine's affair.
    """

    def around(done: int, ends: Callable[[], None]) -> None:
        if done + 1 == step:
            die_in(after_s)
        if done + 1 > step:
            _die()
        ends()

    _around_steps(around)


def _compile_once() -> None:
    """Have here what compiling loads on its first use, so that no rank that is forked from here needs to."""
    importlib.import_module("torch.distributed.checkpoint")  # with which the run shares out what ranks hold together
    torch.compile(Model(), backend="aot_eager")(torch.ones(2, 3, 6, 6)).sum().backward()
    torch.compiler.reset()  # what was compiled is forgotten: a script compiles by itself


def _disturbed(cell: Cell, run: SavedRun, plan: tuple[Blow, ...]) -> str | None:
    """Run the attempts; say what is not as the plan has it: no blow may miss, no attempt begin anew."""
    for blow in plan:
        codes = run.attempt(_hook(blow))
        run.ranks = cell.after
        noticed, killed = all(code == SAVED_AND_LEFT for code in codes), _KILLED in codes
        if not (noticed if blow.notice else killed):
            return f"{blow} ended attempt {run.attempts} with {codes}: {run.said()[-2000:]}"
        if (wrong := _begun(run, run.attempts, first=1 if run.attempts > 1 else 0)) is not None:
            return wrong
    codes = run.attempt()
    if any(codes):
        return f"disturbed, it ended with {codes}: {run.said()[-2000:]}"
    return _begun(run, run.attempts, first=1)


def _begun(run: SavedRun, attempt: int, *, first: int) -> str | None:
    """Say what is wrong with where an attempt began: with `first`, at a step that was saved, with more to do."""
    told = json.loads((run.folder / f"attempt-{attempt}-0" / "progress.json").read_text())
    done = told["first_step"] - 1
    if bool(done) != bool(first):
        return f"attempt {attempt} began after step {done}"
    return None if done < run.steps else f"attempt {attempt} had nothing to do after step {done}"


def _judged(cell: Cell, device: Device, whole: SavedRun, run: SavedRun) -> Verdict:
    results = [result(run, rank) for rank in range(run.ranks)]
    levels = {one["level"] for one in results}
    if len(levels) > 1:
        return Verdict(cell=cell, wrong=f"the ranks call it {levels}")
    most = max(cell.before, cell.after)
    one, other = seen(whole.folder, most), seen(run.folder, most)
    if cell.before != cell.after and cell.loader == "collation":  # each rank's part of a batch has draws of its own
        one, other = _indices(one), _indices(other)
    level = levels.pop()
    if one != other and level != "best_effort":
        batch = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        return Verdict(cell=cell, level=level, wrong=f"{level}, and other samples from batch {batch} on")
    others: set[str] = set()
    if cell.before == cell.after:
        for rank, told in enumerate(results):
            expected = result(whole, rank)["digests"]
            others |= {name for name in expected | told["digests"] if expected.get(name) != told["digests"].get(name)}
    return Verdict(cell=cell, promise=cell.promise(device), level=level, others=tuple(sorted(others)))


def _indices(batches: list[list[Sample]]) -> list[list[Sample]]:
    return [[(index, 0.0) for index, _ in batch] for batch in batches]


def _hook(blow: Blow) -> Hook:
    def hook(rank: int) -> None:
        if rank in blow.ranks:
            _around_steps(_noticing(blow.step) if blow.notice else _dying(blow))

    return hook


def _noticing(step: int) -> Callable[[int, Callable[[], None]], None]:
    """Return what gives the notice on this rank's machine just before that step ends, by the agent's own hand."""

    def around(done: int, ends: Callable[[], None]) -> None:
        if done + 1 == step:
            folder = AttemptFolder(Path(), 1)
            folder.path = Path(os.environ["GPUCLOUD_ATTEMPT_DIR"])
            folder.ask_to_stop("notice", datetime.now(timezone.utc) + _NOTICE)
        ends()

    return around


def _dying(blow: Blow) -> Callable[[int, Callable[[], None]], None]:
    def around(done: int, ends: Callable[[], None]) -> None:
        if done + 1 == blow.step and blow.before:
            _die()
        ends()
        if done + 1 == blow.step:
            _die()

    return around


def noticed_at(step: int) -> Callable[[int], None]:
    """Return what gives rank 0's machine the notice just before that step ends."""
    return lambda rank: _around_steps(_noticing(step)) if rank == 0 else None


def killed_at(step: int) -> Callable[[int], None]:
    """Return what kills every rank once that many steps are done and told."""

    def around(done: int, ends: Callable[[], None]) -> None:
        ends()
        if done + 1 == step:
            _die()

    return lambda _rank: _around_steps(around)


def ended_with(run: SavedRun) -> list[Any]:
    """Return what each rank of the script wrote at its end: its level, and a hash for each part of its state."""
    return [json.loads((run.folder / f"result-{rank}.json").read_text()) for rank in range(run.ranks)]


def _around_steps(around: Callable[[int, Callable[[], None]], None]) -> None:
    """Have the steps of this process's run end by `around`, which is told how many are done."""
    ends = Run.step

    def step(self: Run, *, loss: Any = None) -> None:
        around(self.steps_done, lambda: ends(self, loss=loss))

    Run.step = step  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
