"""A training script whose model may be whole, in DDP, sharded by FSDP2 or cut by tensor parallelism (or by both)."""

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume


class Block(nn.Module):
    def __init__(self, width, hidden, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Its rows do not divide by two or three; `scale` has fewer of them than there are ranks."""

    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(checkpoint_wrapper(Block(10, 28, dropout)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 10))
        self.head = nn.Linear(10, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Average:
    """A running mean of the weights, as scripts write it by hand: tensors like the parameters."""

    def __init__(self, model):
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for name, tensor in self.shadow.items():
            tensor.copy_(state["shadow"][name])


def built(way, device, dropout):
    """Return the model as this way has it, and the mesh dimension that batches are split over."""
    torch.manual_seed(0)
    model = Model(dropout).to(device)
    if way == "whole":
        return model, None
    if way == "ddp":
        return DistributedDataParallel(model), None
    world = dist.get_world_size()
    if way == "hybrid":
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replica", "shard"))
        return sharded(model, mesh), None
    data, tensor = {"fsdp": (world, 1), "tp": (1, world), "both": (world // 2, 2)}[way]
    mesh = init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))
    if way != "fsdp":
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], {f"_checkpoint_wrapped_module.{k}": p for k, p in plan.items()})
    return (model if way == "tp" else sharded(model, mesh["data"])), mesh["data"]


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state(model, optimizer, average):
    """Return the tensors of the state, whole, by the names that they have in every way."""
    found = {}
    for (name, parameter), mean in zip(model.named_parameters(), average.shadow.values(), strict=True):
        kept = optimizer.state[parameter]
        parts = {
            "weight": parameter,
            "mean": mean,
            **{key: kept[key] for key in ("step", "exp_avg", "exp_avg_sq") if kept},
        }
        for kind, part in parts.items():
            whole = part.full_tensor() if hasattr(part, "full_tensor") else part
            found[f"{kind} {name.removeprefix('module.')}"] = whole.detach().cpu().clone()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--way", default="fsdp")
    parser.add_argument("--die-at", type=int, default=0, help="the last rank kills itself in this step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if args.way != "whole":
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if args.way != "whole" else (0, 1)
    model, over = built(args.way, args.device, args.dropout)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "lr": 2e-3}],
        lr=3e-3,
        foreach=False,  # on GPUs it would put whole tensors and those in parts into one call, which torch refuses
    )
    average = Average(model.module if args.way == "ddp" else model)
    run = resume.init(model=model, optimizer=optimizer, total_steps=args.steps, seed=3, average=average)
    started, first = run.steps_done, state(model, optimizer, average)
    data = torch.utils.data.TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(5)))
    losses = []
    for (x,) in run.loader(data, global_batch=12, over=over):
        right = (x[:, :3] > 0.3).float().to(args.device)
        loss = nn.functional.cross_entropy(model(x.to(args.device)), right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        if run.steps_done + 1 == args.die_at:
            run._decider.settle()
            if rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        mean = loss.detach().clone()
        if args.way != "whole":
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
        run.step(loss=loss)
    run.done()
    last = state(model, optimizer, average)
    digest = hashlib.sha256()
    for tensor in [*last.values(), torch.get_rng_state()]:
        digest.update(tensor.numpy().tobytes())
    if rank == 0:
        torch.save([first, last], args.out / "states.pt")
    result = {"digest": digest.hexdigest(), "started": started, "level": run.level.value, "losses": losses}
    (args.out / f"result-{rank}.json").write_text(json.dumps(result))
    if args.way != "whole":
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
