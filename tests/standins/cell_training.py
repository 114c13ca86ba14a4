"""The training script of a cell: its parallelism, execution and settings are those that the cell's name says.

What it ends with is in OUT/result-<rank>.json as one hash for each part of the state; what each step was trained on is
in OUT/seen-<rank>.jsonl, as of `any_training`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume
from tests.prove.cells import OF_THE_RUN, Cell, Device
from tests.standins.any_training import Losses, remember

SAMPLES, GLOBAL_BATCH = 130, 12  # ten samples are left out of each epoch, and two ranks or three share a batch
_CHANNELS, _WIDTH, _HIDDEN = 8, 12, 12
_EAGER_STEPS = 3
"""Steps of an attempt ahead of the capture of a graph, as torch's documentation wants."""


class Images(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that are changed by draws from three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(SAMPLES, 3, 6, 6, generator=generator)
        self._y = (self._x[:, 0].mean((1, 2)) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(3, 6, 6) + 0.1 * np.random.randn() + random.gauss(0, 0.1)
        return index, (self._x[index] + noise).float(), self._y[index]


def masked(samples: list[Any]) -> Any:
    """Collate, with a mask of random numbers over the batch: drawn by torch, NumPy and Python."""
    index, x, y = torch.utils.data.default_collate(samples)
    kept = torch.rand_like(x) < 0.85 + 0.1 * np.random.rand()
    return index, x * kept * random.uniform(0.9, 1.1), y


class Stream(torch.utils.data.IterableDataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """The same images in no order that can be asked for: a share of them, out of a buffer from which one is drawn."""

    def __init__(self, share: int, shares: int) -> None:
        self._images, self._share, self._shares, self._epoch = Images(), share, shares, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        held: list[int] = []
        for index in self._order():
            held.append(index)
            if len(held) > 5:
                yield self._images[held.pop(random.randrange(len(held)))]
        yield from (self._images[index] for index in held)

    def _order(self) -> list[int]:
        worker = torch.utils.data.get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        return order[self._share * workers + number :: self._shares * workers]


class Resumable(Stream):
    """A stream that knows where it is."""

    _done = 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for index in self._order()[self._done :]:
            self._done += 1
            yield self._images[index]
        self._done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._done = state["done"]


class Stem(nn.Module):
    """Convolutions, with buffers of both kinds: in `state_dict` and left out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, _CHANNELS, 3, padding=1), nn.Conv2d(_CHANNELS, _WIDTH, 3)
        self.norm = nn.BatchNorm2d(_CHANNELS)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3))
        return x * (1 + 0.01 * torch.sin(self.calls)).to(x.dtype)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(_WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class Model(nn.Module):
    """Registered in another order than it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.block, self.stem = nn.Linear(_WIDTH, 2), Block(), Stem()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.stem(x)))
        return out


class Masters(torch.optim.Optimizer):
    """Adam for weights in bfloat16, in whose state all is float32: the moments, and the weight itself."""

    def __init__(self, groups: list[dict[str, Any]], lr: Any) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, self.state[parameter], group["lr"])

    def _change(self, parameter: torch.Tensor, kept: dict[str, torch.Tensor], lr: Any) -> None:
        if not kept:
            kept["master"] = parameter.detach().float()
            kept["mean"], kept["square"] = torch.zeros_like(kept["master"]), torch.zeros_like(kept["master"])
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        kept["mean"].mul_(0.9).add_(gradient * 0.1)
        kept["square"].mul_(0.99).add_(gradient * gradient * 0.01)
        kept["master"].sub_(kept["mean"] / (kept["square"].sqrt() + 1e-6) * lr)
        parameter.copy_(kept["master"])


class OwnAverage:
    """An exponential average of the weights in a plain object, as scripts write it by hand."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mean = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._mean[name].mul_(0.9).add_(parameter.detach() * 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._mean.items():
            tensor.copy_(state["mean"][name])


class ModuleAverage:
    """The same in a module like the model, which the run is given as one."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self._model, self.module = model, module

    @torch.no_grad()
    def update(self) -> None:
        for mean, now in zip(self.module.parameters(), self._model.parameters(), strict=True):
            mean.mul_(0.9).add_(now * 0.1)
        for mean, now in zip(self.module.buffers(), self._model.buffers(), strict=True):
            mean.copy_(now)


class Training:
    """The script's objects, and its step."""

    def __init__(self, cell: Cell, device: torch.device, steps: int) -> None:
        self.cell, self._device = cell, device
        self.gathered = 2 if "accumulation" in cell.settings else 1
        self._whole_graph = cell.execution == "graph" and cell.parallel == "single"
        torch.manual_seed(0)
        self.over: Any = None
        self.inner = self._sharded(self._made())
        self._averages = [OwnAverage(self.inner)] if "ema_own" in cell.settings else []
        self._module_average = (
            ModuleAverage(self.inner, self._sharded(self._made())) if "ema_module" in cell.settings else None
        )
        self.model = self._executed(self.inner)
        self.optimizer = self._optimizer()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - 0.5 * step / steps)
        # The scale is too large at first: some steps are left out, as in life.
        scaled = "scaler" in cell.settings
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**19, growth_interval=3, enabled=scaled)
        self.losses = Losses()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def parts(self) -> dict[str, Any]:
        """What `resume.init` is to be given."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedule,
            "losses": self.losses,
        }
        if "scaler" in self.cell.settings:
            parts["scaler"] = self.scaler
        if self._averages:
            parts["average"] = self._averages[0]
        if self._module_average is not None:
            parts["mean"] = self._module_average.module
        return parts

    def take(self, x: torch.Tensor, y: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Train on a batch, the last of those for one change of the weights, or another; return its loss."""
        x, y = self._placed(x), y.to(self._device)
        if self._whole_graph:
            loss = self._replayed(x, y)
        else:
            with self._synchronized(last=last):
                loss = self._gradients(x, y)
            if last:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
        if last:
            self.schedule.step()
            for average in (*self._averages, self._module_average):
                if average is not None:
                    average.update()
        self.losses.seen.append(loss.item())
        return loss

    def digests(self) -> dict[str, str]:
        """Return the hash of each part of what a run leaves behind, on this rank."""
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        parts["buffers"] = dict(self.inner.named_buffers())
        parts["generators"] = [torch.get_rng_state(), random.getstate(), *np.random.get_state()[1:]]
        if self._device.type == "cuda":
            parts["generators"].append(torch.cuda.get_rng_state())
        return {name: digest(part) for name, part in parts.items()}

    def _made(self) -> Model:
        model = Model().to(self._device, torch.bfloat16 if "bf16" in self.cell.settings else torch.float32)
        if "channels_last" in self.cell.settings:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._device, torch.bfloat16 if "bf16" in self.cell.settings else torch.float32)
        return x.contiguous(memory_format=torch.channels_last) if "channels_last" in self.cell.settings else x

    def _sharded(self, model: Model) -> Model:
        """Return the model as ranks hold it together, where they do; parts of it are compiled before."""
        if self.cell.parallel == "tp":
            mesh = init_device_mesh(self._device.type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
            self.over = mesh["data"]
            parallelize_module(model.block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif self.cell.parallel == "fsdp":
            if self.cell.execution != "eager":
                for part in (model.stem, model.block):
                    part.compile(backend=self._backend())
            mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
            fully_shard(model.block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def _executed(self, model: Model) -> nn.Module:
        """Return what is called in each step."""
        compiled = self.cell.execution == "compiled" or (self.cell.execution == "graph" and self.cell.parallel == "tp")
        if self.cell.parallel == "ddp":
            if self.cell.execution == "graph":
                self._graph_passes(model)
            ids = [self._device.index] if self._device.type == "cuda" else None
            wrapped = DistributedDataParallel(model, device_ids=ids)
            return torch.compile(wrapped, backend=self._backend()) if compiled else wrapped  # type: ignore[return-value]
        if compiled and self.cell.parallel != "fsdp":
            return torch.compile(model, backend=self._backend())  # type: ignore[return-value]
        return model

    def _graph_passes(self, model: Model) -> None:
        """Have the forward and the backward pass replayed from graphs, as torch's documentation does it under DDP."""
        batch = GLOBAL_BATCH // dist.get_world_size()
        sample = self._placed(torch.zeros(batch, 3, 6, 6))
        torch.cuda.make_graphed_callables(model, (sample,), num_warmup_iters=11)

    def _backend(self) -> str:
        """Return what compiles: where ranks hold tensors together, torch's own graph trees are what captures."""
        if self.cell.execution == "graph":
            return "cudagraphs"
        return "inductor" if Device(self._device.type).has_inductor else "aot_eager"

    def _optimizer(self) -> torch.optim.Optimizer:
        # What is given whole and what in parts is apart: one call of fused or foreach does not take both.
        whole = [p for p in self.model.parameters() if not hasattr(p, "device_mesh")]
        parts = [p for p in self.model.parameters() if hasattr(p, "device_mesh")]
        groups: list[dict[str, Any]] = [{"params": params} for params in (whole, parts) if params]
        lr: Any = torch.tensor(3e-3, device=self._device) if self._whole_graph else 3e-3
        if "bf16" in self.cell.settings:
            return Masters(groups, lr)
        kind = {name: True for name in ("fused", "foreach") if name in self.cell.settings}
        return torch.optim.AdamW(groups, lr=lr, capturable=self._whole_graph, **kind)

    def _gradients(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.cell.execution == "graph":
            torch.compiler.cudagraph_mark_step_begin()
        loss = nn.functional.cross_entropy(self.model(x).float(), y) / self.gathered
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _replayed(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Do a whole step, its optimizer's too: the first ones of an attempt by themselves, then from a graph."""
        self._steps += 1
        if self._steps <= _EAGER_STEPS:
            return self._beside(lambda: self._step(x, y))
        if self._graph is None:
            self._x, self._y, self._graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self._graph):
                self._loss = self._step(self._x, self._y)
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(x).float(), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _beside(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = step()
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    @contextlib.contextmanager
    def _synchronized(self, *, last: bool) -> Iterator[None]:
        """Leave what ranks must say to each other to the last batch of a change."""
        if self.cell.parallel == "fsdp":
            self.inner.set_requires_gradient_sync(last)  # type: ignore[operator]
        ddp = self.model._modules.get("_orig_mod", self.model)
        with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and not last else contextlib.nullcontext():
            yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--cell", type=Cell.read, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    cell: Cell = args.cell
    rank = int(os.environ.get("RANK", "0"))
    device = _prepared(args.device, rank)
    if cell.parallel != "single":
        _join(device)
    training = Training(cell, device, args.steps)
    run = resume.init(total_steps=args.steps, seed=3, **training.parts())
    started = run.steps_done
    torch.rand(3 + 5 * started)  # what a script draws before its loop must not matter
    for number, batch in enumerate(_batches(run, cell, training.over), 1):
        loss = training.take(*batch[1:], last=number % training.gathered == 0)
        if cell.parallel != "tp" or rank == 0:  # with tensor parallelism ranks share their samples
            remember(args.out / f"seen-{rank}.jsonl", run.steps_done + 1, [batch])
        run.step(loss=loss)
    run.done()
    result = {"digests": training.digests(), "started": started, "level": run.level.value, "steps": run.steps_done}
    (args.out / f"result-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _batches(run: resume.Run, cell: Cell, over: Any) -> Iterator[Any]:
    """Yield the batches of the run's own loader, or, epoch by epoch, of one that the script makes."""
    workers = 0 if cell.loader.endswith("0") else 2
    if cell.loader in OF_THE_RUN:
        collation = {"collate_fn": masked} if cell.loader == "collation" else {}
        yield from run.loader(Images(), global_batch=GLOBAL_BATCH, over=over, num_workers=workers, **collation)
        return
    loader = run.wrap(_own_loader(cell, workers), over=over)
    for _ in run.epochs(100):
        yield from loader


def _own_loader(cell: Cell, workers: int) -> Any:
    splits = cell.parallel in ("ddp", "fsdp") and dist.get_world_size() > 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if splits else (0, 1)
    options = {"batch_size": GLOBAL_BATCH // world, "num_workers": workers, "drop_last": True}
    if cell.loader.startswith("wrapped"):
        images = Images()
        if splits:
            options["sampler"] = torch.utils.data.DistributedSampler(images, seed=11, drop_last=True)
        return torch.utils.data.DataLoader(images, **options, **({} if splits else {"shuffle": True}))
    if cell.loader.startswith("stateful"):
        stateful = importlib.import_module("torchdata.stateful_dataloader")
        return stateful.StatefulDataLoader(Resumable(rank, world), **options)
    return torch.utils.data.DataLoader(Stream(rank, world), **options)


def _prepared(kind: str, rank: int) -> torch.device:
    """Return the rank's device; what is done on it is done alike each time."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(0)  # with a loader of its own, a script's own seeds count
    np.random.seed(0)
    if kind != "cuda":
        return torch.device(kind)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS does not do everything alike each time
    here = rank % torch.cuda.device_count()
    torch.cuda.set_device(here)
    torch.zeros((), device="cuda")  # a script has touched its GPU before it begins a run
    inductor = __import__("torch._inductor.config")._inductor.config
    inductor.compile_threads = 1  # else its processes outlive a rank that is killed
    if hasattr(inductor, "deterministic"):  # else it measures which of two kernels is quicker, each time anew
        inductor.deterministic = True
    return torch.device("cuda", here)


def _join(device: torch.device) -> None:
    """Join the other ranks, over gloo where some share a GPU, as NCCL lets none; a lone rank is a group of its own."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= world else "gloo"
    if world > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def digest(part: Any) -> str:
    digest = hashlib.sha256()
    for leaf in _leaves(part):
        digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def _leaves(tree: Any) -> list[Any]:
    """Return what is in the tree; of tensors the type, the shape, the strides and the bytes of this rank's part."""
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in [repr(key), *_leaves(tree[key])]]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, np.ndarray):
        return [tree.tobytes()]
    if not isinstance(tree, torch.Tensor):
        return [tree]
    mine = (tree.to_local() if hasattr(tree, "to_local") else tree).detach()
    data = mine.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [mine.dtype, tuple(mine.shape), mine.stride(), data]
