"""The machine's own figures, from the kernel."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.hardware.host import HostSample

_MIB = 1 << 20


class Machine:
    """Looks at /proc; remembers the look before, because the kernel counts from the boot on."""

    def __init__(self, disk: Path, proc: Path = Path("/proc"), net: Path = Path("/sys/class/net")) -> None:
        """`disk` is a folder on the file system whose space counts."""
        self._net = net
        self._disk = disk
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def look(self) -> HostSample | None:
        """Return how it stands, None where there is no /proc (macOS)."""
        try:
            memory = _memory(self._proc / "meminfo")
            received, sent = _network(self._proc / "net/dev", self._net)
            disk = os.statvfs(self._disk)
            return HostSample(
                at=datetime.now(timezone.utc),
                cpu=self._cpu(),
                memory_used_mib=memory["MemTotal"] - memory["MemAvailable"],
                memory_mib=memory["MemTotal"],
                disk_free_mib=disk.f_bavail * disk.f_frsize // _MIB,
                received=received,
                sent=sent,
            )
        except (OSError, KeyError, ValueError, IndexError):
            return None

    def _cpu(self) -> float | None:
        """Return the busy share since the look before, in percent (proc(5): user … steal; guest is in user)."""
        with (self._proc / "stat").open() as file:
            counts = [int(word) for word in file.readline().split()[1:9]]
        total, idle = sum(counts), counts[3] + counts[4]
        before, self._before = self._before, (total, idle)
        if before is None or total <= before[0]:
            return None
        return round(100.0 * (1 - (idle - before[1]) / (total - before[0])), 1)


def _memory(path: Path) -> dict[str, int]:
    """Return the first lines of meminfo, in MiB."""
    found = {}
    with path.open() as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) // 1024
            if name == "MemAvailable":
                break
    return found


def _network(path: Path, net: Path) -> tuple[int, int]:
    """Return bytes received and sent by the machine's network cards.

    What goes over a bond, a VLAN, a bridge or a container's pair of ends goes over a card's port too, and would count
    twice; only a card has a device. Where none has one, as in a container, whatever there is counts.
    """
    counts: dict[str, tuple[int, int]] = {}
    with path.open() as file:
        for line in file:
            name, colon, rest = line.partition(":")
            if colon and name.strip() != "lo":
                words = rest.split()
                counts[name.strip()] = int(words[0]), int(words[8])
    cards = [name for name in counts if (net / name / "device").exists()] or list(counts)
    return sum(counts[name][0] for name in cards), sum(counts[name][1] for name in cards)
