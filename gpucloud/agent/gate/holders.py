"""Which programs hold the devices, and whose they are."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from gpucloud.domain.gate.report import Holder
from gpucloud.domain.hardware.gpus import Gpu, GpuProcess

_PROC = Path("/proc")
# They serve whoever computes, and keep a few MiB of every device while nobody does.
_SERVICES = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nv-hostengine", "nvidia-persistenced")


def holders(gpus: tuple[Gpu, ...], proc: Path = _PROC) -> tuple[Holder, ...]:
    """Return the programs that hold these devices, services of the driver's own left out."""
    return tuple(
        _holder(gpu, process, proc)
        for gpu in gpus
        for process in gpu.processes
        if process.name.rpartition("/")[2].split(" ")[0] not in _SERVICES
    )


def _holder(gpu: Gpu, process: GpuProcess, proc: Path) -> Holder:
    try:
        owner = (proc / str(process.pid)).stat().st_uid
    except OSError:  # it ended, or hides from us
        owner = None
    return Holder(
        gpu=gpu.index,
        pid=process.pid,
        name=process.name,
        owner=_name(owner),
        own=owner == os.getuid() and owner != 0,
        computes="C" in process.kind,
        used_mib=process.used_mib,
    )


def _name(owner: int | None) -> str:
    if owner is None:
        return ""
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"
