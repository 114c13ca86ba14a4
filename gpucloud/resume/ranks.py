"""The ranks of this attempt: how they come together and talk beside the training traffic."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpucloud.domain.errors import UsageError

_TIMEOUT = timedelta(days=1)  # one rank may evaluate for hours while the others wait


class Ranks:
    """This process among `world`. Every method with a result is called by all ranks, in the same order.

    `device` is this rank's GPU where the training group talks between GPUs, else the CPU.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.device = torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._store: Any = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "this is one of several ranks, but there is no process group",
                hint="call torch.distributed.init_process_group() before gpucloud.resume.init()",
            )
        if self.world > 1:
            # A group of both kinds says nothing of where the script trains.
            if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def highest(self, *numbers: int) -> tuple[int, ...]:
        """Return, for each place, the highest number that any rank gave."""
        if self._group is None:
            return numbers
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(values.tolist())

    def shared(self, data: bytes) -> bytes:
        """Return rank 0's bytes."""
        (size,) = self.highest(len(data) if self.rank == 0 else 0)
        if self._group is None or size == 0:
            return data if self.rank == 0 else b""
        values = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0:
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(values, src=0, group=self._group)
        return _bytes(values)

    def gathered(self, data: bytes) -> tuple[bytes, ...]:
        """Return every rank's bytes, in the order of ranks."""
        if self._group is None:
            return (data,)
        (size,) = self.highest(len(data) + 8)
        padded = torch.frombuffer(bytearray(len(data).to_bytes(8, "big") + data).ljust(size, b"\0"), dtype=torch.uint8)
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self._group)
        return tuple(_unpadded(_bytes(part)) for part in parts)

    def meeting(self, name: str) -> Meeting | None:
        """Return the occasion of that name, the same for all ranks of this attempt; None where they have no store."""
        if self._group is not None and self._store is None:
            self._store = _own_store()
            if self._store is None:
                return None
        return Meeting(f"gpucloud-{name}", self.world, self._store)

    def close(self) -> None:
        """Give the side group back; every rank must have come here."""
        if self._group is not None:
            self.highest(0)
            dist.destroy_process_group(self._group)
            self._group = None


def _own_store() -> Any:
    """Return the store at which the ranks found each other, by a line of its own where this torch can make one.

    Its own, because the script may wait at the other for long. None where this torch has it elsewhere.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    store: Any = found() if found is not None else None
    return store.clone() if hasattr(store, "clone") else store


def _bytes(values: torch.Tensor) -> bytes:
    return ctypes.string_at(values.data_ptr(), values.numel())


def _unpadded(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "big")]


# Ranks that come together beside their scripts: all of them, or none.


_ON, _OFF = b"on", b"off"


class Meeting:
    """One occasion of that name, which each rank may come to when it likes, or pass by: nobody waits for who went on.

    It takes place once every rank has said that it comes, and never once one that had said so has gone before that. The
    first of the two to be written holds for all: a store compares and sets at once. Raises RuntimeError where the store
    does not answer.
    """

    def __init__(self, name: str, world: int, store: Any) -> None:
        self._calls, self._word = f"{name}/calls", f"{name}/word"
        self._world = world
        self._store = store
        self._has_called = False

    def called(self) -> bool:
        """Whether a rank has said that it comes."""
        return self._has_called or (self._world > 1 and bool(self._store.check([self._calls])))

    def call(self) -> None:
        """Say that this rank comes."""
        if not self._has_called:
            self._has_called = True
            if self._world > 1 and self._store.add(self._calls, 1) == self._world:
                self._store.compare_set(self._word, "", _ON.decode())

    def stands(self) -> bool | None:
        """Whether it takes place; None while that is open."""
        if self._world == 1:
            return True if self._has_called else None
        return bool(self._store.get(self._word) == _ON) if self._store.check([self._word]) else None

    def leave(self) -> bool:
        """Go on, unless it takes place already; return whether it does, and this rank must come."""
        if self._world == 1 or not self._has_called:
            return self._has_called
        return bool(self._store.compare_set(self._word, "", _OFF.decode()) == _ON)
