"""The machine's own figures, from the kernel."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.hardware.host import HostSample

_MIB = 1 << 20


class Machine:
    """Looks at /proc; remembers the look before, because the kernel counts from the boot on."""

    def __init__(self, disk: Path, proc: Path = Path("/proc")) -> None:
        """`disk` is a folder on the file system whose space counts."""
        self._disk = disk
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def look(self) -> HostSample | None:
        """Return how it stands, None where there is no /proc (macOS)."""
        try:
            memory = _memory(self._proc / "meminfo")
            received, sent = _network(self._proc / "net/dev")
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


def _network(path: Path) -> tuple[int, int]:
    received = sent = 0
    with path.open() as file:
        for line in file:
            name, colon, rest = line.partition(":")
            if colon and name.strip() != "lo":
                counts = rest.split()
                received, sent = received + int(counts[0]), sent + int(counts[8])
    return received, sent
