"""An all-reduce over all devices: is the sum right, and how fast is it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gpucloud.domain.gate.probing import ProbeOrder
from gpucloud.domain.gate.report import CollectiveProbe
from gpucloud.probe import rendezvous
from gpucloud.probe.telling import reason

Reduce = Callable[[torch.Tensor], object]

_TIMES = 10


def join(order: ProbeOrder, device: torch.device, store: Store | None = None) -> None:
    """Join the others; through `store` if there is one already. Raises RuntimeError (torch's own kinds of it)."""
    patience = timedelta(seconds=order.patience_s)
    if store is None:
        store = rendezvous.store(order.address, order.port, order.world, order.rank == 0, patience)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=order.rank,
        world_size=order.world,
        timeout=patience,
    )


def measure(device: torch.device, order: ProbeOrder, reduce: Reduce = dist.all_reduce) -> CollectiveProbe:
    """Return how an all-reduce over everybody went; what torch raises is in `error`."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        right = sum_is_right(device, order, reduce)
        busbw = _busbw_gbps(device, order, reduce)
    except RuntimeError as error:
        return CollectiveProbe(backend=backend, ranks=order.world, error=reason(error))
    return CollectiveProbe(backend=backend, ranks=order.world, right=right, megabytes=order.megabytes, busbw_gbps=busbw)


def sum_is_right(device: torch.device, order: ProbeOrder, reduce: Reduce) -> bool:
    """Return whether whole numbers of every rank add up on all of them: (0 + … + n − 1) × position."""
    positions = torch.arange(1 << 20, device=device, dtype=torch.float32) % 1000
    mine = positions * order.rank
    reduce(mine)
    wrong = (mine != positions * (order.world * (order.world - 1) // 2)).any().float()
    dist.all_reduce(wrong)  # what one rank got wrong, all must tell
    return wrong.item() == 0


def _busbw_gbps(device: torch.device, order: ProbeOrder, reduce: Reduce) -> float:
    """Bus bandwidth as nccl-tests reckons it (PERFORMANCE.md): bytes / seconds × 2(n − 1)/n."""
    size = order.megabytes << 20
    message = torch.ones(size // 4, device=device)
    for _ in range(2):
        reduce(message)
    _wait(device)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_TIMES):
        reduce(message)
    _wait(device)
    seconds = (time.perf_counter() - started) / _TIMES
    return size / seconds / 1e9 * 2 * (order.world - 1) / order.world


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
