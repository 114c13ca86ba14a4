"""Measures what a save takes from the training thread, beside others and a plain copy, in turns, in one process.

A part of `python -m tests.bench checkpoints`: the state has STATE_MIB. The limit is a copy of the same bytes into
memory that was used before; how much slower steps are until the checkpoint is written is told beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from gpucloud import resume
from tests.bench.figures import figure

TENSORS, MIB = 12, 32
STATE_MIB = TENSORS * MIB
ROUNDS, OTHERS_ROUNDS = 12, 3
RATIO_LIMIT = 1.25

Begun = Callable[[], bool]
"""Whether the checkpoint is written."""


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, _group():
        folder = Path(name)
        model = nn.ParameterList(torch.randn(MIB * 2**18) for _ in range(TENSORS))
        work = _Work(model)
        ways = {
            "memcpy": _memcpy(model),
            "ours": _ours(model, folder / "ours", work),
            "torch_save": _torch_save(model, folder),
            "dcp_save": _dcp_save(model, folder),
            "dcp_async_thread": _dcp_async(model, folder, AsyncCheckpointerType.THREAD),
            "dcp_async_process": _dcp_async(model, folder, AsyncCheckpointerType.PROCESS),
        }
        stalls: dict[str, list[Stall]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way, save in ways.items():
                if number < OTHERS_ROUNDS or way in ("memcpy", "ours"):
                    stalls[way].append(work.stall(save))
    # The first of each meets fresh memory; of the others the least is what the way takes, the rest is the machine.
    least = {way: min(stall.call_s for stall in found[1:]) for way, found in stalls.items()}
    for way, seconds in least.items():
        figure(f"stall_{way}_s", seconds)
        figure(f"stall_{way}_steps_slower_meanwhile", min(stall.slower for stall in stalls[way][1:]))
        if way not in ("memcpy", "ours"):
            figure(f"stall_{way}_to_memcpy", seconds / least["memcpy"])
    # By the thread's own processor time: what a machine that others use takes from both is not in it.
    cpu = {way: min(stall.cpu_s for stall in stalls[way][1:]) for way in ("memcpy", "ours")}
    figure("stall_ours_to_memcpy_cpu", cpu["ours"] / cpu["memcpy"], RATIO_LIMIT)
    return 0 if figure("stall_ours_to_memcpy", least["ours"] / least["memcpy"], RATIO_LIMIT) else 1


@dataclass(frozen=True, slots=True)
class Stall:
    call_s: float
    cpu_s: float
    slower: float


class _Work:
    """Steps that change a little of the model, and run Python for a while: they feel a thread that holds the GIL."""

    def __init__(self, model: nn.ParameterList) -> None:
        self._model = model
        self._factor = torch.randn(300, 300)

    def timed(self) -> float:
        began = time.perf_counter()
        for _ in range(4):
            self._factor @ self._factor
        with torch.no_grad():
            self._model[0][:65536] += 1.0
        total = 0
        for number in range(20000):
            total += number
        return time.perf_counter() - began

    def stall(self, save: Callable[[], Begun]) -> Stall:
        """Return what a save's call takes, and how much slower steps were while it was written than before."""
        usual_s = statistics.fmean(self.timed() for _ in range(20))
        began, cpu_began = time.perf_counter(), time.thread_time()
        written = save()
        call_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
        steps: list[float] = []
        while not written():
            steps.append(self.timed())
        slower = sum(steps) / (usual_s * len(steps)) - 1 if steps else 0.0
        return Stall(call_s, cpu_s, slower)


def _memcpy(model: nn.ParameterList) -> Callable[[], Begun]:
    into = [torch.zeros_like(one) for one in model]

    def save() -> Begun:
        with torch.no_grad():
            for place, one in zip(into, model, strict=True):
                place.copy_(one)
        return lambda: True

    return save


def _ours(model: nn.ParameterList, folder: Path, work: _Work) -> Callable[[], Begun]:
    """The library as a script uses it: a save is wished for by the node's agent, and made by the next step."""
    attempt = folder / "attempt"
    attempt.mkdir(parents=True)
    os.environ |= {
        "GPUCLOUD_STORE": str(folder / "store"),
        "GPUCLOUD_ATTEMPT_DIR": str(attempt),
        "GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000000",
    }
    run = resume.init(model=model)
    run.step()  # memory is made ready from here on
    wishes = iter(range(1, 1000))

    def save() -> Begun:
        (attempt / "save.json").write_text(json.dumps({"since": next(wishes)}))
        before = run.committed_step
        run.step()

        def written() -> bool:
            run.step()
            return run.committed_step > before

        return written

    return save


def _torch_save(model: nn.ParameterList, folder: Path) -> Callable[[], Begun]:
    def save() -> Begun:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    return save


def _dcp_save(model: nn.ParameterList, folder: Path) -> Callable[[], Begun]:
    def save() -> Begun:
        dcp.save(model.state_dict(), checkpoint_id=str(folder / "dcp"))
        return lambda: True

    return save


def _dcp_async(model: nn.ParameterList, folder: Path, kind: AsyncCheckpointerType) -> Callable[[], Begun]:
    def save() -> Begun:
        place = str(folder / f"dcp-async-{kind.value}")
        future = dcp.async_save(model.state_dict(), checkpoint_id=place, async_checkpointer_type=kind)
        return getattr(future, "upload_completion", future).done

    return save


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """A group of one; the process that DCP saves by makes its own by the same environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
