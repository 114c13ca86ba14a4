"""torchrun --nproc-per-node=2 train.py --steps 200 --width 1024

A GPT under DDP and bf16 autocast, for measurements on GPUs (without one, over gloo): it prints tokens a second, and a
hash of weights and optimizer.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume

WORDS, HEAD = 50304, 64
UNMEASURED = 20  # steps before the clock starts: allocator, kernels and bucket order settle


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // HEAD
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        return self.head(self.blocks(self.embed(words)))


class Noise(torch.utils.data.Dataset):
    """Sequences of random words, each a function of its index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randint(0, WORDS, (self.length + 1,), generator=torch.Generator().manual_seed(index))


def tensors_of(model, optimizer):
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*model.state_dict().values(), *(value for value in moments if torch.is_tensor(value))]


def fingerprint(model, optimizer):
    digest = hashlib.sha256()
    for tensor in tensors_of(model, optimizer):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def device_of():
    """This rank's GPU, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def wrapped(model, device):
    return DistributedDataParallel(model.to(device), device_ids=[device.index] if device.type == "cuda" else None)


def settle(device):
    """Wait for what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def meanwhile(device):
    return torch.autocast(device.type, torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description="Train a GPT on noise and tell how fast.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="sequences a GPU and step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--exact", action="store_true", help="deterministic kernels, slower")
    args = parser.parse_args()

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = device_of()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.use_deterministic_algorithms(mode=args.exact)
    torch.manual_seed(0)
    model = wrapped(Gpt(args.width, args.layers), device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    run = resume.init(model=model, optimizer=optimizer, total_steps=args.steps)
    began, began_at = 0, 0.0
    for batch in run.loader(Noise(args.length), global_batch=args.batch * dist.get_world_size(), num_workers=2):
        words = batch.to(device, non_blocking=True)
        with meanwhile(device):
            loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if run.steps_done == UNMEASURED:
            settle(device)
            began, began_at = run.steps_done, time.perf_counter()
    settle(device)
    took = time.perf_counter() - began_at
    run.done()
    if run.rank == 0:
        tokens = (run.steps_done - began) * args.batch * args.length * dist.get_world_size()
        if began:
            print(f"tokens_per_s {tokens / took:.0f}", flush=True)
        print(f"state sha256 {fingerprint(model.module, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
