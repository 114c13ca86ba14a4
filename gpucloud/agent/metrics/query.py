"""The figures that `nvidia-smi --query-gpu` is asked for, and its rows as samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from gpucloud.domain.hardware.gpus import GpuSample

FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks_event_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
)
_NEW, _OLD = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
OLD_FIELDS = tuple(_OLD if name == _NEW else name for name in FIELDS)
"""The same for drivers before R535, which call the reasons throttle reasons."""

# nvml.h, "nvmlClocksEventReasons"; words as in the XML of nvidia-smi. Idle (0x1) and set clocks (0x2, 0x10, 0x100)
# are left out: they are no slowdown.
_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


def command(program: str, fields: Sequence[str], every_ms: int) -> list[str]:
    """Return the command that writes a row per GPU every so often until it is ended."""
    return [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-lms", str(every_ms)]


def row(line: str, fields: Sequence[str], at: datetime) -> GpuSample | None:
    """Return the sample of one row, None for a line that is none. What the device does not say is None in it."""
    cells = [cell.strip() for cell in line.split(",")]
    named = dict(zip(fields, cells, strict=False))
    index, uuid = named.get("index", ""), named.get("uuid", "")
    if len(cells) != len(fields) or not index.isdecimal() or not uuid.startswith(("GPU-", "MIG-")):
        return None
    return GpuSample(
        at=at,
        index=int(index),
        uuid=uuid,
        pci=named.get("pci.bus_id", ""),
        use=_whole(named.get("utilization.gpu")),
        memory_used_mib=_whole(named.get("memory.used")),
        memory_mib=_whole(named.get("memory.total")),
        temperature=_whole(named.get("temperature.gpu")),
        power=_number(named.get("power.draw")),
        power_limit=_number(named.get("power.limit")),
        sm_clock=_whole(named.get("clocks.sm")),
        slowdowns=_slowdowns(named.get(_NEW) or named.get(_OLD) or ""),
        ecc_uncorrected=_whole(named.get("ecc.errors.uncorrected.volatile.total")),
    )


def _slowdowns(mask: str) -> tuple[str, ...]:
    """Return the reasons in a mask such as `0x0000000000000004`."""
    if not re.fullmatch(r"0x[0-9a-fA-F]+", mask):
        return ()
    bits = int(mask, 16)
    return tuple(word for bit, word in _REASONS.items() if bits & bit)


def _number(cell: str | None) -> float | None:
    """`[N/A]`, `[Not Supported]`, `[Unknown Error]` and `[GPU is lost]` are not numbers."""
    found = re.match(r"-?[0-9]+(\.[0-9]+)?", cell or "")
    return float(found[0]) if found else None


def _whole(cell: str | None) -> int | None:
    number = _number(cell)
    return None if number is None else int(number)
