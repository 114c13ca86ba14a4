"""The ranks of this attempt: how they talk beside the training traffic, and what memory they may take together."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import format_size

_TIMEOUT = timedelta(days=1)  # one rank may evaluate for hours while the others wait


class Ranks:
    """This process among `world`. Every method with a result is called by all ranks, in the same order.

    `device` is this rank's GPU where the training group talks between GPUs, else the CPU.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.device = torch.device("cpu")
        self.group: dist.ProcessGroup | None = None
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
            self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def highest(self, *numbers: int) -> tuple[int, ...]:
        """Return, for each place, the highest number that any rank gave."""
        return self.comparison(len(numbers)).begun(numbers).highest()

    def comparison(self, count: int) -> Comparison:
        """Return what compares so many numbers of all ranks, as often as that is wanted."""
        return Comparison(self, count)

    def shared(self, data: bytes) -> bytes:
        """Return rank 0's bytes."""
        (size,) = self.highest(len(data) if self.rank == 0 else 0)
        if self.group is None or size == 0:
            return data if self.rank == 0 else b""
        values = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0:
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(values, src=0, group=self.group)
        return _bytes(values)

    def gathered(self, data: bytes) -> tuple[bytes, ...]:
        """Return every rank's bytes, in the order of ranks."""
        if self.group is None:
            return (data,)
        (size,) = self.highest(len(data) + 8)
        padded = torch.frombuffer(bytearray(len(data).to_bytes(8, "big") + data).ljust(size, b"\0"), dtype=torch.uint8)
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.group)
        return tuple(_unpadded(_bytes(part)) for part in parts)

    def meeting(self, name: str) -> Meeting | None:
        """Return the occasion of that name, the same for all ranks of this attempt; None where they have no store."""
        if self.group is not None and self._store is None:
            self._store = _own_store()
            if self._store is None:
                return None
        return Meeting(f"gpucloud-{name}", self.world, self._store)

    def close(self) -> None:
        """Give the side group back, and end its threads; every rank must have come here.

        Nothing else may hold the group. A thread of it that lets go of a rank's numbers waits for the interpreter, and
        while that ends, it would abort the process.
        """
        if self.group is not None:
            self.highest(0)
            dist.destroy_process_group(self.group)
            self.group = None


class Comparison:
    """Finds the highest numbers of all ranks beside the training, once at a time."""

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks = ranks
        self._work: Any = None
        self._numbers: Any = ()
        if ranks.group is not None:
            self._numbers = (ctypes.c_int64 * count)()
            self._tensors = [torch.frombuffer(self._numbers, dtype=torch.int64)]
            self._how = dist.AllreduceOptions()
            self._how.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

    @property
    def is_under_way(self) -> bool:
        """Whether it was begun, and what it found was not asked for yet."""
        return self._work is not None

    def begun(self, numbers: tuple[int, ...]) -> Comparison:
        """Tell the other ranks these numbers, and wait for none."""
        group = self._ranks.group
        if group is None:
            self._numbers = numbers
            return self
        self._numbers[:] = numbers
        self._work = group.allreduce(self._tensors, self._how)  # `dist.all_reduce` takes 50 µs to come to this
        return self

    def highest(self) -> tuple[int, ...]:
        """Return, for each place, the highest number that any rank told, when all have told theirs."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return tuple(self._numbers)


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


# Whether there is memory for what a save or a restore is about to take: where there is none, the kernel kills.
#
# Ranks on one machine take their memory at the same time, so each tells what it wants and what is free where it runs:
# on the machine, and in each control group (container, batch job) with a limit of its own.


_SPARE = 256 * 2**20
"""So much is left for the training, which goes on meanwhile; of a small request, an eighth of it."""

_NO_LIMIT = 2**60  # what cgroup v1 says instead of nothing is near 2**63

HINT = "take a machine with more memory, or run fewer ranks on it"


class NoMemory(Exception):
    """What is wanted and what is free, in words; `of_all`: every rank was told the same."""

    def __init__(self, text: str, *, of_all: bool = False) -> None:
        super().__init__(text)
        self.of_all = of_all


@dataclass(frozen=True, slots=True)
class Ask:
    """What a rank wants, in bytes, and what is free in each place that its memory counts in."""

    wanted: int
    free: Mapping[str, int]


def shortage(asks: Sequence[Ask]) -> str | None:
    """Return in words what is wanted and what is free where these would take more than there is; None otherwise."""
    for place in dict.fromkeys(place for ask in asks for place in ask.free):
        those = [ask for ask in asks if place in ask.free]
        wanted = sum(ask.wanted for ask in those)
        free = min(ask.free[place] for ask in those)
        if wanted and wanted + min(wanted // 8, _SPARE) > free:
            ranks = f" by {len(those)} ranks" if len(those) > 1 else ""
            return f"{format_size(wanted)} wanted{ranks}, {format_size(max(0, free))} free {place.partition(':')[0]}"
    return None


def sharing(asks: Sequence[Ask], own: int) -> int:
    """Return how many ranks take memory from where the rank `own` does, itself included."""
    return sum(ask is asks[own] or not asks[own].free.keys().isdisjoint(ask.free) for ask in asks)


def asked(ranks: Ranks, wanted: int) -> list[Ask]:
    """Return what every rank wants, in the order of ranks; none takes any before all have looked."""
    ask = Ask(wanted, free_memory())
    told = ranks.gathered(json.dumps([ask.wanted, dict(ask.free)]).encode())
    return [Ask(*json.loads(one)) for one in told]


def free_memory(root: Path = Path("/")) -> dict[str, int]:
    """Return how many bytes this process may still take, by place; a place has one name for all who share it.

    Nothing where the system does not tell (macOS). What the kernel gives up when asked, file caches, counts as free.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        found = {f"on the machine:{boot}": 1024 * _table(root / "proc/meminfo")["MemAvailable:"]}
        for folder in _control_groups(root):
            limit = _left(folder)
            if limit is not None:
                found[f"in its container or batch job:{boot}:{folder.stat().st_ino}"] = limit
        return found
    return {}


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the memory controller, v2 or v1, from this process's own up to the highest that is seen."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        place = top / own.lstrip("/")  # in a container's own view of the groups, there is no such folder but the top
        yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(top) and folder.is_dir())


def _left(folder: Path) -> int | None:
    """Return what the group may still take, None without a limit."""
    names = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    for most, used, prefix in names:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit = int((folder / most).read_text())
            if limit < _NO_LIMIT:
                counted = _table(folder / "memory.stat")
                files = sum(counted.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
                return limit - int((folder / used).read_text()) + files
    return None


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
