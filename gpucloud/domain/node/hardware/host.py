"""A machine's cores, memory and network, and which of its disks holds data sets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum

from gpucloud.domain.job.data import HEADROOM, gigabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One look: `cpu` in percent of all cores since the look before, None at the first; memory and disk in MiB.

    `memory_used_mib` is what cannot be had without swapping; `received` and `sent` are bytes since the machine booted,
    over all interfaces but loopback.
    """

    at: datetime
    cpu: float | None
    memory_used_mib: int
    memory_mib: int
    disk_free_mib: int
    received: int
    sent: int


# Which of a node's disks holds data sets: the fastest that has room.


class Speed(IntEnum):
    """Kinds of disks, the fastest first."""

    LOCAL_NVME = 0  # in the machine itself, and new with it
    SOLID = 1
    SPINNING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system in which a folder can be made; `free` is in bytes, `held` what of the set it has already."""

    folder: str
    speed: Speed
    free: int
    held: int = 0


def choose(disks: tuple[Disk, ...], size: int) -> Disk | str:
    """Return the fastest disk with room for what it does not hold yet; or the reason why there is none, with numbers.

    Among equals the one that holds most of the set wins, then the one with most room.
    """
    roomy = [disk for disk in disks if disk.free >= needed(disk, size)]
    if roomy:
        return min(roomy, key=lambda disk: (disk.speed, -disk.held, -disk.free))
    seen = "; ".join(f"{d.folder}: {gigabytes(d.free)} free, {gigabytes(needed(d, size))} needed" for d in disks)
    return f"no disk has room for a data set of {gigabytes(size)}: {seen or 'no disk can be written to'}"


def needed(disk: Disk, size: int) -> int:
    """Return the bytes that must be free there."""
    return int((size - disk.held) * HEADROOM)
