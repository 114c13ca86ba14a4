"""What was seen of a machine at the gate; nothing here judges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.hardware.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """One line of the kernel's log: the Xid's number, and the device's PCI address as written there."""

    number: int
    pci: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """NVLink as `nvidia-smi` tells it, by the devices' indices on the machine.

    `pairs`: what `topo -m` writes for two devices (`NV18`, `SYS`); `ports`: how many links of a device are up and down.
    """

    pairs: tuple[tuple[int, int, str], ...] = ()
    ports: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSeen:
    """The way to the store: seconds to a connection (TLS included), or the error."""

    endpoint: str
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSeen:
    """The job's torch. `cuda` is what its wheel was built for, None: CPU only. `error` is what CUDA said."""

    version: str | None = None
    cuda: str | None = None
    available: bool = False
    devices: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """One device at work, in the order in which torch numbers them. GB/s are 10^9 bytes a second.

    `right`: a product of matrices came out as it must; `repeatable`: twice the same bits; `memory_gb` was written and
    read back, `memory_right` says whether unchanged.
    """

    index: int
    right: bool = False
    repeatable: bool = False
    memory_right: bool = False
    memory_gb: float | None = None
    tflops: float | None = None
    to_device_gbps: float | None = None
    from_device_gbps: float | None = None
    memory_gbps: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """An all-reduce over all devices of the machine.

    `busbw_gbps` is nccl-tests' bus bandwidth (its PERFORMANCE.md): bytes / seconds × 2(n − 1)/n.
    """

    backend: str
    ranks: int
    right: bool = False
    megabytes: int = 0
    busbw_gbps: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderLoad:
    """The best PCIe link that a device showed while the probe ran: idle ones fall back to save power."""

    index: int
    generation: int | None
    width: int | None
    slowdowns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was seen. `gpus` are those that the job may use, None where there is no `nvidia-smi`.

    `on_the_bus` are the PCI addresses of NVIDIA's devices, `listed` how many nvidia-smi lists in all. `kernel_log` is
    why the kernel's log could not be read. `clock_kept`: a time service keeps the clock, None: it is not known.
    `stand_in`: the devices are named by an emulated machine and not there. What was not looked at is None or empty.
    """

    at: datetime
    host: str = ""
    gpus: tuple[Gpu, ...] | None = None
    gpu_fault: str | None = None
    listed: int = 0
    on_the_bus: tuple[str, ...] = ()
    links: Links = Links()
    xids: tuple[XidSeen, ...] = ()
    kernel_log: str | None = None
    clock_kept: bool | None = None
    free_bytes: int | None = None
    write_mbps: float | None = None
    store: StoreSeen | None = None
    torch: TorchSeen | None = None
    probes: tuple[DeviceProbe, ...] = ()
    collective: CollectiveProbe | None = None
    under_load: tuple[UnderLoad, ...] = ()
    seconds: float = 0.0
    stand_in: bool = False
