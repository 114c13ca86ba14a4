"""What was seen of a machine at the gate, and what probes in the job's Python say; nothing here judges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.node.gate.gang import PairSeen
from gpucloud.domain.node.hardware.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """One line of the kernel's log: the Xid's number, and the device's PCI address as written there.

    `age_s` is how long ago it was written, None where the log does not say. What came before the driver was last
    loaded, or before the driver said that its device needs nothing any more, is not seen.
    """

    number: int
    pci: str
    text: str
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchError:
    """A fatal error of an NVSwitch in the kernel's log (SXid), and how long ago; the switch is every GPU's."""

    number: int
    text: str
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """A device's way to the host's memory: the narrowest link that the ports of its own PCIe root and switches allow.

    `slot_width` is the lanes that the port above the device has. None of it changes with load. On virtual machines the
    ports are not the host's, and there is no such way.
    """

    index: int
    generation: int
    width: int
    slot_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A program that holds one of the devices: `owner` is its user's name, empty where it cannot be told.

    `own`: it runs as the user that the job runs as.
    """

    gpu: int
    pid: int
    name: str
    owner: str
    own: bool = False
    computes: bool = True
    used_mib: int | None = None


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
    read back, `memory_right` says whether unchanged. `total_mib` is the memory that CUDA can use.
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
    total_mib: int | None = None
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
    """The best that a device showed while the probe ran: PCIe links and clocks fall back when they rest.

    `sm_clock` is in MHz.
    """

    index: int
    generation: int | None
    width: int | None
    slowdowns: tuple[str, ...] = ()
    sm_clock: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was seen. `gpus` are those that the job may use, None where there is no `nvidia-smi`.

    `on_the_bus` are the PCI addresses of NVIDIA's devices, `listed` how many nvidia-smi lists in all. `kernel_log` is
    why the kernel's log could not be read, `newest` when it last told of a device or its driver, in seconds since boot.
    `host_links` are empty on virtual machines. `holders` hold devices now; `busy`: a job of ours is expected to.
    `clock_kept`: a time service keeps the clock, None: it is not known. `memlock` is how many bytes a process may lock
    where an interface needs that (EFA), None elsewhere or without a limit. `stand_in`: the devices are named by an
    emulated machine and not there. What was not looked at is None or empty.
    """

    at: datetime
    host: str = ""
    gpus: tuple[Gpu, ...] | None = None
    gpu_fault: str | None = None
    listed: int = 0
    on_the_bus: tuple[str, ...] = ()
    links: Links = Links()
    host_links: tuple[HostLink, ...] = ()
    holders: tuple[Holder, ...] = ()
    busy: bool = False
    xids: tuple[XidSeen, ...] = ()
    switch_errors: tuple[SwitchError, ...] = ()
    kernel_log: str | None = None
    newest: float | None = None
    clock_kept: bool | None = None
    free_bytes: int | None = None
    write_mbps: float | None = None
    memlock: int | None = None
    store: StoreSeen | None = None
    torch: TorchSeen | None = None
    probes: tuple[DeviceProbe, ...] = ()
    collective: CollectiveProbe | None = None
    under_load: tuple[UnderLoad, ...] = ()
    seconds: float = 0.0
    stand_in: bool = False

    def used(self, count: int) -> tuple[Gpu, ...]:
        """Return the devices that a job with so many ranks gets, the first ones; all of them for 0."""
        gpus = self.gpus or ()
        return gpus[:count] if count else gpus


# What a probe in the job's Python is told, and what it says line by line.


MACHINE, GANG = "machine", "gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOrder:
    """One worker's part. `kind` is MACHINE (its device, then an all-reduce with the others) or GANG (pair by pair).

    `device` is `cuda` or `cpu`; `megabytes` is the size of messages; `patience_s` how long the others are waited for.
    """

    kind: str
    rank: int
    world: int
    address: str
    port: int
    device: str
    megabytes: int
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One line of a worker: what it has found since the last one."""

    torch: TorchSeen | None = None
    probe: DeviceProbe | None = None
    collective: CollectiveProbe | None = None
    met: bool = False
    arrived: tuple[int, ...] = ()
    pair: PairSeen | None = None
    error: str | None = None
