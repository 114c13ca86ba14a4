"""Training scripts of frameworks whose loops are their own, as their users write them: a few lines are gpucloud's.

What each ends with is in OUT/result-<rank>.json as one hash for each part of the state; what each step was trained on
is in OUT/seen-<rank>.jsonl, as of `any_training`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Subset

from gpucloud import resume
from tests.standins.any_training import remember
from tests.standins.cell_training import Images, Model, Resumable, Stream, digest, masked

SAMPLES, GLOBAL_BATCH = 64, 12  # six steps an epoch, the last one of few


class Scored(nn.Module):
    """The model with its loss, as Hugging Face's are; it remembers what it is trained on."""

    def __init__(self, remembers: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = Model()
        self._remembers = remembers

    def forward(self, index: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self._remembers((index, x, labels))
        scores = self.model(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def named(samples: list[Any]) -> dict[str, torch.Tensor]:
    return dict(zip(("index", "x", "labels"), torch.utils.data.default_collate(samples), strict=True))


def named_and_masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    return dict(zip(("index", "x", "labels"), masked(samples), strict=True))


def huggingface(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415  one framework is trained with at a time

    from gpucloud.frameworks.huggingface import resumable  # noqa: PLC0415

    gathered = 2 if "accumulation" in args.settings else 1
    arguments = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")) // gathered,
        gradient_accumulation_steps=gathered,
        dataloader_num_workers=2 if "workers" in args.settings else 0,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,  # as of its own models: so DDP groups gradients anew
        remove_unused_columns=False,
        save_strategy="no",
        accelerator_config={"dispatch_batches": False} if "stream" in args.settings else None,
        eval_strategy="steps" if "evaluation" in args.settings else "no",
        eval_steps=4,
        logging_steps=3,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)

    def remembers(batch: Any) -> None:
        remember(args.out / f"seen-{rank}.jsonl", trainer.state.global_step + 1, [batch])

    trainer = Trainer(
        model=Scored(remembers),
        args=arguments,
        data_collator=named_and_masked if "collation" in args.settings else named,
        train_dataset=Stream(0, 1) if "stream" in args.settings else Subset(Images(), range(SAMPLES)),
        eval_dataset=Subset(Images(), range(SAMPLES, 2 * SAMPLES)),
    )
    trainer = resumable(trainer)
    trainer.train()
    logged = [
        {k: v for k, v in one.items() if "per_second" not in k and "runtime" not in k}
        for one in trainer.state.log_history
    ]
    return {
        "model": trainer.model.state_dict(),
        "buffers": dict(trainer.model.named_buffers()),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "log": [one for one in logged if "train_loss" not in one],
        "steps": trainer.state.global_step,
    }


def lightning(args: argparse.Namespace) -> dict[str, Any]:
    import lightning.pytorch as pl  # noqa: PLC0415
    import torchmetrics  # noqa: PLC0415
    from lightning.pytorch.callbacks import EarlyStopping  # noqa: PLC0415
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: PLC0415

    from gpucloud.frameworks.lightning import Resumable  # noqa: PLC0415

    warnings.simplefilter("ignore")  # Lightning calls what torch will do without, and has advice
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gathered = 2 if "accumulation" in args.settings else 1
    evaluates = "evaluation" in args.settings

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            remember(args.out / f"seen-{rank}.jsonl", self.trainer.global_step + 1, [batch])
            loss = nn.functional.cross_entropy(self.inner(batch[1]), batch[2])
            self.mean.update(loss.detach())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("held", nn.functional.cross_entropy(self.inner(batch[1]), batch[2]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            if evaluates:
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held"}}
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    torch.manual_seed(0)
    module = Module()
    batch = GLOBAL_BATCH // world // gathered
    collate = masked if "collation" in args.settings else None
    workers = 2 if "workers" in args.settings else 0
    train = Subset(Images(), range(SAMPLES))
    data = torch.utils.data.DataLoader(train, batch, shuffle=True, num_workers=workers, collate_fn=collate)
    held = torch.utils.data.DataLoader(Subset(Images(), range(SAMPLES, 2 * SAMPLES)), batch)
    trainer = pl.Trainer(
        max_steps=args.steps if "steps" in args.settings else -1,
        max_epochs=-(-args.steps // 6),
        accumulate_grad_batches=gathered,
        accelerator="cpu",
        devices=1,
        num_nodes=world,
        strategy="ddp" if world > 1 else "auto",
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=4 if "often" in args.settings else 1.0,
        limit_val_batches=1.0 if evaluates else 0,
        callbacks=[Resumable(), *([EarlyStopping("held", patience=9)] if evaluates else [])],
    )
    trainer.fit(module, data, held if evaluates else None)
    return {
        "model": module.state_dict(),
        "buffers": dict(module.named_buffers()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "mean": module.mean.mean_value,
        "stopping": [one.state_dict() for one in trainer.callbacks[1:]],
        "counts": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped],
    }


def accelerate(args: argparse.Namespace) -> dict[str, Any]:
    from accelerate import Accelerator  # noqa: PLC0415

    from gpucloud.frameworks.accelerate import resumable  # noqa: PLC0415

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gathered = 2 if "accumulation" in args.settings else 1
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gathered)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps * world)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.DataLoader(
        Subset(Images(), range(SAMPLES)),
        GLOBAL_BATCH // world // gathered,
        shuffle=True,
        num_workers=2 if "workers" in args.settings else 0,
        collate_fn=masked if "collation" in args.settings else None,
    )
    inner = model
    model, optimizer, data, cosine = accelerator.prepare(model, optimizer, data, cosine)
    accelerator.register_for_checkpointing(decay)
    run, data = resumable(accelerator, model, data)
    for _ in run.epochs(-(-args.steps // 6)):
        for batch in data:
            remember(args.out / f"seen-{rank}.jsonl", run.steps_done + 1, [batch])
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch[1]), batch[2]))
                optimizer.step()
                cosine.step()
                optimizer.zero_grad()
        decay.step()
        torch.rand(5)  # an evaluation draws
    run.done()
    return {
        "model": inner.state_dict(),
        "buffers": dict(inner.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "schedules": [cosine.state_dict(), decay.state_dict()],
        "steps": run.steps_done,
    }


class Count:
    """What torchtitan's trainer tells of itself."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def dcp(args: argparse.Namespace) -> dict[str, Any]:
    from gpucloud.frameworks.dcp import Checkpointer  # noqa: PLC0415

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inner = model = Model()
    if "ddp" in args.settings:
        model = nn.parallel.DistributedDataParallel(inner)  # type: ignore[assignment]
    else:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    data: Any = Subset(Images(), range(60))
    loader = torch.utils.data.DataLoader(
        data, GLOBAL_BATCH // world, sampler=torch.utils.data.DistributedSampler(data), drop_last=True
    )
    if "stateful" in args.settings:
        stateful = importlib.import_module("torchdata.stateful_dataloader")
        loader = stateful.StatefulDataLoader(Resumable(rank, world), GLOBAL_BATCH // world, drop_last=True)
    count = Count()
    checkpointer = Checkpointer(
        dataloader=loader,
        model_parts=[model],
        optimizers=[optimizer],
        lr_schedulers=[schedule],
        states={"train_state": count},
    )
    checkpointer.load()
    batches = itertools.chain.from_iterable(itertools.repeat(checkpointer.dataloader))
    while count.step < args.steps:
        count.step += 1  # ahead of its batch, as torchtitan does
        batch = next(batches)
        remember(args.out / f"seen-{rank}.jsonl", count.step, [batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[1]), batch[2]).backward()
        optimizer.step()
        schedule.step()
        checkpointer.save(count.step, last_step=count.step == args.steps)
    return {
        "model": inner.state_dict(),
        "buffers": dict(inner.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
        "steps": count.step,
    }


def pipeline(args: argparse.Namespace) -> dict[str, Any]:
    from torch.distributed import pipelining  # noqa: PLC0415

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo")
    each = 2 if "interleaved" in args.settings else 1
    numbers = [rank + world * one for one in range(each)]
    modules = [Layer(number) for number in numbers]  # under the same names, of the same shapes, on every rank
    optimizers = [torch.optim.AdamW(module.parameters(), lr=3e-3) for module in modules]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    stages = [
        pipelining.PipelineStage(module, number, world * each, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    kinds = {"1f1b": pipelining.Schedule1F1B, "interleaved": pipelining.ScheduleInterleaved1F1B}
    kind = next((kinds[name] for name in args.settings if name in kinds), pipelining.ScheduleGPipe)
    schedule = kind(stages if each > 1 else stages[0], 2, loss_fn=nn.functional.cross_entropy)
    run = resume.init(
        model=modules[0] if "module" in args.settings else stages if each > 1 else stages[0],
        optimizer=optimizers if each > 1 else optimizers[0],
        scheduler=schedules,
        total_steps=args.steps,
    )
    data: Any = Subset(Images(), range(60))
    generator = torch.Generator().manual_seed(rank if "apart" in args.settings else 5)
    batches: Any
    if "loader" in args.settings:
        batches = run.loader(data, global_batch=GLOBAL_BATCH)
    else:
        own = None if "unseeded" in args.settings else generator
        shuffled = torch.utils.data.DataLoader(data, GLOBAL_BATCH, shuffle=True, drop_last=True, generator=own)
        if "batched" in args.settings:
            sampler = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), GLOBAL_BATCH, drop_last=True)
            shuffled = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        batches = run.wrap(shuffled)
    for _ in run.epochs(-(-args.steps // 5)):
        for index, x, labels in batches:
            remember(args.out / f"seen-{rank}.jsonl", run.steps_done + 1, [(index, x, labels)])
            for optimizer in optimizers:
                optimizer.zero_grad()
            schedule.step(*((x.flatten(1),) if rank == 0 else ()), **({"target": labels} if rank == world - 1 else {}))
            for optimizer, decay in zip(optimizers, schedules, strict=True):
                optimizer.step()
                decay.step()
            run.step()
    run.done()
    return {
        "model": [module.state_dict() for module in modules],
        "optimizer": [optimizer.state_dict() for optimizer in optimizers],
        "scheduler": [one.state_dict() for one in schedules],
        "steps": run.steps_done,
    }


class Layer(nn.Module):
    """A stage, with weights by its number, a buffer of each kind, and random numbers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.linear, self.dropout = nn.LayerNorm(108), nn.Linear(108, 108), nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(108))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta:
            self.calls += 1  # type: ignore[operator]
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  # type: ignore[operator]
        out: torch.Tensor = x + self.dropout(self.linear(torch.relu(self.norm(x)))) + 0.01 * torch.sin(self.mean)
        return out


FRAMEWORKS = {
    "huggingface": huggingface,
    "lightning": lightning,
    "accelerate": accelerate,
    "dcp": dcp,
    "pipeline": pipeline,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--settings", nargs="*", default=[])
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate warns without
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(0)
    np.random.seed(0)
    runs: list[resume.Run] = []
    init = resume.init

    def known(**parts: Any) -> resume.Run:
        runs.append(init(**parts))
        return runs[-1]

    resume.init = known  # type: ignore[assignment]  # the run is the framework's affair, and its promise is looked at
    parts = FRAMEWORKS[args.framework](args)
    parts["generators"] = [torch.get_rng_state(), random.getstate(), *np.random.get_state()[1:]]
    (run,) = runs[-1:]
    told = {"digests": {name: digest(part) for name, part in parts.items()}, "level": run.level.value}
    (args.out / f"result-{rank}.json").write_text(json.dumps({**told, "steps": run.steps_done}))
    if dist.is_initialized():
        dist.destroy_process_group()
