"""One member of a gang: come to the meeting, then exchange with every other member, one at a time."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gpucloud.domain.node.gate.gang import PairSeen, rounds
from gpucloud.domain.node.gate.report import ProbeOrder, Said
from gpucloud.probe import telling
from gpucloud.probe.device import join
from gpucloud.probe.telling import reason, tell

_TIMES = 4
_LOOK_S = 0.05


def run(order: ProbeOrder) -> None:
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
    store = telling.store(order.address, order.port, order.world, is_host, patience, wait_for_workers=False)
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
        time.sleep(_LOOK_S)


def _exchange(order: ProbeOrder, device: torch.device, one: int, other: int) -> bool:
    peer = other if order.rank == one else one
    size = order.megabytes << 20
    mine = torch.full((size,), order.rank % 251, dtype=torch.uint8, device=device)
    theirs = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        _swap(order.rank == one, mine[:8192], theirs[:8192], peer)
        _wait(device)
        started = time.perf_counter()
        for _ in range(_TIMES):
            _swap(order.rank == one, mine, theirs, peer)
        _wait(device)
        gbps = 2 * size * _TIMES / (time.perf_counter() - started) / 1e9
        right = bool((theirs == peer % 251).all())
    except RuntimeError as error:
        tell(Said(pair=PairSeen(one=one, other=other, gbps=None), error=reason(error)))
        return False
    tell(Said(pair=PairSeen(one=one, other=other, gbps=gbps, right=right)))
    return True


def _swap(sends_first: bool, mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:  # noqa: FBT001
    """Both directions, one after the other: two plain calls need a communicator of these two members only."""
    for sends in (sends_first, not sends_first):
        if sends:
            dist.send(mine, peer)
        else:
            dist.recv(theirs, peer)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
