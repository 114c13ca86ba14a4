"""Rules about each device and its links, as the driver describes them and as they did at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from gpucloud.domain.node.gate.models import Spec, least_tflops, link_gbps, whole_spec_of
from gpucloud.domain.node.gate.report import (
    DeviceProbe,
    Finding,
    GateWanted,
    Holder,
    HostLink,
    Report,
    UnderLoad,
    fail,
    warn,
)
from gpucloud.domain.node.hardware import Gpu, model_of

# The hardware's own: heat, or the power supply's brake. `sw_power_cap` is normal under load (NVML, event reasons).
HARDWARE_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_HOT = 85  # °C: slowdown begins at 87 to 92 on these models (nvidia-smi -q, "GPU Slowdown Temp")
_HELD = 0.1  # of its memory: desktops draw with a gigabyte or less of a card that has twelve and more
_RESET = "reset the GPU (nvidia-smi --gpu-reset), or replace the machine"
_REPLACE = "replace the machine"


def device_findings(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    """Yield what is wrong with devices and links."""
    for gpu in report.gpus or ():
        yield from _memory(gpu)
        yield from _heat(gpu)
        yield from _bus(gpu, report)
        if gpu.mig:
            yield warn(
                "mig", "it is split (MIG): no more than one part is used", "machine: {mig: …} or -mig 0", gpu.index
            )
        if gpu.fabric is not None and gpu.fabric != "Completed":
            text = f"its NVSwitch fabric is {gpu.fabric!r}, 'Completed' expected"
            yield fail("fabric", text, "sudo systemctl restart nvidia-fabricmanager", gpu.index)
    yield from _links(report)


def held_findings(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    """Yield which of the job's devices other programs hold: what is measured beside them tells nothing."""
    for gpu in report.used(wanted.gpus) if not report.busy else ():
        holders = [one for one in report.holders if one.gpu == gpu.index]
        used, whole = gpu.memory_used_mib, gpu.memory_mib
        much = used is not None and whole is not None and used > _HELD * whole
        text = f"{used} of {whole} MiB are in use" if much else "it is in use"
        if much and not holders:
            why = "by a program that cannot be seen from here (in a container, or dead)"
            hint = "sudo fuser -v /dev/nvidia*; or reset the GPU, or " + _REPLACE
            yield fail("held", f"{text} {why}", hint, gpu.index)
        elif much or any(one.computes for one in holders):
            who = ", ".join(_said(one) for one in holders if much or one.computes)
            own = [str(one.pid) for one in holders if one.own]
            hint = f"kill {' '.join(own)}, if it is a rest of yours" if own else _others(report)
            yield (fail if much else warn)("in-use", f"{text} by {who}", hint, gpu.index)


def _others(report: Report) -> str:
    held = {one.gpu for one in report.holders}
    free = [str(gpu.index) for gpu in report.gpus or () if gpu.index not in held and (gpu.memory_used_mib or 0) < 1024]
    named = f", or name free ones: `ssh: hosts: [{{gpus: [{', '.join(free)}]}}]`" if free else ""
    return f"wait until it is free{named}"


def _said(one: Holder) -> str:
    program = one.name.rpartition("/")[2].split(" ")[0] or "a program"
    return f"{program} (pid {one.pid}{', of ' + one.owner if one.owner else ''})"


def _memory(gpu: Gpu) -> Iterator[Finding]:
    spec = whole_spec_of(gpu)
    if spec is not None and gpu.memory_mib is not None and gpu.memory_mib < 0.9 * spec.memory_mib:
        text = f"{gpu.memory_mib} MiB of memory, {spec.memory_mib} expected of a {spec.model}"
        yield fail("memory", text, _REPLACE, gpu.index)
    if gpu.ecc_uncorrected:
        text = f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded, 0 expected"
        yield fail("ecc", text, _RESET, gpu.index)
    if gpu.repair_failed:
        yield fail("repair-failed", "memory failed and cannot be mended", _REPLACE, gpu.index)
    if gpu.repair_pending:
        yield fail("repair-pending", "memory failed; a reset would mend it", _RESET, gpu.index)
    if gpu.recovery is not None:
        yield fail("recovery", f"the driver asks for: {gpu.recovery}", _RESET, gpu.index)
    if gpu.ecc is False and spec is not None:
        yield warn("ecc-off", "error correction of its memory is off", f"nvidia-smi -i {gpu.index} -e 1", gpu.index)


def _heat(gpu: Gpu) -> Iterator[Finding]:
    hard = [reason for reason in gpu.slowdowns if reason in HARDWARE_SLOWDOWNS]
    if hard:
        text = f"slowed down by the hardware now: {', '.join(hard)}"
        yield fail("slowdown", text, "cooling or power is failing: " + _REPLACE, gpu.index)
    elif "sw_thermal_slowdown" in gpu.slowdowns:
        yield warn("slowdown", "slowed down by the driver because it is hot", "see to its cooling", gpu.index)
    if gpu.temperature is not None and gpu.temperature >= _HOT:
        yield warn("hot", f"{gpu.temperature} °C, less than {_HOT} expected", "see to its cooling", gpu.index)


def _bus(gpu: Gpu, report: Report) -> Iterator[Finding]:
    """Lanes do not come and go with load, generations do: those are judged by what was copied.

    nvidia-smi's most is the device's own: a slot that has four lanes is known by the port above it.
    """
    spec, width = whole_spec_of(gpu), gpu.pcie_width
    slot = next((link.slot_width for link in report.host_links if link.index == gpu.index), None)
    known = [most for most in (spec.pcie_width if spec else None, gpu.pcie_width_most, slot) if most]
    if width is None or not known or width >= min(known):
        return
    most = min(known)
    text = f"PCIe on {width} lanes, {most} expected"
    if width * 4 <= most and (slot is not None or spec is not None):
        yield fail("pcie-width", text, "a bad slot or riser: " + _REPLACE, gpu.index)
    else:
        yield warn("pcie-width", text, "copies to it take longer; what they reach is measured", gpu.index)


def _links(report: Report) -> Iterator[Finding]:
    specs = {gpu.index: spec for gpu in report.gpus or () if (spec := whole_spec_of(gpu)) is not None}
    switched = has_switches(report)
    for one, other, kind in report.links.pairs:
        if one < other and one in specs and other in specs:
            yield from _pair(one, other, kind, specs[one], switched=switched)
    for index, up, down in report.links.ports:
        spec = specs.get(index)
        if spec is None or spec.nvlink <= 1 or not up or not down:
            continue
        beside = len({i for one, other, _ in report.links.pairs for i in (one, other)}) - 1
        # On a board without switches, links to neighbours that are not this machine's are down by right.
        if switched or up < spec.direct_nvlink * max(beside, 1):
            yield fail("nvlink", f"{down} of {up + down} NVLinks are down", _RESET, index)


def has_switches(report: Report) -> bool:
    """Whether NVSwitches join the devices: then every two have all links between them, else they are shared out.

    A board without switches has four GPUs at most, and no two of them have all their links to each other.
    """
    specs = {gpu.index: spec for gpu in report.gpus or () if (spec := whole_spec_of(gpu)) is not None}
    pairs = report.links.pairs
    devices = {index for one, other, _ in pairs for index in (one, other)}
    full = any(one in specs and lanes_of(kind) >= specs[one].nvlink for one, _, kind in pairs)
    joined = any(lanes_of(kind) for _, _, kind in pairs)
    state = any(gpu.fabric is not None for gpu in report.gpus or ())
    return full or state or len(devices) > 4 or not joined


def lanes_of(kind: str) -> int:
    """Return how many NVLinks join two devices, by what `topo -m` writes: 18 for `NV18`, 0 for `SYS`."""
    return int(kind[2:]) if kind.startswith("NV") and kind[2:].isdigit() else 0


def _pair(one: int, other: int, kind: str, spec: Spec, *, switched: bool) -> Iterator[Finding]:
    least = spec.nvlink if switched or spec.nvlink <= 1 else spec.direct_nvlink
    if lanes_of(kind) >= least:
        return
    text = f"GPU {one} and GPU {other} are joined by {kind}, NV{least} expected between two {spec.model}"
    if spec.model == "V100":  # a hybrid cube: some pairs have no link of their own
        yield warn("nvlink", text, "collectives go around")
    elif switched:
        yield fail("nvlink", text, "sudo systemctl restart nvidia-fabricmanager, or " + _REPLACE)
    else:
        yield fail("nvlink", text, _RESET)


# Rules about what devices did when they were put to work.
#
# Floors come from what the machine itself can do: its ports (`Report.host_links`), the data sheet, the neighbours.


_COPY = 0.35  # of the link's one direction; 0.78 to 0.87 is usual, and half of it through another socket's memory
_OF_THE_BEST = 0.4  # of its best neighbour's share: a link at half its generation has 0.5
_MEMORY = 0.5  # of the data sheet's; 0.85 to 0.92 is usual
_SANE_COPY_GBPS = 1.0
_OF_THE_MEDIAN = 0.7  # of its neighbours' arithmetic: those of one machine differ by a tenth
_LOW_CLOCK = 0.5  # of the highest: the power limit alone holds an H100 at 0.64 of it
_DIRECT = 0.6  # of the switched board's floor: rings over shared links reach less than a switch
_CARDS_SHARE = 0.15  # of the link: without NVLink an all-reduce crosses it twice, and the host's memory


def work_findings(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    """Yield what is wrong with what was computed, copied and sent."""
    gpus = report.gpus or ()
    for probe in report.probes:
        yield from _probe(probe, _gpu_of(probe, gpus))
    yield from _copies(report)
    yield from _arithmetic(report)
    for load in report.under_load:
        yield from _under_load(load, next((gpu for gpu in gpus if gpu.index == load.index), None), report)
    yield from _collective(report, wanted)


def _gpu_of(probe: DeviceProbe, gpus: tuple[Gpu, ...]) -> Gpu | None:
    return gpus[probe.index] if probe.index < len(gpus) else None


def _probe(probe: DeviceProbe, gpu: Gpu | None) -> Iterator[Finding]:
    index = gpu.index if gpu is not None else probe.index
    if probe.error is not None:
        yield fail("compute", f"it fails at work: {probe.error}", _REPLACE, index)
        return
    if not probe.right:
        yield fail("wrong-result", "a product of matrices came out wrong", _REPLACE, index)
    elif not probe.repeatable:
        yield fail("not-repeatable", "the same product came out different the second time", _REPLACE, index)
    if not probe.memory_right:
        yield fail("wrong-memory", "memory does not give back what was written", _REPLACE, index)
    spec = whole_spec_of(gpu) if gpu is not None else None
    if spec is not None and probe.memory_gbps is not None and probe.memory_gbps < _MEMORY * spec.memory_gbps:
        text = f"its memory reaches {probe.memory_gbps:.0f} GB/s, {_MEMORY * spec.memory_gbps:.0f} expected"
        yield fail("memory-slow", text, "another program may use it; else " + _REPLACE, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """The slower direction of a device's copies, beside what its link carries; `known`: the link is the host's own."""

    index: int
    way: str
    gbps: float
    link: HostLink | None
    known: bool

    @property
    def most(self) -> float | None:
        return link_gbps(self.link.generation, self.link.width) if self.link is not None else None

    @property
    def share(self) -> float:
        return self.gbps / (self.most or self.gbps)

    @property
    def is_low(self) -> bool:
        return self.share < _COPY

    @property
    def sane(self) -> float:
        return min(_SANE_COPY_GBPS, _COPY * self.most) if self.most is not None and self.known else _SANE_COPY_GBPS

    def text(self, expected: str = "") -> str:
        said = f"copies {self.way} it reach {self.gbps:.1f} GB/s"
        if expected or self.link is None or self.most is None:
            return f"{said}, {expected or f'{self.sane:.1f} expected'}"
        of = f"PCIe {self.link.generation} on {self.link.width} lanes"
        return f"{said}, {max(_COPY * self.most, self.sane):.1f} expected of {of}"


def _copies(report: Report) -> Iterator[Finding]:
    """Devices copy one after the other, so that none waits for a switch that another one uses.

    A device that is slower than its neighbours has a fault; that all are alike slow is how the machine is made.
    """
    found = [copied for probe in report.probes if (copied := _copied(probe, report)) is not None]
    alike_slow = []
    for copied in found:
        others = [other.share for other in found if other.index != copied.index and other.link is not None]
        if copied.gbps < copied.sane:
            yield fail("copy-slow", copied.text(), "its PCIe link has failed: " + _REPLACE, copied.index)
        elif copied.link is None:
            continue
        elif others and copied.share < _OF_THE_BEST * max(others):
            text = copied.text(f"its neighbours reach {max(others) * (copied.most or 0.0):.1f}")
            yield fail("copy-slow", text, "its PCIe link has failed in part: " + _REPLACE, copied.index)
        elif copied.is_low and not others and (copied.known or _is_trained_down(copied, report)):
            yield fail("copy-slow", copied.text(), "its PCIe link has failed in part: " + _REPLACE, copied.index)
        elif copied.is_low:
            alike_slow.append(copied)
    if alike_slow:
        worst = min(alike_slow, key=lambda copied: copied.share)
        who = "all its GPUs are alike" if len(alike_slow) > 1 else "nothing shows why"
        yield warn(
            "copies-slow", f"{worst.text()}; {who}", "loading data will be slow; see to the host's PCIe and NUMA"
        )


def _copied(probe: DeviceProbe, report: Report) -> _Copied | None:
    ways = [(gbps, way) for gbps, way in ((probe.to_device_gbps, "to"), (probe.from_device_gbps, "from")) if gbps]
    if not ways:
        return None
    gbps, way = min(ways, key=lambda one: one[0])
    gpu = _gpu_of(probe, report.gpus or ())
    index = gpu.index if gpu is not None else probe.index
    own = next((link for link in report.host_links if link.index == index), None)
    link = own if gpu is None or not gpu.mig else None
    if link is None and gpu is not None and (spec := whole_spec_of(gpu)) is not None:
        link = _least_link(gpu, spec)
    return _Copied(index=index, way=way, gbps=gbps, link=link, known=own is not None)


def _least_link(gpu: Gpu, spec: Spec) -> HostLink:
    """The link of the oldest hosts that the model is sold in: a virtual machine does not show its host's."""
    generation = min(spec.host_generation, gpu.pcie_generation_most or spec.host_generation)
    width = min(spec.pcie_width, gpu.pcie_width_most or spec.pcie_width)
    return HostLink(index=gpu.index, generation=generation, width=width, slot_width=width)


def _is_trained_down(copied: _Copied, report: Report) -> bool:
    load = next((load for load in report.under_load if load.index == copied.index), None)
    link = copied.link
    if load is None or link is None or load.generation is None or load.width is None:
        return False
    return link_gbps(load.generation, load.width) < link_gbps(link.generation, link.width)


def _arithmetic(report: Report) -> Iterator[Finding]:
    """The slowest device sets the pace of all nodes; clocks, heat and limits are named beside its figure."""
    gpus = report.gpus or ()
    reached = {
        gpu.index: (gpu, probe.tflops)
        for probe in report.probes
        if probe.tflops is not None and (gpu := _gpu_of(probe, gpus)) is not None and not gpu.mig
    }
    for index, (gpu, tflops) in reached.items():
        if gpu.virtualization == "VGPU":  # a share of a device, as large as its owner made it
            continue
        model = model_of(gpu.name)
        others = [t for i, (other, t) in reached.items() if i != index and model_of(other.name) == model]
        floor, usual = least_tflops(gpu.name) or 0.0, _OF_THE_MEDIAN * median(others) if others else 0.0
        if tflops >= max(floor, usual):
            continue
        beside = f"{floor:.0f} expected" if tflops < floor else f"its neighbours reach {median(others):.0f}"
        text, hint = _why_slow(gpu, next((load for load in report.under_load if load.index == index), None))
        yield fail("compute-slow", f"it multiplies at {tflops:.0f} TFLOP/s, {beside}{text}", hint, index)


def _why_slow(gpu: Gpu, load: UnderLoad | None) -> tuple[str, str]:
    told = []
    if load is not None and load.sm_clock is not None and gpu.sm_clock_most is not None:
        told.append(f"{load.sm_clock} of {gpu.sm_clock_most} MHz")
    if gpu.power_limit is not None:
        told.append(f"power limit {gpu.power_limit:.0f} W")
    told += load.slowdowns if load is not None else ()
    locked = load is not None and (load.sm_clock or 0) < _LOW_CLOCK * (gpu.sm_clock_most or 0) and not load.slowdowns
    mend = f"sudo nvidia-smi -i {gpu.index} -rgc -rac, if its clocks were set; else " if locked else ""
    return f" ({', '.join(told)})" if told else "", mend + _REPLACE


def _under_load(load: UnderLoad, gpu: Gpu | None, report: Report) -> Iterator[Finding]:
    hard = [reason for reason in load.slowdowns if reason in HARDWARE_SLOWDOWNS]
    if hard:
        text = f"slowed down by the hardware under load: {', '.join(hard)}"
        yield fail("slowdown", text, "cooling or power is failing: " + _REPLACE, load.index)
    elif "sw_thermal_slowdown" in load.slowdowns:
        yield warn(
            "slowdown", "slowed down by the driver under load because it is hot", "see to its cooling", load.index
        )
    spec = whole_spec_of(gpu) if gpu is not None else None
    if gpu is None or load.generation is None:
        return
    own = next((link for link in report.host_links if link.index == load.index), None)
    most = own.generation if own is not None else _least_link(gpu, spec).generation if spec is not None else None
    if most is not None and load.generation < most:
        text = f"PCIe generation {load.generation} under load, {most} expected"
        yield warn("pcie-generation", text, "what copies reach is measured", load.index)


def _collective(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    observed = report.collective
    if observed is None:
        return
    who = f"all-reduce over {observed.ranks} GPUs"
    if observed.error is not None:
        yield fail("collective", f"the {who} failed: {observed.error}", _REPLACE)
    elif not observed.right:
        yield fail("wrong-sum", f"the {who} gave a wrong sum", _REPLACE)
    elif observed.busbw_gbps is not None:
        gpus = (report.gpus or ())[: wanted.gpus]
        floor, joined = _busbw_floor(gpus, report)
        text = f"the {who} reaches {observed.busbw_gbps:.1f} GB/s, {floor:g} expected"
        if observed.busbw_gbps < floor and joined:
            yield fail("collective-slow", text, "NVLink has failed in part, or NCCL_P2P_DISABLE is set: " + _REPLACE)
        elif observed.busbw_gbps < floor:
            yield warn("collective-slow", text, "gradients go through the host's memory: see to its PCIe, ACS and NUMA")


def _busbw_floor(gpus: tuple[Gpu, ...], report: Report) -> tuple[float, bool]:
    """Return the least that these devices reach together, and whether NVLink joins every two of them."""
    specs = [(gpu, spec) for gpu in gpus if (spec := whole_spec_of(gpu)) is not None]
    if not specs:
        return 0.0, False
    ours = {gpu.index for gpu, _ in specs}
    lanes = [lanes_of(kind) for one, other, kind in report.links.pairs if one in ours and other in ours]
    floor = min(spec.busbw_floor_gbps for _, spec in specs)
    cards = min(_CARDS_SHARE * _card_link(gpu, spec, report) for gpu, spec in specs)
    if not all(spec.nvlink for _, spec in specs) or (specs[0][1].nvlink == 1 and 0 in lanes):
        return round(min(floor, cards), 1), False
    if has_switches(report) or specs[0][1].nvlink == 1:
        return floor, True
    spec = specs[0][1]
    return round(_DIRECT * floor * min(1.0, (len(ours) - 1) * spec.direct_nvlink / spec.nvlink), 1), True


def _card_link(gpu: Gpu, spec: Spec, report: Report) -> float:
    own = next((link for link in report.host_links if link.index == gpu.index), None) or _least_link(gpu, spec)
    return link_gbps(own.generation, own.width)
