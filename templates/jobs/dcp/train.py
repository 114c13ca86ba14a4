"""torchrun --nproc-per-node=2 train.py --steps 200

A trainer in torchtitan's way: its parts have a state each, a checkpointer saves them, and all ranks hold the model
together (FSDP2). A small transformer learns to sort rows of numbers. It may be interrupted at any step: the lines
with `Checkpointer` and `checkpointer` are all that takes, and two of them are there for torchtitan's own as well.
"""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from gpucloud.frameworks.dcp import Checkpointer

NUMBERS, LENGTH = 16, 12


class Rows(torch.utils.data.Dataset):
    """Rows of numbers, as (row, the row in order)."""

    def __len__(self):
        return 2**16

    def __getitem__(self, _index):
        row = torch.randint(NUMBERS, (LENGTH,))  # any generator may be used: each batch finds it seeded
        return row, row.sort().values


class Sorter(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed, self.places = nn.Embedding(NUMBERS, width), nn.Embedding(LENGTH, width)
        layer = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(layers))
        self.head = nn.Linear(width, NUMBERS, bias=False)

    def forward(self, rows):
        x = self.embed(rows) + self.places(torch.arange(LENGTH, device=rows.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trainer:
    def __init__(self, args, mesh):
        self.step, self.steps, self.device = 0, args.steps, torch.device(mesh.device_type)
        random.seed(0)  # a run goes on with what the script has seeded
        np.random.seed(0)
        torch.manual_seed(0)  # the same first weights on every rank: each keeps its part of them
        self.model = Sorter().to(self.device)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        optimizers = [torch.optim.AdamW(self.model.parameters(), lr=3e-3)]
        schedulers = [torch.optim.lr_scheduler.LambdaLR(one, self.share_of_rate) for one in optimizers]
        self.optimizers, self.schedulers = optimizers, schedulers
        rows = Rows()
        self.dataloader = DataLoader(rows, 32 // mesh.size(), sampler=DistributedSampler(rows, shuffle=False))
        self.checkpointer = Checkpointer(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": self},
            total_steps=args.steps,
        )

    def share_of_rate(self, step):
        """Return the part of the learning rate that a step has: it rises for ten steps, then falls."""
        return min((step + 1) / 10, 1 - step / (self.steps + 1))

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])

    def batches(self):
        while True:
            yield from self.dataloader

    def train_step(self, rows, ordered):
        scores = self.model(rows.to(self.device))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), ordered.to(self.device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # the norm over all parts
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return loss.detach()

    def train(self):
        self.checkpointer.load()
        self.dataloader = self.checkpointer.dataloader
        batches = self.batches()
        while self.step < self.steps:
            self.step += 1
            loss = self.train_step(*next(batches))
            if dist.get_rank() == 0 and self.step % 20 == 0:
                print(f"step {self.step} of {self.steps}: loss {loss.item():.3f}", flush=True)
            self.checkpointer.save(self.step, last_step=self.step == self.steps, loss=loss)


def join():
    """Join the other ranks; return the mesh that they make. Without torchrun, this is the only rank."""
    gpu = torch.cuda.is_available()
    if gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism on GPUs asks for
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    torch.set_num_threads(1)  # ranks share the CPU; raise it where they do not
    torch.use_deterministic_algorithms(mode=True)  # so that a resumed run equals an undisturbed one, bit for bit
    return init_device_mesh("cuda" if gpu else "cpu", (dist.get_world_size(),))


def main():
    parser = argparse.ArgumentParser(description="Train a small transformer in torchtitan's way.")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    Trainer(args, join()).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
