"""What was seen of a machine at the gate, what it must show, and the findings that a judgement is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.gate.gang import PairFacts
from gpucloud.domain.node.hardware import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class XidLine:
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
class StoreFacts:
    """The way to the store: seconds to a connection (TLS included), or the error."""

    endpoint: str
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
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
    xids: tuple[XidLine, ...] = ()
    switch_errors: tuple[SwitchError, ...] = ()
    kernel_log: str | None = None
    newest: float | None = None
    clock_kept: bool | None = None
    free_bytes: int | None = None
    write_mbps: float | None = None
    memlock: int | None = None
    store: StoreFacts | None = None
    torch: TorchFacts | None = None
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

    torch: TorchFacts | None = None
    probe: DeviceProbe | None = None
    collective: CollectiveProbe | None = None
    met: bool = False
    arrived: tuple[int, ...] = ()
    pair: PairFacts | None = None
    error: str | None = None


# What a machine must show at the gate, the findings that a judgement is made of, and the check that comes of it.


REFUSED = 14
"""The exit code of the node's `gate` command, and of the CLI, where a machine is not fit."""

# What the next machine would show as well: the job's Python, its environment, the ways out of its network; and what
# somebody does there now. Another machine is taken then, and this one again when no other is left.
_NOT_THE_MACHINES = ("no-torch", "cpu-torch", "wheel-too-new", "torch-count", "store", "choice", "in-use")


class Severity(str, Enum):
    """What a finding means for the machine."""

    FAIL = "fail"  # it takes no part
    WARN = "warn"  # it does, and the user is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be: the figure, what was expected, and what to do about it.

    `gpu` is the device's index, None for the machine's own.
    """

    code: str
    severity: Severity
    text: str
    hint: str
    gpu: int | None = None

    def __str__(self) -> str:
        who = f"GPU {self.gpu}: " if self.gpu is not None else ""
        return f"{who}{self.text}"


def fail(code: str, text: str, hint: str, gpu: int | None = None) -> Finding:
    """Return a finding that keeps the machine out."""
    return Finding(code=code, severity=Severity.FAIL, text=text, hint=hint, gpu=gpu)


def warn(code: str, text: str, hint: str, gpu: int | None = None) -> Finding:
    """Return a finding that the user is told."""
    return Finding(code=code, severity=Severity.WARN, text=text, hint=hint, gpu=gpu)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return those that keep the machine out."""
    return tuple(finding for finding in findings if finding.severity is Severity.FAIL)


def is_machines(findings: Iterable[Finding]) -> bool:
    """Whether one of these keeps the machine out by a fault of its own, which another machine need not have."""
    return any(finding.code not in _NOT_THE_MACHINES for finding in failures(findings))


def is_in_use(findings: Iterable[Finding]) -> bool:
    """Whether nothing keeps the machine out but what others do there now."""
    failed = failures(findings)
    return bool(failed) and all(finding.code == "in-use" for finding in failed)


def why(findings: Iterable[Finding]) -> str:
    """Return the failures in one line, empty for none."""
    return "; ".join(str(finding) for finding in failures(findings))


# A check: what was seen, and how it was judged.


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The answer of a node's `gate` command."""

    report: Report
    findings: tuple[Finding, ...]


# What a machine must show at the gate, and what is kept of it when it did.


ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The variables by which boto3 is told of another endpoint, the first one first (AWS SDKs, service endpoints)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateWanted:
    """What a machine must show: `gpus` devices, of one of `models` if any was asked for or paid for.

    `full`: compute and collectives are tried too. `torch`: the job needs it, on those devices. `every`: the machine
    itself is looked at, and its driver is to know all devices that are on the bus.
    """

    gpus: int
    models: tuple[str, ...] = ()
    vram_gib: int | None = None
    full: bool = True
    torch: bool = True
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOrder:
    """What the node's `gate` command is told, on its standard input.

    `python` is the job's, `devices` the GPUs that are the node's as CUDA_VISIBLE_DEVICES takes them (empty: as the
    environment says), `store` the store's endpoint (`https://host:port`, empty for none) where neither `env`, the job's
    own words about it, nor the machine's environment names another. `digest` names what is asked.
    """

    wanted: GateWanted
    digest: str
    python: str
    devices: tuple[str, ...] = ()
    store: str = ""
    env: tuple[tuple[str, str], ...] = ()
    sudo: bool = False


LASTS = timedelta(days=7)
"""How long a check counts on a machine that is not booted anew: own hosts run for months."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFact:
    """What the last full check on this boot passed: the digest of what was asked, when, its figures and remarks.

    `newest` is what the kernel's log had told by then (`Report.newest`).
    """

    digest: str
    at: datetime
    newest: float | None = None
    figures: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


def store_endpoint(order: GateOrder, environ: Mapping[str, str]) -> str:
    """Return where boto3 in the job will look for the store on a machine with this environment; empty for none."""
    said = {**environ, **dict(order.env)}
    named = next((said[name] for name in ENDPOINTS if said.get(name)), "")
    return (named or order.store) if order.store else ""


def gate_digest(wanted: GateWanted, python: str, gpus: tuple[Gpu, ...], devices: tuple[str, ...] = ()) -> str:
    """Return the name of a check: another Python or driver, other devices or fewer of them must pass it anew."""
    driver = gpus[0].driver if gpus else ""
    uuids = ",".join(sorted(gpu.uuid for gpu in gpus))
    text = "\n".join((to_json(wanted), python, driver, uuids, ",".join(devices)))
    return hashlib.sha256(text.encode()).hexdigest()


# The figures of a check in a few words: for the lock record, the story and the doctor.


def figures(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was measured, name and figure with its unit; of several devices the slowest counts."""
    found: list[tuple[str, str]] = []
    for name, key, unit in (
        ("compute", "tflops", "TFLOP/s"),
        ("memory", "memory_gbps", "GB/s"),
        ("to GPU", "to_device_gbps", "GB/s"),
        ("from GPU", "from_device_gbps", "GB/s"),
    ):
        values = [value for probe in report.probes if (value := getattr(probe, key)) is not None]
        if values:
            found.append((name, f"{min(values):.1f} {unit}"))
    tried = [probe.memory_gb for probe in report.probes if probe.memory_gb is not None]
    if tried:
        found.append(("memory tried", f"{min(tried):.0f} GB"))
    seen = report.collective
    if seen is not None and seen.busbw_gbps is not None:
        found.append((f"all-reduce, {seen.ranks} ranks", f"{seen.busbw_gbps:.1f} GB/s"))
    if report.write_mbps is not None:
        found.append(("disk", f"{report.write_mbps:.0f} MB/s"))
    if report.store is not None and report.store.seconds is not None:
        found.append(("store", f"{report.store.seconds * 1000:.0f} ms"))
    return (*found, ("took", f"{report.seconds:.1f} s"))
