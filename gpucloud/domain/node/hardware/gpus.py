"""GPUs as `nvidia-smi` describes them, and NVIDIA's drivers: versions, and which one a CUDA needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

_MAKERS = re.compile(r"^(NVIDIA|Tesla|Quadro|GeForce) +")
_BUILD = re.compile(r"[- ]+(SXM[0-9]*|PCIe?|HBM[0-9]\w*|NVL|[0-9]+ ?GB)\b.*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A program that holds a device. `kind` is nvidia-smi's: `C` computes, `G` draws, `C+G` does both."""

    pid: int
    name: str
    kind: str = ""
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA device as it stands now; None where the device does not say (`N/A`).

    Memory in MiB (it has none of its own where it shares the machine's: GB10, Jetson), temperature in °C, power in W,
    clocks in MHz, use in percent. `ecc_uncorrected` counts errors since the driver was loaded; `repair_pending`: a
    reset of the GPU would mend memory that failed; `repair_failed`: none would. `recovery` is what the driver asks for
    to have the device work again; `recovery_told`: this driver tells of such a thing at all, and None is its word.
    `slowdowns` are the reasons for which the hardware or the driver slows it down now, `idle` and set clocks left out;
    `fabric` is the NVSwitch fabric's state, such as `Completed`. `virtualization` is how the device came into a virtual
    machine: `Pass-Through`, or `VGPU` for a share of one.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    driver: str
    pci: str = ""
    memory_used_mib: int | None = None
    use: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: int | None = None
    sm_clock_most: int | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    repair_pending: bool = False
    repair_failed: bool = False
    recovery: str | None = None
    recovery_told: bool = False
    slowdowns: tuple[str, ...] = ()
    mig: bool = False
    persistence: bool = False
    fabric: str | None = None
    virtualization: str | None = None
    processes: tuple[GpuProcess, ...] = ()


def model_of(name: str) -> str:
    """Return the model in a device's name, as clouds and job files call it: `A100` of `NVIDIA A100-SXM4-80GB`."""
    while _MAKERS.match(name):
        name = _MAKERS.sub("", name)
    return _BUILD.sub("", name).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """How one GPU was used at a moment: percent, MiB, °C, W, MHz; None where the device does not say.

    `pci` is its bus id as nvidia-smi writes it, `slowdowns` are as in `Gpu`.
    """

    at: datetime
    index: int
    use: int | None
    memory_used_mib: int | None
    memory_mib: int | None
    temperature: int | None
    power: float | None
    slowdowns: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    uuid: str = ""
    pci: str = ""
    power_limit: float | None = None
    sm_clock: int | None = None


# NVIDIA's drivers: their versions, and which one a CUDA needs.


# NVIDIA, "CUDA Compatibility", table "CUDA Toolkit minor version compatibility" (docs.nvidia.com/deploy/
# cuda-compatibility, read 2026-11): CUDA's major version → the least Linux driver.
_LEAST = {13: "580.65.06", 12: "525.60.13", 11: "450.80.02"}


def least_driver(cuda: str) -> str | None:
    """Return the oldest driver that runs what is built for that CUDA, such as `12.8`; None for one not in the table."""
    major = cuda.partition(".")[0]
    return _LEAST.get(int(major)) if major.isdigit() else None


def is_older(version: str, than: str) -> bool:
    """Whether one driver version is older than the other; `580.95.05` is older than `580.126.09`."""
    return _parts(version) < _parts(than)


def branch_of(version: str) -> str:
    """Return the branch of a driver version: `580` of `580.178.04`."""
    return version.partition(".")[0]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
