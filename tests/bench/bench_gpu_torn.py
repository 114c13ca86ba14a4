"""Shows on a GPU that no checkpoint is mixed of several steps: `python -m tests.bench.bench_gpu_torn`.

In this training all numbers of a tensor are the same, and known for each step, so that a mixed checkpoint shows. The
steps are a CUDA graph's replays, or an optimizer's beside which weights are written to by `.data`, which nothing
counts: of all weights, of those alone that are copied last, or of what the optimizer keeps. Each is done once with what
guards against it, and once without (`unguarded`: the proof sees what it looks for).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from gpucloud import resume
from gpucloud.domain.checkpoint.objects import read_header
from gpucloud.resume.save.capture import Capture
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.bench.figures import figure

STEPS, EVERY = 48, 6
PREFIX = "checkpoints"


class Count(torch.optim.Optimizer):
    """Adds 1 to every weight, and to as much as Adam would keep of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {"seen": torch.zeros_like(one), "again": torch.zeros_like(one)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(1)
                for kept in self.state[one].values():
                    kept.add_(1)


class Job:
    """One run, in a process of its own as to its store and its attempt."""

    def __init__(self, folder: Path, tensors: int, mib: int, *, graph: bool) -> None:
        self.folder = folder
        (folder / "attempt").mkdir(parents=True)
        os.environ |= {
            "GPUCLOUD_STORE": str(folder / "store"),
            "GPUCLOUD_CHECKPOINTS": PREFIX,
            "GPUCLOUD_ATTEMPT_DIR": str(folder / "attempt"),
            "GPUCLOUD_CHECKPOINT_EVERY": f"steps:{EVERY}",
            "GPUCLOUD_CHECKPOINT_KEEP": str(STEPS),
        }
        self.model = torch.nn.ParameterList([torch.zeros(mib * 2**18, device="cuda") for _ in range(tensors)])
        self.optimizer = Count(self.model.parameters())
        self._step = self._captured() if graph else self.optimizer.step

    def run(self, write: Callable[[Job], None]) -> tuple[int, int]:
        """Return how many checkpoints were committed, and how many tensors of them are not those of their step.

        `write` is done after each `run.step`, in a way that nothing counts.
        """
        truth: dict[int, dict[str, float]] = {}
        run = resume.init(model=self.model, optimizer=self.optimizer, total_steps=STEPS)
        for step in range(1, STEPS + 1):
            if torch.cuda.is_available():
                torch.cuda._sleep(20_000_000)
            self._step()
            truth[step] = {name: float(tensor[0]) for name, tensor in self._tensors().items()}
            run.step()
            write(self)
        run.done()
        return self._mixed(truth)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": one.detach() for name, one in self.model.named_parameters()}
        for name, one in self.model.named_parameters():
            found |= {f"optimizer.state.model.{name}.{what}": kept for what, kept in self.optimizer.state[one].items()}
        return found

    def _captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        return graph.replay

    def _mixed(self, truth: dict[int, dict[str, float]]) -> tuple[int, int]:
        commits = mixed = 0
        for manifest in Checkpoints(open_store(str(self.folder / "store")), PREFIX, keep=STEPS).candidates():
            commits += 1
            for piece in manifest.pieces:
                data = memoryview((self.folder / "store" / PREFIX / piece.key).read_bytes())
                header = read_header(data)
                for tensor in header.tensors:
                    expected = truth[manifest.commit.step].get(tensor.name)
                    if expected is not None:
                        span = data[header.start + tensor.begin : header.start + tensor.end]
                        mixed += bool((np.frombuffer(span, np.float32) != expected).any())
        return commits, mixed


def nothing(job: Job) -> None:
    """Leave all as it is."""


def all_weights(job: Job) -> None:
    """Write to all weights."""
    for one in job.model:
        one.data.add_(0.25)


def the_last(job: Job) -> None:
    """Write to the weights that are copied last, long before they are."""
    job.model[-1].data.add_(0.25)


def what_is_kept(job: Job) -> None:
    """Write to what the optimizer keeps, when some of it is copied."""
    torch.cuda._sleep(2_000_000)
    for one in job.model:
        for kept in job.optimizer.state[one].values():
            kept.data.add_(0.25)


CASES: dict[str, tuple[Callable[[Job], None], bool]] = {
    "plain": (nothing, False),
    "graph": (nothing, True),
    "data": (all_weights, False),
    "late-data": (the_last, False),
    "kept": (what_is_kept, False),
}


@contextmanager
def unguarded() -> Iterator[None]:
    """Neither wait where no optimizer's step is seen, nor look at what was copied."""
    begin = Capture.begin

    def trusting(self: Capture, extra: dict[str, Any], *, steps_are_seen: bool = True) -> None:
        del steps_are_seen
        self._copier.mistrust = lambda: None  # type: ignore[method-assign]
        begin(self, extra, steps_are_seen=True)
        self.summed = 0

    with mock.patch.object(Capture, "begin", trusting):
        yield


def main() -> int:
    """Print the figures; 1 where a checkpoint is mixed, or none was without the guards."""
    parser = argparse.ArgumentParser(description="Show that no checkpoint is mixed of several steps.")
    parser.add_argument("--folder", help="in memory, with room for all checkpoints of a job")
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--mib", type=int, default=8, help="of each tensor; an optimizer keeps twice as much beside")
    args = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("bench_gpu_torn.py") else [])
    if not torch.cuda.is_available():
        print("there is no GPU here, beside which a state could be copied")
        return 1
    print(torch.cuda.get_device_name(), flush=True)
    good = True
    for name, (write, graph) in CASES.items():
        for guarded in (False, True):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder, contextlib.ExitStack() as stack:
                if not guarded:
                    stack.enter_context(unguarded())
                commits, mixed = Job(Path(folder), args.tensors, args.mib, graph=graph).run(write)
            if guarded:
                good &= figure(f"gpu_torn_{name}", mixed, 0)
                good &= figure(f"gpu_torn_{name}_saves_lost", STEPS // EVERY - commits, 2 if name != "plain" else 0)
            else:
                figure(f"gpu_torn_{name}_unguarded", mixed)
                good &= name == "plain" or mixed > 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
