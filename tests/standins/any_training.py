"""A training script of any make: `Recipe` says what it is made of, and what of it makes an exact resume hard.

Every rank appends what it trained on, as it came out of the data set, to OUT/seen-<rank>.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from gpucloud import resume

SAMPLES, GLOBAL_BATCH = 150, 24  # six samples are left out of each epoch
_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a script is made of; `batches` of the loader change the weights once, each is taken in so many `chunks`.

    `each_batch`: every batch is a step for the run, although the weights change after the last of them alone.
    """

    dropout: float = 0.0
    norm: bool = False
    precision: str = "float32"
    scaler: bool = False
    batches: int = 1
    chunks: int = 1
    each_batch: bool = False
    average: str = ""
    optimizer: str = "adamw"
    schedule: str = ""
    clip: bool = False
    recompute: bool = False
    mix: bool = False
    ddp: str = ""

    @classmethod
    def drawn(cls, chance: random.Random) -> Recipe:
        """Return one of all that there are."""
        precision = chance.choice(["float32", "bfloat16", "float16"])
        return cls(
            dropout=chance.choice([0.0, 0.1, 0.4]),
            norm=chance.random() < 0.7,
            precision=precision,
            scaler=precision == "float16" or chance.random() < 0.3,
            batches=chance.choice([1, 1, 2, 3]),
            chunks=chance.choice([1, 2, 3]),
            average=chance.choice(["", "module", "own"]),
            optimizer=chance.choice(["adamw", "sgd", "amsgrad"]),
            schedule=chance.choice(["", "one-cycle", "cosine", "plateau"]),
            clip=chance.random() < 0.5,
            recompute=chance.random() < 0.3,
            mix=chance.random() < 0.5,
            ddp=chance.choice(["", "small buckets", "small buckets", "static", "unused", "views"]),
            each_batch=chance.random() < 0.4,
        )

    def text(self) -> str:
        """Return it for the script's command line."""
        return json.dumps(asdict(self))


class Noisy(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that are changed by draws from three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(SAMPLES, 8, generator=generator)
        self._y = (self._x[:, :3].sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(8) + 0.1 * np.random.randn() + random.gauss(0, 0.1)
        return index, (self._x[index] + noise).float(), self._y[index]


class Model(nn.Module):
    """Registered in another order than it is used, with a buffer that `state_dict` leaves out."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self.head, self.second = nn.Linear(_WIDTH, 2), nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.BatchNorm1d(_WIDTH) if recipe.norm else nn.Identity()
        self.first, self.third = nn.Linear(8, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        x = self.norm(self.first(x))
        x = checkpoint(self._middle, x, use_reentrant=False) if self._recipe.recompute else self._middle(x)
        out: torch.Tensor = self.head(x) * (1 + 0.01 * torch.sin(self.calls))  # type: ignore[arg-type]
        return out

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.relu(x), self._recipe.dropout, self.training)
        return torch.relu(self.third(nn.functional.dropout(torch.relu(self.second(x)), self._recipe.dropout)))


class OwnAverage:
    """An exponential average of weights as people write it themselves: any object with state_dict() will do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mean = copy.deepcopy(model.state_dict())

    def update(self) -> None:
        for name, value in self._model.state_dict().items():
            if value.is_floating_point():
                self._mean[name].lerp_(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self._mean

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean = {name: value.clone() for name, value in state.items()}


class Losses:
    """Any object with state_dict() is part of the state."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Training:
    """The script's objects, and its step."""

    def __init__(self, recipe: Recipe, steps: int) -> None:
        self.recipe = recipe
        torch.manual_seed(0)
        self.inner = Model(recipe)
        self.model: nn.Module = self._distributed() if dist.is_initialized() else self.inner
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=3e-3),
            "sgd": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
            "amsgrad": lambda: torch.optim.Adam(parameters, lr=3e-3, amsgrad=True, weight_decay=1e-3),
        }[recipe.optimizer]()
        schedules = torch.optim.lr_scheduler
        self.schedule: Any = {
            "": lambda: None,
            "one-cycle": lambda: schedules.OneCycleLR(self.optimizer, 3e-3, total_steps=steps),
            "cosine": lambda: schedules.CosineAnnealingWarmRestarts(self.optimizer, T_0=5),
            "plateau": lambda: schedules.ReduceLROnPlateau(self.optimizer, patience=1),
        }[recipe.schedule]()
        # The scale is too large at first: some steps are left out, as in life.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3, enabled=recipe.scaler)
        self.average: Any = {
            "": lambda: None,
            "module": lambda: AveragedModel(self.inner, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
            "own": lambda: OwnAverage(self.inner),
        }[recipe.average]()
        self.losses = Losses()

    def parts(self) -> dict[str, Any]:
        """What `resume.init` is to be given."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedule,
            "scaler": self.scaler if self.recipe.scaler else None,
            "average": self.average,
            "losses": self.losses,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def gather(self, batch: Any, *, last: bool) -> float:
        """Add the batch's gradients, the last of those for one change of the weights, or another; return its loss."""
        count = self.recipe.chunks
        total = 0.0
        for number, (x, y) in enumerate(zip(*(part.chunk(count) for part in batch[1:]), strict=True), 1):
            with self._synchronized(last=last and number == count):
                loss = self._loss(x, y) / (count * self.recipe.batches)
                self.scaler.scale(loss).backward()
            total += loss.item()
        self.losses.seen.append(total)
        return total

    def change(self, total: float) -> None:
        """Change the weights, which had that loss."""
        if self.recipe.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.recipe.schedule == "plateau":
            self.schedule.step(_mean(total))  # of all ranks: else each would have another learning rate
        elif self.schedule is not None:
            self.schedule.step()
        if self.recipe.average == "module":
            self.average.update_parameters(self.inner)
        elif self.average is not None:
            self.average.update()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Return the hash of all that a run leaves behind."""
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        parts["buffers"] = dict(self.inner.named_buffers())
        parts["generators"] = [torch.get_rng_state(), random.getstate(), *np.random.get_state()[1:]]
        digest = hashlib.sha256()
        for leaf in _leaves(parts):
            digest.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
        return digest.hexdigest()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.recipe.mix:  # the script draws too, from each generator
            share = float(np.random.beta(0.4, 0.4)) if random.uniform(0, 1) < 0.5 else float(torch.rand(()))
            x = share * x + (1 - share) * x.roll(1, 0)
        dtype = getattr(torch, self.recipe.precision)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            out = self.model(x)
        return nn.functional.cross_entropy(out.float(), y)

    def _distributed(self) -> nn.Module:
        kind = self.recipe.ddp
        return DistributedDataParallel(
            self.inner,
            bucket_cap_mb=0.002 if kind == "small buckets" else 25,
            static_graph=kind == "static",
            find_unused_parameters=kind == "unused",
            gradient_as_bucket_view=kind == "views",
        )

    def _synchronized(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        # A static graph is one for each iteration: torch says that no_sync is not for it.
        if last or not isinstance(self.model, DistributedDataParallel) or self.recipe.ddp == "static":
            return contextlib.nullcontext()
        return self.model.no_sync()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--recipe", type=lambda text: Recipe(**json.loads(text)), required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    training = Training(args.recipe, args.steps)
    run = resume.init(total_steps=args.steps, seed=3, **training.parts())
    started = run.steps_done
    torch.rand(3 + 5 * started)  # what a script draws before its loop must not matter
    workers = {"num_workers": args.workers, "persistent_workers": args.workers > 1}
    batches: list[Any] = []
    total = 0.0
    for number, batch in enumerate(run.loader(Noisy(), global_batch=GLOBAL_BATCH, **workers), 1):
        changes = number % args.recipe.batches == 0
        total += training.gather(batch, last=changes)
        batches.append(batch)
        if changes:
            training.change(total)
            total = 0.0
        if changes or args.recipe.each_batch:
            remember(args.out / f"seen-{rank}.jsonl", run.steps_done + 1, batches)
            batches = []
            run.step(loss=training.losses.seen[-1])
    run.done()
    result = {"digest": training.digest(), "started": started, "level": run.level.value, "losses": training.losses.seen}
    (args.out / f"result-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _mean(value: float) -> float:
    """Return the mean of what all ranks have."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def remember(path: Path, step: int, batches: list[Any]) -> None:
    """Append the attempt, the step, and for each batch its samples: index, and the sum of what its noise made of it."""
    sums = ((index, x.double().flatten(1).sum(1)) for index, x, _ in batches)
    samples = [[(int(i), float(v)) for i, v in zip(*pair, strict=True)] for pair in sums]
    line = json.dumps([int(os.environ["GPUCLOUD_ATTEMPT"]), step, samples])
    with path.open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in [repr(key), *_leaves(tree[key])]]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]
