"""torchrun --nproc-per-node=4 train.py --steps 100 --together 2

A GPT in two dimensions: `--together` ranks compute every layer (tensor and sequence parallel), and over as many such
groups as there are, data and state are divided (FSDP2).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gpucloud import resume

VOCABULARY = 64
CONTEXT = 32  # tokens in a window; a multiple of --together


class Countings(torch.utils.data.Dataset):
    """Windows in which every token is the one before plus a stride, as (tokens, the tokens that follow them)."""

    def __len__(self):
        return 4096

    def __getitem__(self, _index):
        first, stride = torch.randint(1, VOCABULARY, (2,))  # the same ones for the same index: `run.loader` sees to it
        window = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
        return window[:-1], window[1:]


def rotated(x):
    """Return queries or keys (batch, head, place, feature) turned by an angle that tells their place (RoPE)."""
    length, features = x.shape[-2:]
    speeds = 10_000 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.features = width // heads
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.value, self.join = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        # Each rank has some of the heads, so their number is left open (-1).
        query, key, value = (
            part(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.join(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Where each layer's matrix is cut. The first one of a pair by columns (each rank makes some heads, or some features of
# the MLP), the second by rows (each rank makes a part of the sum), so that ranks talk only at the pair's ends: parts
# are added up there, and at once spread along the sequence (Shard(1)), where norms and residuals are computed.
WHOLE_SEQUENCE = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
BLOCK = {
    "before_attention": SequenceParallel(),
    "attention": WHOLE_SEQUENCE,
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.join": RowwiseParallel(output_layouts=Shard(1)),
    "before_mlp": SequenceParallel(),
    "mlp": WHOLE_SEQUENCE,
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def join(together):
    """Join the other ranks; return the mesh: groups that have data of their own, by ranks that compute together."""
    gpu = torch.cuda.is_available()
    if gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism on GPUs asks for
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_num_threads(1)  # ranks share the CPU; raise it where they do not
    # With it a resumed run equals, bit for bit, one that was never interrupted. Without it attention's backward pass
    # is a little quicker on GPUs, and two runs differ, interrupted or not.
    torch.use_deterministic_algorithms(mode=True)
    shape = (dist.get_world_size() // together, together)
    return init_device_mesh("cuda" if gpu else "cpu", shape, mesh_dim_names=("data", "tensor"))


def make_model(args, mesh):
    """Return the model, cut over the ranks that compute together, and divided over the groups."""
    torch.manual_seed(0)  # the same first weights on every rank: each keeps its part of them
    model = GPT(args.layers, args.width, args.heads).to(mesh.device_type)
    parallelize_module(model, mesh["tensor"], ENDS)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], BLOCK)
    # Tensor parallel first, FSDP around it: what is gathered are a rank's parts of a layer. With a single group it
    # divides nothing, and is there for its bfloat16 policy.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def train(model, args, mesh):
    """Train, and return the run: it continues where the attempt before was interrupted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = resume.init(model=model, optimizer=optimizer, total_steps=args.steps)
    # Ranks that compute a layer together need the same samples (and would need the same dropout): only ranks along
    # "data" get samples of their own.
    for tokens, following in run.loader(Countings(), global_batch=args.batch, over=mesh["data"]):
        expected = model(tokens.to(mesh.device_type))
        loss = cross_entropy(expected.flatten(0, 1).float(), following.to(mesh.device_type).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if run.rank == 0 and run.steps_done % 10 == 0:
            print(f"step {run.steps_done} of {args.steps}: loss {loss.item():.3f}", flush=True)
    return run


def main():
    parser = argparse.ArgumentParser(description="Train a GPT whose layers several ranks compute together.")
    parser.add_argument("--together", type=int, default=2, help="ranks that compute a layer; it divides --heads")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="windows in a step, over all ranks")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    mesh = join(args.together)
    model = make_model(args, mesh)
    run = train(model, args, mesh)
    run.done()
    if run.rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        whole = sum(parameter.numel() for parameter in model.parameters())
        print(f"{held} of {whole} parameters on this rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
