"""The matrix of exact resume: what a script is made of, what befalls it, and the cells of it that a proof takes.

A cell has a name that says all of it: `ddp.compiled.workers2.channels_last+fused.kill.2-3`. Which cells are taken is
decided by a seed alone: every two values that go together are in some cell.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

PARALLEL = ("fsdp", "single", "ddp", "tp")
OF_THE_RUN = ("workers0", "workers2", "collation")
"""The run's own loader with that many workers; a collation that draws random numbers, in two workers."""

WRAPPED = ("wrapped0", "wrapped2", "stateful0", "stateful2", "iterable0", "iterable2")
"""The script's own, in no or two workers: a DataLoader with a sampler, torchdata's over a set that knows where it is,
a DataLoader over a stream that must be read again.
"""

LOADERS = (*OF_THE_RUN, *WRAPPED)

SETTINGS = ("channels_last", "fused", "foreach", "ema_module", "ema_own", "bf16", "accumulation", "scaler")
PLAIN = "plain"
"""What stands for no setting in a cell's name."""

EVENTS = ("notice", "kill", "both")
_SEED = "cells of exact resume"
_MOST_SETTINGS = 3
_QUICK = 12
"""The most that a cell for every change costs; one is an eager process of `single`, a quarter of a second."""

_COSTS = {"single": 1, "ddp": 1, "tp": 2, "fsdp": 3, "compiled": 4, "workers2": 2, "collation": 2}
_COSTS |= {"wrapped2": 2, "stateful2": 2, "iterable2": 2}
"""How many times more a process takes with it; three of them on two cores twice as much."""

_ASKED = 40  # cells are looked at for each that is taken


class Device(Enum):
    """What cells train on."""

    CPU = "cpu"
    CUDA = "cuda"

    @property
    def executions(self) -> tuple[str, ...]:
        """How a step may run."""
        return ("eager", "compiled") if self is Device.CPU else ("eager", "compiled", "graph")

    @property
    def has_inductor(self) -> bool:
        """Whether what is compiled there is Inductor's code, for which there must be a C compiler."""
        return self is Device.CUDA and any(map(shutil.which, ("cc", "gcc", "clang")))

    @property
    def ranks(self) -> tuple[str, ...]:
        """On how many ranks a run begins and goes on: two GPUs are enough for it all."""
        two = ("1-1", "2-2", "2-1", "1-2")
        return two if self is Device.CUDA else (*two, "3-3", "2-3", "3-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training, how it is disturbed, and on how many `ranks` it runs `before` and `after` that."""

    parallel: str
    execution: str
    loader: str
    settings: tuple[str, ...]
    event: str
    before: int
    after: int

    @classmethod
    def read(cls, name: str) -> Cell:
        """Return the cell of that name. ValueError, with the nearest right word, for one that there cannot be."""
        words = name.split(".")
        if len(words) != len(_KINDS):
            raise ValueError(f"{name} is no cell: write {'.'.join(_KINDS)}, as {_cells_of(Device.CPU)[0]}")
        for word, (kind, known) in zip(words, _KINDS.items(), strict=True):
            for one in word.split("+"):
                if one not in known:
                    near = difflib.get_close_matches(one, known, n=1, cutoff=0.0)[0]
                    raise ValueError(f"{name} is no cell: {kind} is one of {', '.join(known)}; {near} for {one}?")
        cell = _made(*words)
        if (why := impossible(cell)) is not None:
            raise ValueError(f"there is no {name}: {why}")
        return cell

    def __str__(self) -> str:
        settings = "+".join(self.settings) or PLAIN
        return ".".join((self.parallel, self.execution, self.loader, settings, self.event, self._ranks))

    @property
    def training(self) -> str:
        """What is trained, and how, whatever befalls it: cells that agree in it have one undisturbed run."""
        return ".".join((self.parallel, self.execution, self.loader, "+".join(self.settings), str(self.before)))

    @property
    def values(self) -> tuple[str, ...]:
        """All that it is made of; no word stands for two things."""
        settings = self.settings or (PLAIN,)
        return (self.parallel, self.execution, self.loader, *settings, self.event, self._ranks)

    def promise(self, device: Device) -> str | None:
        """Return the level that its resume must have; None where the product cannot see enough to promise anything.

        An optimizer that steps inside a graph is seen by nobody. Inductor chooses kernels by their speed.
        """
        if self.execution == "compiled" and device.has_inductor:
            return "same_samples"
        if self.parallel == "single" and self.execution == "graph":
            return None
        if self.before == self.after:
            return "exact"
        return "same_samples" if self.loader in OF_THE_RUN else "best_effort"

    @property
    def _ranks(self) -> str:
        return f"{self.before}-{self.after}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Values that no cell has together, and why."""

    values: frozenset[str]
    why: str


def _rules() -> Iterator[Rule]:
    def never(*values: str, why: str) -> Rule:
        return Rule(frozenset(values), why)

    for ranks in Device.CPU.ranks:
        if ranks == "1-1":
            for parallel in sorted({*PARALLEL} - {"single"}):
                yield never(parallel, ranks, why=f"{parallel} over one rank, before and after, is single")
        else:
            yield never("single", ranks, why="a script that knows of one rank has no others")
    yield never("fsdp", "channels_last", why="fully_shard takes no parameter that is not contiguous")
    yield never("tp", "scaler", why="torch's GradScaler takes no gradients of which some are DTensors, others not")
    yield never("fused", "foreach", why="an optimizer is one or the other")
    for kind in ("fused", "foreach"):
        yield never("bf16", kind, why="fp32 masters of bf16 weights are kept by an optimizer of the script's own")
    yield never("bf16", "scaler", why="bfloat16 has float32's range: its loss is not scaled")
    whole = ("single", "graph")
    yield never(*whole, "accumulation", why="the graph is a whole step, its optimizer's too: nothing is gathered")
    yield never(*whole, "scaler", why="GradScaler asks the GPU whether to step, and a capture cannot wait for that")


RULES = tuple(_rules())


def impossible(cell: Cell) -> str | None:
    """Return why there can be no such cell; None where there can."""
    values = frozenset(cell.values)
    return next((rule.why for rule in RULES if rule.values <= values), None)


def every_plain(device: Device = Device.CPU) -> tuple[Cell, ...]:
    """Return the cells without any setting, on the same ranks before and after: one rank, or two."""
    return tuple(
        cell
        for parallel, execution, loader, event in itertools.product(PARALLEL, device.executions, LOADERS, EVENTS)
        for cell in (_made(parallel, execution, loader, PLAIN, event, _same_ranks(parallel)),)
    )


def covering(count: int, device: Device = Device.CPU, first: Iterable[Cell] = ()) -> tuple[Cell, ...]:
    """Return `count` cells or more, `first` among them: with every pair of values that go together.

    Beyond the pairs, cells come by threes that differ only in what befalls them, on the same ranks before and after.
    """
    chance = random.Random(f"{_SEED} {device.value}")
    taken = dict.fromkeys(first)
    missing = combinable(device) - {pair for cell in taken for pair in pairs_of(cell)}
    while missing:
        wanted = min(missing, key=sorted)
        cell = max(_having(wanted, device, chance), key=lambda one: len(missing & pairs_of(one)))
        taken[cell] = None
        missing -= pairs_of(cell)
    while len(taken) < count:
        cell = _drawn(device, chance)
        if cell.settings and cell.before == cell.after and impossible(cell) is None:
            taken |= dict.fromkeys(_of_event(cell, event) for event in EVENTS)
    return tuple(taken)


def sample(count: int, device: Device = Device.CPU) -> tuple[Cell, ...]:
    """Return `count` quick cells in which every value is that quick ones have: those that add most for what they cost.

    Plain ones come first: each way to be parallel; on GPUs with each way to run, which nothing on the CPU shows.
    """
    chance = random.Random(f"{_SEED} {device.value} {count}")
    runs = device.executions if device is Device.CUDA else ("eager",)
    taken = dict.fromkeys(_plain_each(runs))
    quick = [cell for cell in _cells_of(device) if _is_quick(cell, device)]
    values = {value for cell in quick for value in cell.values}
    pairs = {pair for cell in quick for pair in pairs_of(cell)}
    while len(taken) < count:
        lacking = values - {value for cell in taken for value in cell.values}
        missing = pairs - {pair for cell in taken for pair in pairs_of(cell)}

        def adds(cell: Cell, lacking: set[str] = lacking, missing: set[frozenset[str]] = missing) -> tuple[int, float]:
            return len(lacking.intersection(cell.values)), len(missing & pairs_of(cell)) / _cost(cell)

        drawn = (_drawn(device, chance) for _ in range(20 * _ASKED))
        taken[max((cell for cell in drawn if impossible(cell) is None and _is_quick(cell, device)), key=adds)] = None
    return tuple(taken)


def on_one_gpu(count: int) -> tuple[Cell, ...]:
    """Return `count` cells, or a few fewer, of ranks that share a GPU and talk over gloo: no graph can hold its talk.

    The last ones are those whose ranks hold tensors together.
    """
    cells = (cell for cell in sample(count, Device.CUDA) if (cell.parallel, cell.execution) != ("tp", "graph"))
    return tuple(sorted(cells, key=lambda cell: cell.parallel in ("fsdp", "tp")))


def _plain_each(executions: tuple[str, ...]) -> Iterator[Cell]:
    kinds = itertools.product(executions, PARALLEL)
    for (execution, parallel), loader, event in zip(
        kinds, itertools.cycle(LOADERS), itertools.cycle(EVENTS), strict=False
    ):
        yield _made(parallel, execution, loader, PLAIN, event, _same_ranks(parallel))


def _same_ranks(parallel: str) -> str:
    return "1-1" if parallel == "single" else "2-2"


def _is_quick(cell: Cell, device: Device) -> bool:
    """Whether it is one for every change; on GPUs, whether several of them go into a call."""
    if device is Device.CUDA:
        return cell.execution == "eager" or cell.event != "both"
    return _cost(cell) <= _QUICK


def _cost(cell: Cell) -> int:
    attempts = [cell.before, cell.before, cell.after]  # the first of them is of the run that nothing disturbs
    if cell.event == "both":
        attempts.append(cell.after)
    each = math.prod(_COSTS.get(value, 1) for value in cell.values)
    return each * sum(ranks if ranks < 3 else 2 * ranks for ranks in attempts)


def pairs_of(cell: Cell) -> frozenset[frozenset[str]]:
    """Return every two values of the cell."""
    return frozenset(map(frozenset, itertools.combinations(cell.values, 2)))


def combinable(device: Device = Device.CPU) -> set[frozenset[str]]:
    """Return every two values that some cell has together."""
    return {pair for cell in _cells_of(device) for pair in pairs_of(cell)}


def apart(device: Device = Device.CPU) -> dict[tuple[str, str], str]:
    """Return every two values, of different kinds or two settings, that no cell has together, each with the reason."""
    found = {}
    together = combinable(device)
    for one, other in itertools.combinations(_values(device), 2):
        rule = next((rule for rule in RULES if rule.values == {one, other}), None)
        if frozenset((one, other)) not in together and rule is not None:
            found[one, other] = rule.why
    return found


def _values(device: Device) -> tuple[str, ...]:
    return (*PARALLEL, *device.executions, *LOADERS, PLAIN, *SETTINGS, *EVENTS, *device.ranks)


def _cells_of(device: Device) -> tuple[Cell, ...]:
    """Return all cells with two settings at the most: what three settings add to their pairs is none."""
    settings = [PLAIN, *SETTINGS, *("+".join(two) for two in itertools.combinations(SETTINGS, 2))]
    kinds = (PARALLEL, device.executions, LOADERS, settings, EVENTS, device.ranks)
    return tuple(cell for words in itertools.product(*kinds) if impossible(cell := _made(*words)) is None)


def _drawn(device: Device, chance: random.Random) -> Cell:
    """Return any cell, one that cannot be too."""
    settings = "+".join(chance.sample(SETTINGS, chance.randint(1, _MOST_SETTINGS)))
    kinds = (PARALLEL, device.executions, LOADERS, (settings,), EVENTS, device.ranks)
    return _made(*(chance.choice(values) for values in kinds))


def _having(pair: frozenset[str], device: Device, chance: random.Random) -> list[Cell]:
    """Return some cells that have these two values."""
    found: list[Cell] = []
    while len(found) < _ASKED:
        cell = _with(_drawn(device, chance), pair)
        if pair in pairs_of(cell) and impossible(cell) is None:
            found.append(cell)
    return found


def _with(cell: Cell, values: Iterable[str]) -> Cell:
    words = dict(zip(_KINDS, str(cell).split("."), strict=True))
    for value in sorted(values):
        kind = next(kind for kind, known in _KINDS.items() if value in known)
        if kind == "settings" and value != PLAIN and words[kind] != PLAIN:
            words[kind] += f"+{value}"
        else:
            words[kind] = value
    return _made(*words.values())


def _of_event(cell: Cell, event: str) -> Cell:
    words = str(cell).split(".")
    return _made(*words[:-2], event, words[-1])


def _made(parallel: str, execution: str, loader: str, settings: str, event: str, ranks: str) -> Cell:
    chosen = set(settings.split("+"))
    before, _, after = ranks.partition("-")
    return Cell(
        parallel=parallel,
        execution=execution,
        loader=loader,
        settings=tuple(setting for setting in SETTINGS if setting in chosen),
        event=event,
        before=int(before),
        after=int(after),
    )


_KINDS = {
    "parallel": PARALLEL,
    "execution": Device.CUDA.executions,
    "loader": LOADERS,
    "settings": (PLAIN, *SETTINGS),
    "event": EVENTS,
    "ranks": Device.CPU.ranks,
}
"""What the words of a cell's name may be, in their order."""
