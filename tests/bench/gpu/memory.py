"""torchrun --nproc-per-node=2 -m tests.bench.gpu.memory

A few steps of GPTs by AdamW in bf16, whole on each GPU and sharded, activations kept and recomputed. Rank 0 prints a
line `MEASURED {…}` for each: what the GPU held at the most, everything on it counted, and what the plan says of it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpucloud.domain.job.spec import Model, Strategy
from gpucloud.domain.market.sizing import memory
from tests.bench.gpu.train import WORDS, Gpt, device_of, meanwhile

SHAPES = ((1024, 24, 8, 1024), (2048, 24, 4, 2048))  # width, layers, sequences a GPU, their length
STEPS = 3


class Recomputing(Gpt):
    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    device = device_of()
    dist.init_process_group("nccl")
    for shape, strategy, recompute in itertools.product(SHAPES, Strategy, (False, True)):
        held, params = trained(device, shape, strategy, recompute=recompute)
        width, layers, batch, length = shape
        model = Model(
            params=params,
            strategy=strategy,
            seq=length,
            batch=batch,
            hidden=width,
            layers=layers,
            vocab=WORDS,
            recompute=recompute,
        )
        told = memory(model, dist.get_world_size())
        if dist.get_rank() == 0:
            found = {"what": f"{params / 1e6:.0f}m_{strategy.value}{'_recomputed' if recompute else ''}", **held}
            print("MEASURED", json.dumps({**found, "planned": told.total, "plan": str(told)}), flush=True)
    dist.destroy_process_group()


def trained(device, shape, strategy, *, recompute):
    """Return in bytes what was held at the most, and of that by tensors; and the number of parameters."""
    width, layers, batch, length = shape
    torch.cuda.reset_peak_memory_stats(device)
    with device:
        model = (Recomputing if recompute else Gpt)(width, layers)
    params = sum(parameter.numel() for parameter in model.parameters())
    if strategy is Strategy.FSDP:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index])
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (batch, length + 1), device=device)
        with meanwhile(device):
            loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    beside = (
        total - free - torch.cuda.memory_reserved(device)
    )  # CUDA's own and NCCL's, which the allocator does not know
    held = {
        "held": torch.cuda.max_memory_reserved(device) + beside,
        "tensors": torch.cuda.max_memory_allocated(device),
        "beside": beside,
    }
    del model, optimizer, loss, words
    gc.collect()
    torch.cuda.empty_cache()
    return held, params


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
