"""Rules about each device as the driver describes it, and about the links between them."""

from __future__ import annotations

from collections.abc import Iterator

from gpucloud.domain.gate.findings import Finding, fail, warn
from gpucloud.domain.gate.models import Spec, whole_spec_of
from gpucloud.domain.gate.report import Holder, Report
from gpucloud.domain.gate.wanted import GateWanted
from gpucloud.domain.hardware.gpus import Gpu

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
