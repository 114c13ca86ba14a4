"""How a machine itself is used: its cores, memory, disk and network."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


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
