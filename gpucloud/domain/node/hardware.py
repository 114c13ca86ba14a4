"""Machines from inside: GPUs, drivers, signs of an ill device (Xids), cores, network, disks; what collectives hear."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, IntEnum

from gpucloud.domain.job.data import HEADROOM, gigabytes

# GPUs as `nvidia-smi` describes them, and NVIDIA's drivers: versions, and which one a CUDA needs.


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


# Xids: what the driver writes to the kernel's log, what each means, and whether a node's GPUs may still be trusted.
#
# Source: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), column "Resolution Bucket
# (Immediate Action)", read 2026-11: RESTART_APP and IGNORE leave the device in use; RESET_GPU, RESTART_BM (a new boot)
# and the NVLink workflows do not. 63 and 156 ask for a reset that may wait: nvidia-smi says so too (`repair_pending`).


_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{1,32})\): (?P<number>[0-9]{1,6})\b")

# NVIDIA, "Fabric Manager user guide", SXid errors: `nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28`.
_SWITCH_LINE = re.compile(r"nvidia-nvswitch[0-9]{1,4}: SXid \([^)]{0,64}\): (?P<number>[0-9]{1,6}), Fatal\b")
# What Xid 154 says when a device was reset, or needed nothing after all (NVIDIA's Xid catalog).
_RECOVERED = re.compile(r"Xid \([^)]{0,64}\): 154\b.* to 0x0 \(None\)")

# What the driver could not mend while it runs: the device, or its link, must be reset or replaced.
_BROKEN = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error (double bit)",
    54: "its auxiliary power is not connected",
    62: "the GPU's controller halted",
    64: "a bad row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    109: "a context switch timed out",
    110: "a security fault",
    119: "the GPU's system processor did not answer",
    120: "the GPU's system processor failed",
    136: "an NVLink failed to train",
    140: "an unrecovered memory error",
    143: "the GPU failed to initialise",
    144: "an NVLink error (SAW)",
    145: "an NVLink error (RLW)",
    146: "an NVLink error (TLW)",
    149: "an NVLink is down (NETIR)",
    150: "an NVLink error (MSE)",
    151: "a key could not be rotated",
    155: "an NVLink error (software defined)",
    158: "a fatal timeout of the GPU",
    171: "an uncorrectable DRAM error",
    172: "an uncorrectable SRAM error",
}
# Mended or contained by the driver; worth knowing, because they come before worse.
_WEAK = {
    63: "a bad row of memory is to be remapped",
    92: "many corrected memory errors",
    94: "a contained memory error",
    156: "a part of the GPU was retired",
    157: "a part of the GPU could not be retired",
    168: "less memory than the GPU was made with",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error: its number, and the device's PCI address as it was written; `switch`: a fatal one of an NVSwitch."""

    number: int
    pci: str
    switch: bool = False


class XidClass(str, Enum):
    """What an Xid says of the machine."""

    BROKEN = "broken"
    WEAK = "weak"
    APPLICATION = "application"  # a program's own fault, or of no consequence


def xid_class(number: int) -> XidClass:
    """Return what the Xid says; one that is not in the table is a program's: 13, 31, 43, 45 and their kind."""
    if number in _BROKEN:
        return XidClass.BROKEN
    return XidClass.WEAK if number in _WEAK else XidClass.APPLICATION


def xid_means(number: int) -> str:
    """Return its meaning in a few words."""
    return _BROKEN.get(number) or _WEAK.get(number) or "a program's own fault"


def is_of_kernel(record: str) -> bool:
    """Whether a record as /dev/kmsg gives it (`6,1234,5678901,-;text`) is the kernel's own, or no such record.

    Programs may write there too; Linux has such records say so, by the facility in what stands above the level's three
    bits (kernel, admin-guide and ABI: dev-kmsg).
    """
    prefix = re.match(r"([0-9]{1,9}),[0-9]", record)
    return prefix is None or int(prefix[1]) >> 3 == 0


def find_xid(line: str) -> Xid | None:
    """Return the Xid in a line of the kernel's log, None for any other line."""
    m = _LINE.search(line)
    return Xid(number=int(m["number"]), pci=m["pci"]) if m else None


def find_switch_error(line: str) -> int | None:
    """Return the number of a fatal error of an NVSwitch in a line of the kernel's log, None for any other line."""
    m = _SWITCH_LINE.search(line)
    return int(m["number"]) if m else None


def find_error(line: str) -> Xid | None:
    """Return the Xid in a line of the kernel's log, or the fatal error of an NVSwitch; None for any other line."""
    switch = find_switch_error(line)
    return Xid(number=switch, pci="", switch=True) if switch is not None else find_xid(line)


def is_recovered(line: str) -> bool:
    """Whether the line says that a device needs no recovery any more."""
    return _RECOVERED.search(line) is not None


def pci_address(text: str) -> tuple[int, ...]:
    """Return a PCI address as numbers: (domain, bus, device); () for other text.

    Domains are written with four or eight digits or not at all, and functions are left out.
    """
    parts = text.partition(".")[0].split(":")
    try:
        return tuple(int(part, 16) for part in (["0", *parts] if len(parts) == 2 else parts))
    except ValueError:
        return ()


def same_device(pci: str, other: str) -> bool:
    """Whether two PCI addresses name one device."""
    return pci_address(pci) == pci_address(other)


# Whether the GPUs of a node may still be trusted while an attempt runs on them.


_SILENT = timedelta(seconds=30)  # nvidia-smi answers within a second; a driver that hangs never does
_LOST = timedelta(seconds=10)
_MISSING = timedelta(seconds=5)
_LOST_WORDS = ("gpu is lost", "unable to determine the device handle", "fallen off the bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was seen of the node's GPUs: at the attempt's start (`before`) and now.

    `silent` is how long nvidia-smi has not told of any device, `said` its last words that were no figures;
    `missing` how long a device of `before` has been left out; `xids` the errors since the start.
    """

    before: tuple[GpuSample, ...]
    now: tuple[GpuSample, ...]
    silent: timedelta = timedelta(0)
    said: str = ""
    missing: timedelta = timedelta(0)
    xids: tuple[Xid, ...] = ()


def illness(signs: Signs) -> str | None:
    """Return why these GPUs must not be trusted any more, None while nothing speaks against them."""
    return _by_xid(signs) or _by_ecc(signs) or _by_silence(signs) or _by_absence(signs)


def absent(before: tuple[GpuSample, ...], now: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
    """Return the devices that were there and are not."""
    there = {gpu.uuid for gpu in now}
    return tuple(gpu for gpu in before if gpu.uuid not in there)


def _by_xid(signs: Signs) -> str | None:
    """Only errors of the node's own devices count, and of the switches that join them.

    Several nodes may share one machine and its kernel log.
    """
    own = {pci_address(gpu.pci): gpu.index for gpu in signs.before}
    for xid in signs.xids:
        if xid.switch and len(signs.before) > 1:
            return f"a fatal error of an NVSwitch (SXid {xid.number})"
        place = pci_address(xid.pci)
        if xid_class(xid.number) is XidClass.BROKEN and place in own:
            return f"GPU {own[place]}: {xid_means(xid.number)} (Xid {xid.number})"
    return None


def _by_ecc(signs: Signs) -> str | None:
    counted = {gpu.uuid: gpu.ecc_uncorrected for gpu in signs.before}
    for gpu in signs.now:
        earlier = counted.get(gpu.uuid)
        if earlier is not None and gpu.ecc_uncorrected is not None and gpu.ecc_uncorrected > earlier:
            new = gpu.ecc_uncorrected - earlier
            return f"GPU {gpu.index}: {new} uncorrected memory error{'s' if new > 1 else ''} during the attempt"
    return None


def _by_silence(signs: Signs) -> str | None:
    lost = any(word in signs.said.lower() for word in _LOST_WORDS)
    if not signs.before or signs.silent < (_LOST if lost else _SILENT):
        return None
    said = f": {signs.said}" if signs.said else ""
    return f"nvidia-smi has told of no GPU for {signs.silent.total_seconds():.0f} s{said}"


def _by_absence(signs: Signs) -> str | None:
    gone = absent(signs.before, signs.now)
    if not gone or not signs.now or signs.missing < _MISSING:
        return None
    return f"GPU {gone[0].index} ({gone[0].uuid}) is no longer listed"


# A machine's cores, memory and network, and which of its disks holds data sets.


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


# What gloo, NCCL and OpenMP are told by variables.


def on_interface(name: str) -> dict[str, str]:
    """Return what makes collectives use this network interface and no other.

    NCCL takes a bare name for the beginning of names: `eth1` would be `eth10` too, and `bond0` a VLAN on it that the
    peers cannot reach; `=` in front asks for exactly that one (NCCL's guide, "NCCL_SOCKET_IFNAME"). Gloo knows no `=`.
    """
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


# A rank that waits so long in a collective has lost another one; the supervisor's own watch is quicker, so this is for
# a supervisor that is away. PyTorch's default is 480 s (8 min; docs, "ProcessGroupNCCL Environment Variables").
_HEARTBEAT_S = 300


def gpu_defaults(attempt_folder: str, *, efa: bool) -> dict[str, str]:
    """Return what NCCL is told on a node with GPUs; the launch's own variables win.

    NCCL writes warnings to a file of its own per process (`%h` host, `%p` process; NCCL's guide, "NCCL_DEBUG_FILE"),
    and a collective that never ends leaves its story (PyTorch, "Flight Recorder"). With EFA, AWS's guide "Get started
    with EFA and NCCL" names the provider and RDMA; forking needs FI_EFA_FORK_SAFE where the kernel is older than 5.13.
    """
    nccl = {
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": f"{attempt_folder}/nccl-%h-%p.log",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a collective that failed ends its process, and so the attempt
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(_HEARTBEAT_S),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{attempt_folder}/nccl-trace-",
    }
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    return {**nccl, **(fabric if efa else {})}


def threads(processes: int, cpus: int) -> dict[str, str]:
    """Return what keeps the `processes` of a launch from starting a thread for every one of the same `cpus` each.

    Nothing for a process that has them to itself: torchrun too sets the variable for several workers only, but to 1.
    """
    return {"OMP_NUM_THREADS": str(max(1, cpus // processes))} if processes else {}
