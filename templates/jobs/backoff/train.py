"""torchrun --nproc-per-node=2 train.py --steps 60 --pretend 12

A network learns to take noise out of pictures, with as many samples at once as the GPU's memory holds.
`--pretend 12` shows on any machine what happens: the last rank acts as if 13 samples did not fit.
"""

import argparse
import os

import torch
import torch.distributed as dist
from microbatch import MicroBatch
from torch import nn
from torch.nn.functional import mse_loss

from gpucloud import resume


class Waves(torch.utils.data.Dataset):
    """Pictures of a wave each, with noise and without."""

    def __init__(self, count, side):
        generator = torch.Generator().manual_seed(0)
        self.waves = torch.rand(count, 3, generator=generator)
        self.side = side

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        down, right, phase = self.waves[index]
        line = torch.linspace(0, 12, self.side)
        clean = torch.sin(line[:, None] * down + line * right + 6 * phase)[None]
        return clean + 0.5 * torch.randn_like(clean), clean


def make_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Conv2d(width, 1, 5, padding=2),
    )


def join():
    """Join the other ranks, if torchrun started this one; return the device to train on."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    return device


def train(model, args, device):
    """Train; return the run, which continues where the attempt before was interrupted, and the samples at once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # It takes the module itself, not DistributedDataParallel. DDP's backward pass waits for the other ranks, and a rank
    # that ran out of memory in the middle never comes: they would wait until a timeout ends the job. Here ranks agree
    # that all came through, and only then average their gradients. What that costs: the averaging no longer runs
    # beside the backward pass. With gradient accumulation most of it would not anyway.
    micro = MicroBatch(model)
    # It has state, so it is part of the checkpoint: floating point sums depend on how samples are grouped, and only
    # with the same groups is a resumed run equal to the bit.
    run = resume.init(model=model, optimizer=optimizer, micro=micro, total_steps=args.steps)

    def loss_of(part):
        noisy, clean = (tensor.to(device) for tensor in part)
        if args.pretend and run.rank == args.worst and len(noisy) > args.pretend:
            raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")
        with torch.autocast(device.type, torch.bfloat16):
            return mse_loss(model(noisy).float(), clean)

    for batch in run.loader(Waves(2048, args.side), global_batch=args.batch):
        # Parts of the batch, one after the other. When memory runs out on any rank, the step begins anew on all of
        # them with parts of half the size: the same samples, the same dropout, the same optimizer step.
        loss = micro.backward(batch, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % 10 == 0:
            print(f"step {run.steps_done} of {args.steps}: loss {loss.item():.4f}", flush=True)
    return run, micro


def main():
    parser = argparse.ArgumentParser(description="Train with as many samples at once as there is memory for.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="samples in a step, over all ranks")
    parser.add_argument("--side", type=int, default=24, help="of a picture, in pixels: memory grows with its square")
    parser.add_argument("--width", type=int, default=16, help="channels: memory grows with them")
    parser.add_argument("--pretend", type=int, default=0, help="act as if no more samples fitted on the last rank")
    args = parser.parse_args()

    device = join()
    args.worst = dist.get_world_size() - 1 if dist.is_initialized() else 0
    torch.manual_seed(0)
    run, micro = train(make_model(args.width).to(device), args, device)
    run.done()

    if run.rank == 0:
        print(f"{micro.size} samples at once on each rank, {args.batch} in a step", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
