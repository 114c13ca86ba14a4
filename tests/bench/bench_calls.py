"""Measures what the calls of gpucloud.resume take from the training thread at a step without a save.

A step's calls: `run.step`, and the next batch of `run.wrap` or `run.loader`, whose samples a worker makes, less that of
the same loader alone. The limits are for the thread's own processor time, which others on the machine do not lengthen;
the time by the clock is told beside it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpucloud import resume
from tests.bench.figures import figure

STEPS, WARM_UP, BATCH = 4000, 200, 4
MEDIAN_US, P99_US = 100.0, 1000.0


Taken = tuple[float, float]
"""Microseconds of the thread, and by the clock."""


def main() -> int:
    torch.set_num_threads(1)
    kept = []
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000", "GPUCLOUD_STORE": f"{name}/store"}
        os.environ["GPUCLOUD_ATTEMPT_DIR"] = name
        dataset = TensorDataset(torch.zeros(STEPS // 4 * BATCH, 2))
        plain = DataLoader(dataset, BATCH, num_workers=1, persistent_workers=True)
        alone: list[Taken] = []
        use(itertools.chain.from_iterable(itertools.repeat(plain)), alone, lambda: None)
        for way in ("wrap", "loader"):
            run, optimizer = begun()
            options = {"num_workers": 1, "persistent_workers": True}
            loader: Any = run.loader(dataset, global_batch=BATCH, **options) if way == "loader" else run.wrap(plain)
            steps: list[Taken] = []
            waits: list[Taken] = []

            def step(run: resume.Run = run, optimizer: Any = optimizer, steps: list[Taken] = steps) -> None:
                optimizer.step()
                timed(lambda: run.step(loss=0.5), steps)

            use((batch for _ in run.epochs(10**6) for batch in loader), waits, step)
            kept += told(f"calls_step_with_{way}", steps[WARM_UP:])
            kept += told(f"calls_next_batch_of_{way}", waits, less=statistics.median(own for own, _ in alone))
    return 0 if all(kept) else 1


def begun() -> tuple[resume.Run, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return resume.init(model=model, optimizer=optimizer, schedule=schedule), optimizer


def timed(call: Callable[[], object], taken: list[Taken]) -> None:
    own, clock = time.thread_time(), time.perf_counter()
    call()
    taken.append((1e6 * (time.thread_time() - own), 1e6 * (time.perf_counter() - clock)))


def use(batches: Iterator[object], waits: list[Taken], step: Callable[[], None]) -> None:
    """Take batches, note how long each took but for those of the warm-up, and make a step of each."""
    warming: list[Taken] = []
    for number in range(STEPS + WARM_UP):
        timed(lambda: next(batches), waits if number >= WARM_UP else warming)
        step()


def told(name: str, taken: list[Taken], less: float = 0.0) -> list[bool]:
    own = sorted(one - less for one, _ in taken)
    clock = sorted(one for _, one in taken)
    figure(f"{name}_median_clock_us", statistics.median(clock))
    return [
        figure(f"{name}_median_us", statistics.median(own), MEDIAN_US),
        figure(f"{name}_p99_us", own[len(own) * 99 // 100], P99_US),
    ]


if __name__ == "__main__":
    sys.exit(main())
