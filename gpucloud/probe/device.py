"""One device at work: does it compute right, does its memory keep what it is given, how fast are its ways."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpucloud.domain.gate.report import DeviceProbe

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GIB = 1 << 30
_FILLED = 0.85  # of the free memory: the driver and other programs keep some


def probe(device: torch.device, index: int, multiply: Multiply = torch.matmul) -> DeviceProbe:
    """Return what the device does. Raises RuntimeError where it refuses to work."""
    if device.type == "cpu":
        right, _ = product_is_right(device, 512, multiply)
        kept, gigabytes = memory_keeps(device, 1 << 26)
        again = is_repeatable(device, 256, torch.float32, multiply)
        return DeviceProbe(index=index, right=right, repeatable=again, memory_right=kept, memory_gb=gigabytes)
    torch.cuda.set_device(device)
    right, _ = product_is_right(device, 4096, multiply)
    again = is_repeatable(device, 4096, torch.float16, multiply)
    tflops = _tflops(device, multiply)
    to_device, from_device = _copies(device)
    memory_gbps = _memory_gbps(device)
    kept, gigabytes = memory_keeps(device, int(torch.cuda.mem_get_info(device)[0] * _FILLED))
    return DeviceProbe(
        index=index,
        right=right,
        repeatable=again,
        memory_right=kept,
        memory_gb=gigabytes,
        tflops=tflops,
        to_device_gbps=to_device,
        from_device_gbps=from_device,
        memory_gbps=memory_gbps,
    )


def product_is_right(device: torch.device, size: int, multiply: Multiply) -> tuple[bool, torch.Tensor]:
    """Return whether C = A·B, by Freivalds: C·x = A·(B·x) on the host, exact because all are small whole numbers.

    The numbers are -2 to 2, so that even TF32 and fp16 factors are exact and sums stay below 2^24.
    """
    a, b = (torch.randint(-2, 3, (size, size), generator=_seeded(seed)).float() for seed in (1, 2))
    c = multiply(a.to(device), b.to(device)).cpu()
    x = torch.randint(-2, 3, (size,), generator=_seeded(3)).double()
    return bool(torch.equal(c.double() @ x, a.double() @ (b.double() @ x))), c


def is_repeatable(device: torch.device, size: int, kind: torch.dtype, multiply: Multiply) -> bool:
    """Return whether the same product gives the same bits twice."""
    a, b = (torch.randn(size, size, generator=_seeded(seed)).to(device, kind) for seed in (4, 5))
    return bool(torch.equal(multiply(a, b), multiply(a, b)))


def memory_keeps(device: torch.device, size: int) -> tuple[bool, float]:
    """Return whether memory gives back what was written to `size` bytes of it, and how many GB that were."""
    chunk = min(_GIB, size)
    count = max(1, size // chunk)
    chunks = [
        torch.full((chunk // 4,), 0x5A5A0000 + number, dtype=torch.int32, device=device) for number in range(count)
    ]
    kept = all(bool((held == 0x5A5A0000 + number).all()) for number, held in enumerate(chunks))
    return kept, count * chunk / 1e9


def _tflops(device: torch.device, multiply: Multiply) -> float:
    size, times = 8192, 5
    a, b = (torch.randn(size, size, device=device, dtype=torch.float16) for _ in range(2))
    multiply(a, b)
    return 2 * size**3 * times / _seconds(device, lambda: multiply(a, b), times) / 1e12


def _copies(device: torch.device) -> tuple[float, float]:
    size, times = 1 << 28, 10
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    there.copy_(here)
    to = _seconds(device, lambda: there.copy_(here, non_blocking=True), times)
    back = _seconds(device, lambda: here.copy_(there, non_blocking=True), times)
    return size * times / to / 1e9, size * times / back / 1e9


def _memory_gbps(device: torch.device) -> float:
    """A copy within the device reads and writes every byte."""
    size, times = _GIB, 10
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    b.copy_(a)
    return 2 * size * times / _seconds(device, lambda: b.copy_(a), times) / 1e9


def _seconds(device: torch.device, work: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
