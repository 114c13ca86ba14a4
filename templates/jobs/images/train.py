"""torchrun --nproc-per-node=2 train.py --epochs 4

A small ResNet tells shapes apart. DDP, mixed precision, gradient accumulation, batch normalization, augmentation and
an average of the weights: all of it comes back bit for bit after an interruption.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpucloud import resume

KINDS = ("disc", "square", "diamond", "ring")
SIDE = 24  # pixels


class Shapes(torch.utils.data.Dataset):
    """Pictures of one shape each, with its kind; drawn when asked for, the same ones for the same seed."""

    def __init__(self, count, *, seed, augment):
        generator = torch.Generator().manual_seed(seed)  # of its own, so that making a data set disturbs nothing
        self.kinds = torch.randint(len(KINDS), (count,), generator=generator)
        self.places = SIDE / 4 + SIDE / 2 * torch.rand(count, 2, generator=generator)
        self.sizes = SIDE / 8 + SIDE / 8 * torch.rand(count, generator=generator)
        self.colours = 0.3 + 0.7 * torch.rand(count, 3, generator=generator)
        self.augment = augment

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        kind, size = self.kinds[index], self.sizes[index]
        line = torch.arange(SIDE) + 0.5
        down, right = (line[:, None] - self.places[index, 0]).abs(), (line - self.places[index, 1]).abs()
        far = (down**2 + right**2).sqrt()
        inside = (far < size, torch.maximum(down, right) < size, down + right < size, (far - size).abs() < 1.5)[kind]
        picture = inside * self.colours[index][:, None, None]
        grain = torch.Generator().manual_seed(index)
        picture = picture + 0.1 * torch.randn(picture.shape, generator=grain)
        return (augmented(picture) if self.augment else picture), kind


def augmented(picture):
    """Return the picture shifted a little, and perhaps mirrored.

    Draw from whatever generator you like (torch, random, NumPy): `run.loader` seeds all of them for each sample, by
    seed, epoch and index. So what is drawn depends neither on the worker nor on how often the run was interrupted.
    """
    down, right = torch.randint(-2, 3, (2,)).tolist()
    picture = picture.roll((down, right), (1, 2))
    return picture.flip(-1) if torch.rand(()) < 0.5 else picture


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.past = nn.Conv2d(before, after, 1, stride, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x):
        inner = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(inner + self.past(x))


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(64, len(KINDS)),
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
    torch.set_num_threads(1)  # ranks share the CPU; raise it where they do not
    # "Bit for bit" needs kernels that add in the same order each time. Without this line a resumed run is as good, but
    # it is not equal.
    torch.use_deterministic_algorithms(mode=True)
    return device


def precision(wish, device):
    """Return the type to compute in: bfloat16 where the hardware has it, else float16."""
    if wish != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wish]
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def passes(model, images, kinds, dtype, scaler, parts):
    """Make the gradients of a step in `parts` passes, for memory's sake; return the mean loss."""
    total = torch.zeros((), device=images.device)
    pieces = list(zip(images.chunk(parts), kinds.chunk(parts), strict=True))
    for i, (some_images, some_kinds) in enumerate(pieces):
        # DDP adds gradients up over ranks during a backward pass. Only the last one of a step has to.
        waits = i + 1 < len(pieces) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(images.device.type, dtype, enabled=dtype is not torch.float32):
                loss = cross_entropy(model(some_images), some_kinds)
            # Weighed by its samples: chunks of a batch that cannot be split evenly differ in size.
            loss = loss * len(some_kinds) / len(kinds)
            scaler.scale(loss).backward()
        total += loss.detach()
    return total


def train(model, args, device):
    """Train; return the run, which continues where the attempt before was interrupted, and the averaged model."""
    dtype = precision(args.dtype, device)
    dataset = Shapes(args.samples, seed=0, augment=True)
    steps = args.epochs * (len(dataset) // args.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    # float16 has few exponents: the scaler keeps small gradients from vanishing, and its scale is state as well.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    # The average of the weights over the last steps, which is what is used in the end: over ten or so in a run as short
    # as this one; 0.999 or more is usual. Batch normalization's means are averaged with them (use_buffers).
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.decay), use_buffers=True)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model

    # Model, optimizer, scheduler and scaler have names of their own; whatever else has state_dict() and
    # load_state_dict() is handed over under a name of yours, as `average` is here.
    run = resume.init(
        model=parallel, optimizer=optimizer, scheduler=scheduler, scaler=scaler, average=average, total_steps=steps
    )
    for images, kinds in run.loader(dataset, global_batch=args.batch, num_workers=args.workers):
        loss = passes(parallel, images.to(device), kinds.to(device), dtype, scaler, args.parts)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)  # after the optimizer: a save's copy from the GPU is waited for there
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % 10 == 0:
            print(f"step {run.steps_done} of {steps}: loss {loss.item():.3f}", flush=True)
    return run, average


@torch.no_grad()
def accuracy(model, device):
    """Return the share of pictures never seen before that the model tells right."""
    model.eval()
    right = 0
    test = Shapes(512, seed=1, augment=False)
    for images, kinds in torch.utils.data.DataLoader(test, batch_size=128):
        right += (model(images.to(device)).argmax(1).cpu() == kinds).sum().item()
    return right / len(test)


def main():
    parser = argparse.ArgumentParser(description="Train a small ResNet on pictures of shapes.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    # What the learning rate fits to, however many GPUs there are.
    parser.add_argument("--batch", type=int, default=64, help="pictures in a step, over all ranks")
    parser.add_argument("--decay", type=float, default=0.9, help="of the weights' average")
    parser.add_argument("--parts", type=int, default=2, help="passes that make one step (gradient accumulation)")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp16", "fp32"], default="auto")
    args = parser.parse_args()

    device = join()
    torch.manual_seed(0)  # the same first weights on every rank
    model = make_model().to(device)
    run, average = train(model, args, device)
    with run.phase("evaluate"):  # so that nobody takes the pause for a hang
        share, last = accuracy(average, device), accuracy(model, device)
    run.done()

    if run.rank == 0:
        print(f"test accuracy {share:.3f} (without the average {last:.3f})", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
