"""A training script with everything that makes exact resume hard; prints nothing, writes what the test compares."""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume


class Noisy(torch.utils.data.Dataset):
    """Samples that are changed by draws from three generators."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(96, 16, generator=generator)
        self.y = (self.x[:, :4].sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(16) + 0.1 * np.random.randn() + random.gauss(0, 0.1)
        return self.x[index] + noise.float(), self.y[index]


class Model(nn.Module):
    """Registered in another order than it is used, with a buffer that `state_dict` leaves out."""

    def __init__(self):
        super().__init__()
        self.head, self.second = nn.Linear(64, 2), nn.Linear(64, 64)
        self.norm, self.first, self.third = nn.BatchNorm1d(64), nn.Linear(16, 64), nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        x = nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training)
        x = torch.relu(self.third(torch.relu(self.second(x))))
        return self.head(x) * (1 + 0.01 * torch.sin(self.calls))


class Losses:
    """Any object with state_dict() is part of the state."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in every step")
    parser.add_argument("--die-at", type=int, default=0, help="the last rank kills itself in this step")
    parser.add_argument("--hold-at", type=int, default=0, help="in this step make OUT/held-<rank>, wait for OUT/go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model()) if distributed else Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    losses = Losses()
    run = resume.init(
        model=model, optimizer=optimizer, scheduler=scheduler, total_steps=args.steps, seed=3, losses=losses
    )
    started = run.steps_done
    torch.rand(3 + 5 * started)  # what a script draws before its loop must not matter
    for x, y in run.loader(Noisy(), global_batch=12, num_workers=args.workers):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.seen.append(loss.item())
        if run.steps_done + 1 == args.die_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(args.pause)
        if run.steps_done + 1 == args.hold_at:
            (args.out / f"held-{rank}").touch()
            while not (args.out / "go").exists():
                time.sleep(0.002)
        run.step(loss=loss)
    run.done()
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), torch.tensor(losses.seen), torch.get_rng_state()]:
        digest.update(tensor.numpy().tobytes())
    result = {"digest": digest.hexdigest(), "started": started, "level": run.level.value, "losses": losses.seen}
    (args.out / f"result-{rank}.json").write_text(json.dumps(result))
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
