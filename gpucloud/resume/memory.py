"""Whether there is memory for what a save or a restore is about to take: where there is none, the kernel kills.

Ranks on one machine take their memory at the same time, so each tells what it wants and what is free where it runs:
on the machine, and in each control group (container, batch job) with a limit of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.job.quantities import format_size
from gpucloud.resume.ranks import Ranks

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
