"""torchrun --nproc-per-node=2 train.py --steps 600

A small GPT learns to write plays, character by character, and may be interrupted at any step.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume

BATCH = 32  # windows in a step, over all ranks
WINDOW = 64  # characters
WIDTH, HEADS, LAYERS = 64, 4, 4


class Windows(torch.utils.data.Dataset):
    """Every window of the text, as (characters, the characters that follow them)."""

    def __init__(self, text, alphabet):
        self.codes = torch.tensor([alphabet.index(character) for character in text])

    def __len__(self):
        return len(self.codes) - WINDOW

    def __getitem__(self, index):
        window = self.codes[index : index + WINDOW + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.attend(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class CharGPT(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, codes):
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.blocks(self.embed(codes) + self.place(places)))

    @torch.no_grad()
    def write(self, codes, count):
        """Return `codes` with `count` characters more, each drawn from what the model expects."""
        for _ in range(count):
            expected = self(codes[:, -WINDOW:])[:, -1].softmax(-1)
            codes = torch.cat([codes, torch.multinomial(expected, 1)], dim=1)
        return codes


def join():
    """Join the other ranks, if torchrun started this one; return the device to train on."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    return device


def train(model, dataset, steps, device):
    """Train, and return the run: it continues where the attempt before was interrupted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    run = resume.init(model=model, optimizer=optimizer, scheduler=scheduler, total_steps=steps)
    for codes, following in run.loader(dataset, global_batch=BATCH):
        expected = model(codes.to(device))
        loss = cross_entropy(expected.flatten(0, 1), following.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % 50 == 0:
            print(f"step {run.steps_done} of {steps}: loss {loss.item():.3f}", flush=True)
    return run


def main():
    parser = argparse.ArgumentParser(description="Train a small character-level GPT.")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    device = join()
    text = Path(__file__).with_name("plays.txt").read_text()
    alphabet = "".join(sorted(set(text)))
    torch.manual_seed(0)
    model = CharGPT(len(alphabet)).to(device)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    run = train(parallel, Windows(text, alphabet), args.steps, device)
    run.done()

    if run.rank == 0:
        model.eval()
        start = torch.tensor([[alphabet.index("\n")]], device=device)
        written = model.write(start, 300)[0].tolist()
        print("".join(alphabet[code] for code in written), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
