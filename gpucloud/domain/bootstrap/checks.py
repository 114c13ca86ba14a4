"""What no step can mend, and what the user should know of a node that works."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.errors import NodeError
from gpucloud.domain.layer import BOTO3, suffices

MINIMUM_PYTHON = (3, 10)
MINIMUM_FREE_BYTES = 1 << 30
_TOLERATED_SKEW = timedelta(seconds=2)


def require_python(python: str | None, version: tuple[int, ...] | None) -> None:
    """Raise NodeError unless the node's base interpreter can run the package."""
    hint = "install Python 3.10 or newer on the node, or set GPUCLOUD_PYTHON there"
    if python is None or version is None:
        raise NodeError("no python3 on the node", hint=hint)
    if version < MINIMUM_PYTHON:
        found = ".".join(str(part) for part in version)
        raise NodeError(f"{python} is Python {found}; 3.10 is the oldest that works", hint=hint)


def check(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError for what no step can mend: a full disk, a driver that does not answer a job without a gate."""
    if facts.free_bytes < MINIMUM_FREE_BYTES:
        raise NodeError(
            f"{facts.root}: {facts.free_bytes / 2**30:.2f} GiB free, 1 GiB is the least that works",
            hint="free some space there, or take nodes with a larger disk",
        )
    if facts.gpu_fault is not None and wanted.gate is None:
        raise NodeError(f"nvidia-smi failed: {facts.gpu_fault}", hint="replace the node, or install its driver again")


def check_torch(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when torchrun would not start: torch is neither in the layer nor in the base interpreter."""
    if wanted.torchrun and facts.torch is None and (facts.layer is None or facts.layer.torch is None):
        raise NodeError(
            f"no torch for {job_python(facts)}",
            hint="setup: pip install torch",
        )


def check_boto3(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when the job's Python could not reach the store: no boto3 that knows conditional writes."""
    found = facts.layer.boto3 if facts.layer else facts.boto3
    if wanted.boto3 and not suffices(found):
        said = f"boto3 {found}; {BOTO3} is needed" if found else "no boto3"
        raise NodeError(f"the store is in S3, and {job_python(facts)} has {said}", hint=f"setup: pip install '{BOTO3}'")


def findings(facts: Facts, wanted: Wanted, skew: timedelta) -> tuple[str, ...]:
    """Return what the user should know of a node that works; `skew` is the node's clock minus the caller's."""
    found = []
    if not facts.gpus:
        found.append("no NVIDIA device: CPU, gloo")
    found += facts.gate.remarks if facts.gate is not None and wanted.gate is not None else ()
    if abs(skew) > _TOLERATED_SKEW:
        side = "ahead of" if skew > timedelta(0) else "behind"
        found.append(f"the node's clock is {abs(skew).total_seconds():.0f} s {side} this machine's")
    return tuple(found)


def job_python(facts: Facts) -> str:
    """Return the interpreter that runs the job: the layer's, or the base one for a job that needs no layer."""
    return facts.layer.python if facts.layer else facts.python
