"""Rules about what devices did when they were put to work."""

from __future__ import annotations

from collections.abc import Iterator

from gpucloud.domain.gate.findings import Finding, fail, warn
from gpucloud.domain.gate.models import Spec, spec_of
from gpucloud.domain.gate.report import DeviceProbe, Report, UnderLoad
from gpucloud.domain.gate.wanted import GateWanted
from gpucloud.domain.hardware.gpus import Gpu

_COPY = 0.35  # of the link's one direction; 0.85 is what H200s reach, a link at half its generation 0.43
_MEMORY = 0.5  # of the data sheet's; 0.85 to 0.92 is usual
_SANE_COPY_GBPS = 1.0
_REPLACE = "replace the machine"


def work_findings(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    """Yield what is wrong with what was computed, copied and sent."""
    gpus = report.gpus or ()
    for probe in report.probes:
        gpu = gpus[probe.index] if probe.index < len(gpus) else None
        yield from _probe(probe, gpu)
    for load in report.under_load:
        yield from _under_load(load, next((gpu for gpu in gpus if gpu.index == load.index), None))
    yield from _collective(report, wanted)


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
    spec = spec_of(gpu.name) if gpu is not None and not gpu.mig else None
    floor = _COPY * spec.pcie_gbps if spec is not None else _SANE_COPY_GBPS
    for copied, way in ((probe.to_device_gbps, "to"), (probe.from_device_gbps, "from")):
        if copied is not None and copied < floor:
            text = f"copies {way} it reach {copied:.1f} GB/s, {floor:.1f} expected"
            yield fail("copy-slow", text, "its PCIe link has failed in part: " + _REPLACE, index)
    if spec is not None and probe.memory_gbps is not None and probe.memory_gbps < _MEMORY * spec.memory_gbps:
        text = f"its memory reaches {probe.memory_gbps:.0f} GB/s, {_MEMORY * spec.memory_gbps:.0f} expected"
        yield fail("memory-slow", text, "another program may use it; else " + _REPLACE, index)


def _under_load(load: UnderLoad, gpu: Gpu | None) -> Iterator[Finding]:
    if "hw_thermal_slowdown" in load.slowdowns or "hw_power_brake_slowdown" in load.slowdowns:
        text = f"slowed down by the hardware under load: {', '.join(load.slowdowns)}"
        yield fail("slowdown", text, "cooling or power is failing: " + _REPLACE, load.index)
    if gpu is None or load.generation is None:
        return
    spec: Spec | None = spec_of(gpu.name)
    most = min(spec.pcie_generation, gpu.pcie_generation_most or spec.pcie_generation) if spec else None
    if most is not None and load.generation < most:
        text = f"PCIe generation {load.generation} under load, {most} expected"
        yield warn("pcie-generation", text, "what copies reach is measured", load.index)


def _collective(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    seen = report.collective
    if seen is None:
        return
    who = f"all-reduce over {seen.ranks} GPUs"
    if seen.error is not None:
        yield fail("collective", f"the {who} failed: {seen.error}", _REPLACE)
    elif not seen.right:
        yield fail("wrong-sum", f"the {who} gave a wrong sum", _REPLACE)
    elif seen.busbw_gbps is not None:
        gpus = (report.gpus or ())[: wanted.gpus]
        floors = [spec.busbw_floor_gbps for gpu in gpus if (spec := spec_of(gpu.name)) is not None and not gpu.mig]
        if floors and seen.busbw_gbps < min(floors):
            text = f"the {who} reaches {seen.busbw_gbps:.1f} GB/s, {min(floors):g} expected"
            yield fail("collective-slow", text, "NVLink has failed in part, or NCCL_P2P_DISABLE is set: " + _REPLACE)
