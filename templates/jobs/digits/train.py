"""torchrun --nproc-per-node=2 train.py --epochs 15

A small CNN learns handwritten digits, and may be interrupted at any step: the lines with `run` are all that takes.
"""

import argparse
import gzip
import hashlib
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume

BATCH = 64  # samples in a step, over all ranks


class Digits(torch.utils.data.Dataset):
    """8 × 8 images in 0..1 with their digits; every fifth is kept for the test."""

    def __init__(self, *, test: bool):
        with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
            rows = [[float(cell) for cell in line.split(",")] for i, line in enumerate(file) if (i % 5 == 0) == test]
        table = torch.tensor(rows)
        self.images = table[:, :64].reshape(-1, 1, 8, 8) / 16
        self.digits = table[:, 64].long()

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        # Any generator may be used here: each sample finds them seeded by seed, epoch and index.
        shift = random.randint(-1, 1), random.randint(-1, 1)
        return self.images[index].roll(shift, (1, 2)), self.digits[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def join():
    """Join the other ranks, if torchrun started this one; return the device to train on."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism on GPUs asks for
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    return device


def train(model, epochs, device):
    """Train, and return the run: it continues where the attempt before was interrupted."""
    dataset = Digits(test=False)
    epoch_steps = len(dataset) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * epoch_steps)
    run = resume.init(model=model, optimizer=optimizer, scheduler=scheduler, total_steps=epochs * epoch_steps)
    for images, digits in run.loader(dataset, global_batch=BATCH):
        loss = cross_entropy(model(images.to(device)), digits.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % epoch_steps == 0:
            print(f"epoch {run.epoch + 1} of {epochs}: loss {loss.item():.4f}", flush=True)
    return run


@torch.no_grad()
def accuracy(model, device):
    """Return the share of test digits that the model tells right."""
    model.eval()
    test = Digits(test=True)
    return (model(test.images.to(device)).argmax(1).cpu() == test.digits).float().mean().item()


def fingerprint(model):
    """Return a hash of all weights: two runs that print the same one are equal bit for bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    device = join()
    torch.manual_seed(0)
    model = make_model().to(device)
    run = train(DistributedDataParallel(model) if dist.is_initialized() else model, args.epochs, device)
    with run.phase("evaluate"):
        share = accuracy(model, device)
    run.done()

    if run.rank == 0:
        print(f"test accuracy {share:.4f}")
        print(f"weights sha256 {fingerprint(model)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
