"""One device at work (right? its memory? its ways?), all devices of a machine, and a member of a gang of machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gpucloud.domain.node.gate.gang import PairFacts, rounds
from gpucloud.domain.node.gate.report import CollectiveProbe, DeviceProbe, ProbeOrder, Said, TorchFacts
from gpucloud.probe import reason, tell, torchrun
from gpucloud.system.processes import try_lock

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GIB = 1 << 30
_FILLED = 0.85  # of the free memory: the driver and other programs keep some
_FILLED_OF_SHARED = 0.25  # where it is the machine's (GB10, Jetson), the kernel ends whoever takes the rest
_COPYING = Path("copying.lock")  # in the folder that the workers of one machine have in common
_TURN_S = 30.0
_LOOK_S = 0.02


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
    with _turn(_COPYING):
        to_device, from_device = _copies(device)
    memory_gbps = _memory_gbps(device)
    free, total = torch.cuda.mem_get_info(device)
    kept, gigabytes = memory_keeps(device, filled(free, shared=_is_shared(device)))
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
        total_mib=total >> 20,
    )


def filled(free: int, *, shared: bool) -> int:
    """Return how many bytes of the free memory are filled; of memory that is the machine's own, a part."""
    return int(free * _FILLED_OF_SHARED) if shared else int(free * _FILLED)


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


def _is_shared(device: torch.device) -> bool:
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", 0))


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait until no other worker is at it: devices below one switch share its way. One that hangs is not waited for."""
    until = time.monotonic() + _TURN_S
    with lock.open("w") as file:
        while not try_lock(file.fileno()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        yield


def _tflops(device: torch.device, multiply: Multiply) -> float:
    """The best of three rounds: whatever else the machine does, a device that is able shows it once."""
    size, times = 8192, 5
    a, b = (torch.randn(size, size, device=device, dtype=torch.float16) for _ in range(2))
    multiply(a, b)
    seconds = min(_seconds(device, lambda: multiply(a, b), times) for _ in range(3))
    return 2 * size**3 * times / seconds / 1e12


def _copies(device: torch.device) -> tuple[float, float]:
    size, times = 1 << 28, 4
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


# An all-reduce over all devices: is the sum right, and how fast is it.


Reduce = Callable[[torch.Tensor], object]

_TIMES = 10


def join(order: ProbeOrder, device: torch.device, store: Store | None = None) -> None:
    """Join the others; through `store` if there is one already. Raises RuntimeError (torch's own kinds of it)."""
    patience = timedelta(seconds=order.patience_s)
    if store is None:
        store = torchrun.store(order.address, order.port, order.world, order.rank == 0, patience)
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


# One worker for each device of a machine: the device alone, then an all-reduce over all of them.


def run(order: ProbeOrder) -> None:
    """Say what torch is, what the device does, and how fast all devices add up together (rank 0 says it)."""
    observed = look()
    tell(Said(torch=observed))
    if order.device == "cuda" and (not observed.available or order.rank >= observed.devices):
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


def look() -> TorchFacts:
    """Return what this Python's torch is and can use."""
    available = torch.cuda.is_available()
    return TorchFacts(
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


# One member of a gang: come to the meeting, then exchange with every other member, one at a time.


_GANG_TIMES = 4
_GANG_LOOK_S = 0.05


def run_gang(order: ProbeOrder) -> None:
    """Say who came (rank 0 does), then every pair that this member is in."""
    device = torch.device("cuda", 0) if order.device == "cuda" else torch.device("cpu")
    try:
        store = _meet(order)
        if store is None:
            return
        join(order, device, PrefixStore("gang", store))
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except RuntimeError as error:
        tell(Said(error=reason(error)))
        return
    for pairs in rounds(order.world):
        mine = next((pair for pair in pairs if order.rank in pair), None)
        if mine is not None and not _exchange(order, device, *mine):
            return


def _meet(order: ProbeOrder) -> Store | None:
    """Return the store at which all met; None when somebody did not come, so that nobody waits for a collective."""
    patience = timedelta(seconds=order.patience_s)
    is_host = order.rank == 0
    store = torchrun.store(order.address, order.port, order.world, is_host, patience, wait_for_workers=False)
    store.set(f"here-{order.rank}", "yes")
    if is_host:
        arrived = _arrived(store, order)
        tell(Said(met=True, arrived=arrived))
        store.set("go", "yes" if len(arrived) == order.world else "no")
        if len(arrived) < order.world:
            time.sleep(1.0)  # the store lives in this process: the others must read its word first
            return None
        return store
    tell(Said(met=True))
    store.wait(["go"], patience + timedelta(seconds=10))
    return store if store.get("go") == b"yes" else None


def _arrived(store: Store, order: ProbeOrder) -> tuple[int, ...]:
    until = time.monotonic() + order.patience_s
    while True:
        here = tuple(rank for rank in range(order.world) if store.check([f"here-{rank}"]))
        if len(here) == order.world or time.monotonic() >= until:
            return here
        time.sleep(_GANG_LOOK_S)


def _exchange(order: ProbeOrder, device: torch.device, one: int, other: int) -> bool:
    peer = other if order.rank == one else one
    size = order.megabytes << 20
    mine = torch.full((size,), order.rank % 251, dtype=torch.uint8, device=device)
    theirs = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        _swap(order.rank == one, mine[:8192], theirs[:8192], peer)
        _wait(device)
        started = time.perf_counter()
        for _ in range(_GANG_TIMES):
            _swap(order.rank == one, mine, theirs, peer)
        _wait(device)
        gbps = 2 * size * _GANG_TIMES / (time.perf_counter() - started) / 1e9
        right = bool((theirs == peer % 251).all())
    except RuntimeError as error:
        tell(Said(pair=PairFacts(one=one, other=other, gbps=None), error=reason(error)))
        return False
    tell(Said(pair=PairFacts(one=one, other=other, gbps=gbps, right=right)))
    return True


def _swap(sends_first: bool, mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:  # noqa: FBT001
    """Both directions, one after the other: two plain calls need a communicator of these two members only."""
    for sends in (sends_first, not sends_first):
        if sends:
            dist.send(mine, peer)
        else:
            dist.recv(theirs, peer)
