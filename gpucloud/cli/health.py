"""A checked machine as text for people, or as an object."""

from __future__ import annotations

from typing import Any

from gpucloud.cli.render import table
from gpucloud.domain import codec
from gpucloud.domain.gate.check import Checked
from gpucloud.domain.gate.figures import figures
from gpucloud.domain.gate.findings import Severity, failures
from gpucloud.domain.hardware.gpus import Gpu
from gpucloud.domain.shown import in_one_line

_WORTH_TELLING_S = 0.1


def is_fit(checked: Checked) -> bool:
    """Whether nothing keeps the machine out."""
    return not failures(checked.findings)


def checked_json(checked: Checked) -> dict[str, Any]:
    """Return GPUs, findings and figures as an object; the keys are those of `doctor --json` in the README."""
    return {
        "gpus": codec.plain(checked.report.gpus or ()),
        "findings": codec.plain(checked.findings),
        "figures": dict(figures(checked.report)),
        "torch": codec.plain(checked.report.torch),
    }


def checked_text(checked: Checked) -> str:
    """Return a table of GPUs, what was measured, and every finding with what to do."""
    report = checked.report
    parts = [_gpus(report.gpus) if report.gpus else "no NVIDIA GPU here: jobs run on the CPU"]
    measured = [f"{name} {figure}" for name, figure in figures(report) if name != "took"]
    if measured:
        parts.append(in_one_line("measured: " + ", ".join(measured)))
    words = {Severity.FAIL: "FAILED", Severity.WARN: "warning"}
    parts += [in_one_line(f"{words[one.severity]}: {one}; {one.hint}") for one in checked.findings]
    took = f", after {report.seconds:.1f} s" if report.seconds >= _WORTH_TELLING_S else ""
    return "\n".join([*parts, f"{'fit' if is_fit(checked) else 'not fit'}{took}"])


def _gpus(gpus: tuple[Gpu, ...]) -> str:
    head = ("GPU", "model", "driver", "memory", "temp", "power", "PCIe", "ECC errors", "fabric", "slowed by")
    return table([head, *(_row(gpu) for gpu in gpus)])


def _row(gpu: Gpu) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.name.removeprefix("NVIDIA "),
        gpu.driver,
        f"{(gpu.memory_used_mib or 0) / 1024:.1f}/{gpu.memory_mib / 1024:.1f} GiB"
        if gpu.memory_mib
        else "the machine's",
        _or_dash(gpu.temperature, " °C"),
        _or_dash(round(gpu.power) if gpu.power is not None else None, " W"),
        f"gen {_or_dash(gpu.pcie_generation)} ×{_or_dash(gpu.pcie_width)}",
        _or_dash(gpu.ecc_uncorrected),
        gpu.fabric or "-",
        ", ".join(gpu.slowdowns) or "-",
    )


def _or_dash(value: object, unit: str = "") -> str:
    return f"{value}{unit}" if value is not None else "-"
