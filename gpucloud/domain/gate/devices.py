"""Rules about each device as the driver describes it, and about the links between them."""

from __future__ import annotations

from collections.abc import Iterator

from gpucloud.domain.gate.findings import Finding, fail, warn
from gpucloud.domain.gate.models import Spec, spec_of
from gpucloud.domain.gate.report import Report
from gpucloud.domain.gate.wanted import GateWanted
from gpucloud.domain.hardware.gpus import Gpu

# The hardware's own: heat, or the power supply's brake. `sw_power_cap` is normal under load (NVML, event reasons).
_HARDWARE_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_HOT = 85  # °C: slowdown begins at 87 to 92 on these models (nvidia-smi -q, "GPU Slowdown Temp")
_RESET = "reset the GPU (nvidia-smi --gpu-reset), or replace the machine"
_REPLACE = "replace the machine"


def device_findings(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    """Yield what is wrong with devices and links."""
    for gpu in report.gpus or ():
        yield from _memory(gpu)
        yield from _heat(gpu)
        yield from _bus(gpu)
        if gpu.mig:
            yield warn(
                "mig", "it is split (MIG): no more than one part is used", "machine: {mig: …} or -mig 0", gpu.index
            )
        if gpu.fabric is not None and gpu.fabric != "Completed":
            text = f"its NVSwitch fabric is {gpu.fabric!r}, 'Completed' expected"
            yield fail("fabric", text, "sudo systemctl restart nvidia-fabricmanager", gpu.index)
    yield from _links(report)


def _memory(gpu: Gpu) -> Iterator[Finding]:
    spec = spec_of(gpu.name)
    if spec is not None and gpu.memory_mib < 0.9 * spec.memory_mib and not gpu.mig:
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
    hard = [reason for reason in gpu.slowdowns if reason in _HARDWARE_SLOWDOWNS]
    if hard:
        text = f"slowed down by the hardware now: {', '.join(hard)}"
        yield fail("slowdown", text, "cooling or power is failing: " + _REPLACE, gpu.index)
    elif "sw_thermal_slowdown" in gpu.slowdowns:
        yield warn("slowdown", "slowed down by the driver because it is hot", "see to its cooling", gpu.index)
    if gpu.temperature is not None and gpu.temperature >= _HOT:
        yield warn("hot", f"{gpu.temperature} °C, less than {_HOT} expected", "see to its cooling", gpu.index)


def _bus(gpu: Gpu) -> Iterator[Finding]:
    """Lanes do not come and go with load, generations do: those are judged by what was copied."""
    spec, width = spec_of(gpu.name), gpu.pcie_width
    most = min(spec.pcie_width, gpu.pcie_width_most or spec.pcie_width) if spec else gpu.pcie_width_most
    if width is None or most is None or width >= most:
        return
    text = f"PCIe on {width} lanes, {most} expected"
    if width * 4 <= most:
        yield fail("pcie-width", text, "a bad slot or riser: " + _REPLACE, gpu.index)
    else:
        yield warn("pcie-width", text, "copies to it take longer; what they reach is measured", gpu.index)


def _links(report: Report) -> Iterator[Finding]:
    specs = {gpu.index: spec for gpu in report.gpus or () if (spec := spec_of(gpu.name)) is not None and not gpu.mig}
    for one, other, kind in report.links.pairs:
        if one < other and one in specs and other in specs:
            yield from _pair(one, other, kind, specs[one])
    for index, up, down in report.links.ports:
        if index in specs and specs[index].nvlink > 1 and up and down:
            yield fail("nvlink", f"{down} of {up + down} NVLinks are down", _RESET, index)


def _pair(one: int, other: int, kind: str, spec: Spec) -> Iterator[Finding]:
    lanes = int(kind[2:]) if kind.startswith("NV") and kind[2:].isdigit() else 0
    if lanes >= spec.nvlink:
        return
    expected = f"NV{spec.nvlink} expected between two {spec.model}"
    hint = "sudo systemctl restart nvidia-fabricmanager, or replace the machine"
    text = f"GPU {one} and GPU {other} are joined by {kind}, {expected}"
    if spec.model == "V100":  # a hybrid cube: some pairs have no link of their own
        yield warn("nvlink", text, "collectives go around")
    else:
        yield fail("nvlink", text, hint)
