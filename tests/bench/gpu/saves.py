"""torchrun --nproc-per-node=2 -m tests.bench.gpu.saves --folder /mnt/memory

What saving costs a GPT under DDP and bf16 autocast, over NCCL, or gloo where there is no GPU. Rank 0 prints a line
`MEASURED {…}` for each thing that it finds. With --resume: what it takes to load what the run before has saved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume
from tests.bench.gpu.train import Gpt, Noise, device_of, meanwhile, tensors_of, wrapped

SETTLE, OTHERS_ROUNDS, WAIT_S = 20, 2, 120.0


def main() -> None:
    args = _arguments()
    folder = Path(args.folder)
    (folder / "attempt").mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "GPUCLOUD_STORE": str(folder / "store"),
        "GPUCLOUD_ATTEMPT_DIR": str(folder / "attempt"),
        "GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000000",  # each save is wished for where it is measured
        "GPUCLOUD_CHECKPOINT_KEEP": "2",
    }
    work = Work(args, folder)
    if args.resume:
        work.tell("loaded", bits=work.bits(), step=work.run.steps_done, init_s=work.init_s, bytes=work.state_bytes())
    else:
        measure(work, args)
    dist.barrier()
    dist.destroy_process_group()


def measure(work: Work, args: argparse.Namespace) -> None:
    for _ in range(SETTLE):
        work.step(stepping=True)
    work.save_and_wait()  # the first one meets fresh memory
    work.tell("state", gigabytes=work.state_bytes() / 1e9, parameters=work.parameters(), world=dist.get_world_size())
    copies(work, args.copies)
    for number in range(args.rounds):
        if number > 1 and work.highest(time.time() > args.until):
            break
        for kind in ("plain", "stepping", "saving") if number % 2 else ("saving", "stepping", "plain"):
            block(work, kind, args.block)
    others(work)
    work.run.done()
    work.tell("saved", bits=work.bits(), step=work.run.steps_done)


def copies(work: Work, count: int) -> None:
    """Each save's own step, its copy beside the next forward and backward pass, against the steps before it."""
    for _ in range(count):
        usual = [work.timed_step() for _ in range(3)]
        wished = work.wish()
        seconds = work.timed_step()
        call_s = work.call_s
        after = work.timed_step()
        work.wait_for(wished)
        usual_s = statistics.median(usual)
        work.tell("copy", usual_s=usual_s, saving_s=seconds, after_s=after, call_s=call_s)


def block(work: Work, kind: str, steps: int) -> None:
    """So many steps: of a bare loop, with `run.step`, or so and with one save that is over before they are.

    Told beside: the excess of the steps between the save and its commit over the block's other steps. Without a save
    the same steps as of the last one tell how much of that is noise.
    """
    work.level()
    began = time.perf_counter()
    wished, start, end = 0, steps // 10, None
    marks = [work.mark()]
    for number in range(steps):
        if kind == "saving" and number == start:
            wished = work.wish()
        work.step(stepping=kind != "plain")
        marks.append(work.mark())
        if wished and end is None and work.run.committed_step >= wished:
            end = number + 1
    work.level()
    seconds = time.perf_counter() - began
    over = kind != "saving" or end is not None
    if not over:
        work.wait_for(wished)
    if end is not None:
        work.span = end - start
    each = [before.seconds(after) for before, after in itertools.pairwise(marks)]
    found = excess(each, start, work.span) if work.span and over else None
    work.tell("block", kind=kind, seconds=seconds, over=over, span=work.span, excess=found)


def excess(each: list[float], start: int, span: int) -> float:
    """Return what `span` steps from `start` on took more than the others' median, as a share of all that median."""
    within, others = each[start : start + span], [*each[:start], *each[start + span :]]
    usual = statistics.median(others)
    return (sum(within) - len(within) * usual) / (len(each) * usual)


class Mark:
    """A moment between two steps: where they run, which on a GPU is later than where they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds(self, later: Mark) -> float:
        """Return the time between both; what is queued must have run."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1000


def others(work: Work) -> None:
    """What the ways that come with torch take: the training waits for them."""
    folder = work.folder / "others"
    folder.mkdir(exist_ok=True)

    def by_torch() -> None:
        if dist.get_rank() == 0:
            torch.save(work.states(), folder / "torch.pt")

    def by_dcp() -> None:
        dcp.save(work.states(), checkpoint_id=str(folder / "dcp"))

    for way, save in {"torch_save": by_torch, "dcp_save": by_dcp}.items():
        for _ in range(OTHERS_ROUNDS):
            usual = statistics.median(work.timed_step() for _ in range(3))
            work.level()
            began = time.perf_counter()
            save()
            work.level()
            work.tell("other", way=way, seconds=time.perf_counter() - began, usual_s=usual)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


class Work:
    """The training, and its run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.device = device_of()
        dist.init_process_group("cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(0)
        self.model: DistributedDataParallel = wrapped(Gpt(args.width, args.layers), self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, fused=True)
        self.call_s = 0.0
        self.span = 0  # steps between the last measured save and its commit
        began = time.perf_counter()
        self.run = resume.init(model=self.model, optimizer=self.optimizer, total_steps=10**9)
        self.init_s = time.perf_counter() - began
        # From memory that is not pinned, a batch's way to the GPU would wait for all that is queued there.
        options = {"num_workers": 2, "pin_memory": self.device.type == "cuda"}
        loader = self.run.loader(Noise(args.length), global_batch=args.batch * dist.get_world_size(), **options)
        self._batches: Iterator[Any] = iter(loader)
        self._wishes = 0

    def step(self, *, stepping: bool) -> None:
        words = next(self._batches).to(self.device, non_blocking=True)
        with meanwhile(self.device):
            loss = cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if stepping:
            began = time.perf_counter()
            self.run.step(loss=loss)
            self.call_s = time.perf_counter() - began

    def mark(self) -> Mark:
        return Mark(self.device)

    def timed_step(self) -> float:
        """Return what `run.step` takes with the step that follows it: of a save, all that the training feels."""
        self.level()
        began = time.perf_counter()
        self.run.step()
        self.call_s = time.perf_counter() - began
        self.step(stepping=False)
        self._sync()
        return time.perf_counter() - began

    def wish(self) -> int:
        """Have the next `run.step` save; return that step. Rank 0's word is enough, and no rank waits for another."""
        self._wishes += 1
        if dist.get_rank() == 0:
            path = self.folder / "attempt" / "save.json"
            path.with_suffix(".new").write_text(json.dumps({"since": self._wishes}))
            path.with_suffix(".new").replace(path)
        return self.run.steps_done + 1

    def wait_for(self, step: int) -> None:
        began = time.monotonic()
        while self.run.committed_step < step:
            self.step(stepping=True)
            if time.monotonic() - began > WAIT_S:
                raise TimeoutError(f"the save of step {step} is not committed")

    def save_and_wait(self) -> None:
        wished = self.wish()
        self.step(stepping=True)
        self.wait_for(wished)

    def level(self) -> None:
        """Bring all ranks to the same moment, with nothing queued."""
        self._sync()
        dist.barrier()
        self._sync()

    def highest(self, number: float) -> float:
        value = torch.tensor(float(number), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def states(self) -> dict[str, Any]:
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.model.module, self.optimizer))

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def bits(self) -> int:
        """A sum over all of the state as integers: cheap, and the same on a run that loads it."""
        found = 0
        for tensor in tensors_of(self.model.module, self.optimizer):
            if tensor.element_size() == 4:
                found += int(tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64))
        return found

    def tell(self, what: str, **found: Any) -> None:
        if dist.get_rank() == 0:
            print("MEASURED", json.dumps({"what": what, **found}), flush=True)

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what saving costs.")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="sequences a GPU and step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--block", type=int, default=100, help="steps, of which one is saved")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--until", type=float, default=time.time() + timedelta(hours=1).total_seconds())
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
