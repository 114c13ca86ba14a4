"""torchrun --nproc-per-node=2 train.py --steps 150 --recompute

A GPT whose state is divided over all ranks: FSDP2 in bfloat16, activation checkpointing, torch.compile.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gpucloud import resume


class Windows(torch.utils.data.Dataset):
    """Stretches of a long text of tokens, as (tokens, the tokens that follow them).

    The text is tokens.bin in the folder of the job's data, mapped into memory: never read as a whole. Without it, an
    invented language in which most words have one successor, so that there is something to learn.
    """

    def __init__(self, vocabulary, context):
        self.context = context
        file = Path(os.environ.get("GPUCLOUD_DATA", ".")) / "tokens.bin"
        if file.exists():
            self.tokens = torch.from_file(str(file), size=file.stat().st_size // 2, dtype=torch.uint16)
            return
        generator = torch.Generator().manual_seed(0)
        successor = torch.randperm(vocabulary, generator=generator).tolist()
        strays = torch.randint(10 * vocabulary, (100_000,), generator=generator).tolist()
        words = [0]
        for stray in strays:
            words.append(stray if stray < vocabulary else successor[words[-1]])
        self.tokens = torch.tensor(words)

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index):
        begin = index * self.context
        window = self.tokens[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


def rotated(x):
    """Return queries or keys (batch, head, place, feature) turned by an angle that tells their place (RoPE)."""
    length, features = x.shape[-2:]
    speeds = 10_000 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        width = args.width
        self.heads, self.recompute = args.heads, args.recompute
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        # Activation checkpointing: what is inside is forgotten, and computed again in the backward pass. A third more
        # computing, and memory for the ends of blocks only. Dropout's generator is wound back for the second time.
        # Called here, inside of what FSDP wraps: outside, the weights would be gathered once more as well.
        if self.recompute and self.training:
            return checkpoint(self.through, x, use_reentrant=False)
        return self.through(x)

    def through(self, x):
        batch, length, width = x.shape
        heads = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.dropout(self.join(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def join():
    """Join the other ranks; return the mesh that they make. Without torchrun, this is the only rank."""
    gpu = torch.cuda.is_available()
    if gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism on GPUs asks for
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
    else:
        dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)  # ranks share the CPU; raise it where they do not
    # With it a resumed run equals, bit for bit, one that was never interrupted. Without it attention's backward pass
    # is a little quicker on GPUs, and two runs differ, interrupted or not.
    torch.use_deterministic_algorithms(mode=True)
    return init_device_mesh("cuda" if gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def make_model(args, mesh):
    """Return the model, divided over the mesh."""
    # The same first weights on every rank, so on any number of ranks. They are made on the CPU and move to the GPU part
    # by part: the whole model never has to fit there. (One that does not fit into a node's memory either is made on
    # the meta device: https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.)
    torch.manual_seed(0)
    model = GPT(args)
    if args.compile:
        for block in model.blocks:
            # Block by block: compiled once for all of them, and what FSDP does in between stays outside. Put in place
            # of `forward`, it leaves the parameters' names as they are: the checkpoint fits with and without.
            block.forward = torch.compile(block.forward)
    # Weights are kept in float32, one shard on each rank; a block's are gathered just before it is computed, in
    # bfloat16. Gradients are added up over ranks in float32. No scaler: bfloat16 has float32's exponents.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def compile_now(model, args, device):
    """Have the blocks compiled, with tokens of the step's shape.

    Not in the first step, since the compiler draws random numbers when it tries kernels. Before the loop that does not
    matter: the loop finds all generators as the last step before it left them.
    """
    share = args.batch // dist.get_world_size(), args.context
    model(torch.zeros(share, dtype=torch.long, device=device)).float().mean().backward()
    model.zero_grad()


def train(model, args, device):
    """Train, and return the run: it continues where the attempt before was interrupted."""
    # Made after `fully_shard`, so that it keeps state for this rank's shards alone.
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps, pct_start=0.1)
    if args.compile:
        compile_now(model, args, device)
    run = resume.init(model=model, optimizer=optimizer, scheduler=scheduler, total_steps=args.steps)
    for tokens, following in run.loader(Windows(args.vocabulary, args.context), global_batch=args.batch):
        expected = model(tokens.to(device))
        loss = cross_entropy(expected.flatten(0, 1).float(), following.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % 10 == 0:
            print(f"step {run.steps_done} of {args.steps}: loss {loss.item():.3f}", flush=True)
    return run


def main():
    parser = argparse.ArgumentParser(description="Train a GPT with its state divided over all ranks.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32, help="windows in a step, over all ranks")
    parser.add_argument("--context", type=int, default=32, help="tokens in a window")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--recompute", action="store_true", help="checkpoint activations: less memory, more computing")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: quicker after a minute")
    args = parser.parse_args()

    mesh = join()
    model = make_model(args, mesh)
    run = train(model, args, torch.device(mesh.device_type))
    run.done()
    if run.rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        whole = sum(parameter.numel() for parameter in model.parameters())
        print(f"{held} of {whole} parameters on this rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
