"""Measures what the calls of gpucloud.resume take from the training thread at a step without a save.

A step's calls are the next batch of `run.wrap` or `run.loader`, the optimizers' hooks and `run.step`. Two loops take
turns, one with the calls and one without, on the same data by loaders of their own, so that both meet the same
machine: what the calls take is the difference of the two loops' medians, and of their 99th percentiles. So neither
what torch's loader takes is counted, nor what the script's data set, collation and optimizer do. `run.step` has no
counterpart in the other loop, and is told by itself too.

The limits are for the thread's own processor time, which others on the machine do not lengthen; the time by the clock
is told beside it. With two ranks, gradients are summed ahead of `run.step`, as DDP does, so that no rank waits there
for one that is late with its batch; what is told is of the slower rank.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gpucloud import resume
from tests.bench.figures import figure

STEPS, WARM_UP = 3000, 300
BATCH = 8  # samples of a rank
EPOCH = 1000  # steps
MEDIAN_US, P99_US = 100.0, 1000.0
RANKS, WORKERS, WAYS, OPTIMIZERS = (1, 2), (0, 2), ("wrap", "loader"), (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train."""

    ranks: int
    workers: int
    way: str
    optimizers: int = 1

    @property
    def name(self) -> str:
        """As figures have it."""
        more = f"_{self.optimizers}_optimizers" if self.optimizers > 1 else ""
        return f"calls_{self.way}_{self.ranks}_ranks_{self.workers}_workers{more}"


CASES = (
    *(Case(ranks=ranks, workers=workers, way=way) for ranks in RANKS for workers in WORKERS for way in WAYS),
    Case(ranks=1, workers=2, way="wrap", optimizers=2),
)


@dataclass(slots=True)
class Taken:
    """Microseconds of each step's part: of the thread, and by the clock."""

    own: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    def add(self, calls: Callable[[], object]) -> None:
        """Have the calls made, and count them to the newest step."""
        own, clock = time.thread_time(), time.perf_counter()
        calls()
        self.own[-1] += 1e6 * (time.thread_time() - own)
        self.clock[-1] += 1e6 * (time.perf_counter() - clock)

    def begin(self) -> None:
        """A step begins."""
        self.own.append(0.0)
        self.clock.append(0.0)


@dataclass(slots=True)
class Measured:
    """Of a rank: the loop with all calls, the one without any, and `run.step` alone."""

    ours: Taken = field(default_factory=Taken)
    bare: Taken = field(default_factory=Taken)
    step: Taken = field(default_factory=Taken)


class Noise(Dataset[Any]):
    """A data set as a script has it: nobody knows that it draws nothing."""

    def __init__(self, samples: int) -> None:
        self._values = torch.zeros(samples, 4)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


def main() -> int:
    kept = [one for case in CASES for one in told(case, measured(case))]
    return 0 if all(kept) else 1


def measured(case: Case) -> list[Measured]:
    """Return what each rank measures, in processes of their own."""
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(case.ranks, mp_context=get_context("spawn")) as processes,
    ):
        jobs = [processes.submit(train, case, rank, Path(name)) for rank in range(case.ranks)]
        return [job.result() for job in jobs]


def train(case: Case, rank: int, folder: Path) -> Measured:
    """Train both loops in turns, and return what they took."""
    torch.set_num_threads(1)
    attempt = folder / "attempt"
    attempt.mkdir(exist_ok=True)
    os.environ |= {"GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000", "GPUCLOUD_STORE": f"{folder}/store"}
    os.environ["GPUCLOUD_ATTEMPT_DIR"] = str(attempt)
    if case.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=case.ranks)
    dataset = Noise(EPOCH * BATCH * case.ranks)
    (model, optimizers, _), (other, others, schedule) = made(case), made(case)
    bare = itertools.chain.from_iterable(itertools.repeat(plain(dataset, case)))
    run = resume.init(model=other, optimizer=others, scheduler=schedule)
    batches = taken_from(run, dataset, case)
    found = Measured()
    for number in range(STEPS + WARM_UP):
        if number == WARM_UP:
            found = Measured()
        for taken in (found.ours, found.bare, found.step):
            taken.begin()
        found.bare.add(lambda: next(bare))
        found.bare.add(lambda: stepped(optimizers))
        together(model, case)
        found.ours.add(lambda: next(batches))
        found.ours.add(lambda: stepped(others))
        together(other, case)
        found.step.add(lambda: run.step(loss=0.5))
    return found


def made(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
    """Return a model with a hundred parameters, its optimizers and the schedule of the first."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizers = [torch.optim.SGD(parameters[n :: case.optimizers], lr=0.0) for n in range(case.optimizers)]
    return model, list(optimizers), torch.optim.lr_scheduler.ConstantLR(optimizers[0])


def plain(dataset: Noise, case: Case) -> DataLoader[Any]:
    """Return torch's loader as a script has it."""
    sampler = DistributedSampler(dataset) if case.ranks > 1 else None
    return DataLoader(
        dataset,
        BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
    )


def taken_from(run: resume.Run, dataset: Noise, case: Case) -> Iterator[Any]:
    """Return the run's batches without end."""
    options = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
    loader: Any = (
        run.loader(dataset, global_batch=BATCH * case.ranks, **options)
        if case.way == "loader"
        else run.wrap(plain(dataset, case))
    )
    return (batch for _ in run.epochs(10**6) for batch in loader)


def stepped(optimizers: list[torch.optim.Optimizer]) -> None:
    """Have all optimizers step."""
    for optimizer in optimizers:
        optimizer.step()


def together(model: nn.Module, case: Case) -> None:
    """Have the ranks meet, as the gradients' sum does."""
    if case.ranks > 1:
        dist.all_reduce(next(model.parameters()).grad)


def told(case: Case, ranks: list[Measured]) -> list[bool]:
    """Tell of the slower rank; return whether each limit holds."""
    for name, one in (("clock_median", middle), ("clock_p99", last)):
        calls, step = (max(values) for values in zip(*(clocks(rank, one) for rank in ranks), strict=True))
        figure(f"{case.name}_{name}_us", calls)
        figure(f"{case.name}_step_{name}_us", step)
    kept = []
    for name, one, limit in (("median", middle, MEDIAN_US), ("p99", last, P99_US)):
        figure(f"{case.name}_step_{name}_us", max(one(rank.step.own) for rank in ranks))
        all_of = max(one(added(rank.ours.own, rank.step.own)) - one(rank.bare.own) for rank in ranks)
        kept.append(figure(f"{case.name}_{name}_us", all_of, limit))
    return kept


def clocks(rank: Measured, one: Callable[[list[float]], float]) -> tuple[float, float]:
    return one(added(rank.ours.clock, rank.step.clock)) - one(rank.bare.clock), one(rank.step.clock)


def added(first: list[float], second: list[float]) -> list[float]:
    return [one + other for one, other in zip(first, second, strict=True)]


def middle(values: list[float]) -> float:
    return statistics.median(values)


def last(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


if __name__ == "__main__":
    sys.exit(main())
