"""torchrun --nproc-per-node=2 train.py --epochs 10

A loop over Hugging Face's Accelerate, in which a small network tells spirals apart; each step is made of two batches.
It may be interrupted at any step: the four lines with `resumable` and `run` are all that takes.
"""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from gpucloud.frameworks.accelerate import resumable


class Spirals(torch.utils.data.Dataset):
    """Points on two spirals, each moved a little by two of torch's random numbers."""

    def __init__(self, count, *, seed):
        self.turns = torch.rand(count, generator=torch.Generator().manual_seed(seed))
        self.arms = torch.arange(count) % 2

    def __len__(self):
        return len(self.turns)

    def __getitem__(self, index):
        turn, arm = self.turns[index], self.arms[index]
        angle = 4 * math.pi * turn.sqrt() + math.pi * arm
        point = turn.sqrt() * torch.stack([angle.cos(), angle.sin()])
        return point + 0.02 * torch.randn(2), arm  # any generator may be used: each batch finds it seeded


@torch.no_grad()
def accuracy(accelerator, model, loader):
    """Return the share of points that the model tells right, over all ranks."""
    model.eval()
    right = [accelerator.gather_for_metrics(model(points).argmax(1) == arms) for points, arms in loader]
    model.train()
    return torch.cat(right).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train a small network with Accelerate.")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(0)  # of Python and NumPy too: a run goes on with what the script has seeded
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = torch.utils.data.DataLoader(Spirals(4096, seed=0), batch_size=32, shuffle=True)
    held_out = torch.utils.data.DataLoader(Spirals(512, seed=1), batch_size=64)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    accelerator.register_for_checkpointing(scheduler)

    run, loader = resumable(accelerator, model, loader)
    for epoch in run.epochs(args.epochs):
        for points, arms in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(points), arms))
                optimizer.step()
                optimizer.zero_grad()
        share = accuracy(accelerator, model, held_out)
        scheduler.step()
        accelerator.print(f"epoch {epoch + 1} of {args.epochs}, step {run.steps_done}: {share:.4f} are told right")
    run.done()
    accelerator.end_training()


if __name__ == "__main__":
    main()
