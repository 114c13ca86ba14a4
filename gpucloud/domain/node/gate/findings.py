"""What a machine must show at the gate, the findings that a judgement is made of, and the check that comes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.gate.report import Report
from gpucloud.domain.node.hardware.gpus import Gpu

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

    `full`: compute and collectives are tried too. `torch`: the job needs it, on those devices.
    """

    gpus: int
    models: tuple[str, ...] = ()
    vram_gib: int | None = None
    full: bool = True
    torch: bool = True


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
