"""One worker for each device of a machine: the device alone, then an all-reduce over all of them."""

from __future__ import annotations

import torch

from gpucloud.domain.gate.probing import ProbeOrder, Said
from gpucloud.domain.gate.report import DeviceProbe, TorchSeen
from gpucloud.probe.collective import join, measure
from gpucloud.probe.device import probe
from gpucloud.probe.telling import reason, tell


def run(order: ProbeOrder) -> None:
    """Say what torch is, what the device does, and how fast all devices add up together (rank 0 says it)."""
    seen = look()
    tell(Said(torch=seen))
    if order.device == "cuda" and (not seen.available or order.rank >= seen.devices):
        return
    device = torch.device(order.device, order.rank) if order.device == "cuda" else torch.device("cpu")
    try:
        tell(Said(probe=probe(device, order.rank)))
    except RuntimeError as error:
        tell(Said(probe=DeviceProbe(index=order.rank, error=reason(error))))
        return
    if order.world > 1:
        join(order, device)
        found = measure(device, order)
        if order.rank == 0:
            tell(Said(collective=found))


def look() -> TorchSeen:
    """Return what this Python's torch is and can use."""
    available = torch.cuda.is_available()
    return TorchSeen(
        version=torch.__version__,
        cuda=torch.version.cuda,
        available=available,
        devices=torch.cuda.device_count() if available else 0,
        error=None if available else _why_not(),
    )


def _why_not() -> str | None:
    """Return what CUDA says when it is used all the same; `is_available` swallows it."""
    if torch.version.cuda is None:
        return None
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return reason(error)
    return None
