"""What no step can mend, and what the user should know of a node that works."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.bootstrap.facts import Facts
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.layer import BOTO3, USUAL_INDEX, suffices, torch_index, why_no_gpu

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


def check_torch_build(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when the job's torch cannot use the GPUs that it asked for: it would run on the CPU."""
    reason = _idle_gpus(facts, wanted)
    if reason is not None and wanted.asks_for_gpus:
        index = facts.layer.torch_index if facts.layer else torch_index(_driver(facts), _names(facts))
        url = f"{(wanted.torch_mirror or USUAL_INDEX).rstrip('/')}/{index}"
        is_bases = facts.layer is None or (facts.layer.torch, facts.layer.torch_cuda) == (facts.torch, facts.torch_cuda)
        again = "-I " if is_bases else ""  # pip is content with what the base has
        raise NodeError(reason, hint=f"setup: pip install {again}torch --index-url {url}")


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
    idle = None if wanted.asks_for_gpus else _idle_gpus(facts, wanted)
    if idle is not None:
        found.append(f"{idle}: the job runs on the CPU")
    found += facts.gate.remarks if facts.gate is not None and wanted.gate is not None else ()
    if is_wrong(skew):
        side = "ahead of" if skew > timedelta(0) else "behind"
        found.append(f"the node's clock is {abs(skew).total_seconds():.0f} s {side} this machine's")
    return tuple(found)


def is_wrong(skew: timedelta) -> bool:
    """Whether the node's clock differs by more than the question for it takes, and than anything minds."""
    return abs(skew) > _TOLERATED_SKEW


def _idle_gpus(facts: Facts, wanted: Wanted) -> str | None:
    """Why a script under torchrun would leave this node's GPUs unused; None where it would not, or was told to."""
    torch, cuda = (facts.layer.torch, facts.layer.torch_cuda) if facts.layer else (facts.torch, facts.torch_cuda)
    hidden = dict(wanted.env).get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not facts.gpus or facts.stand_in or torch is None or hidden or not wanted.torchrun:
        return None
    return why_no_gpu(torch, cuda, _driver(facts))


def _driver(facts: Facts) -> str:
    return facts.gpus[0].driver if facts.gpus else ""


def _names(facts: Facts) -> tuple[str, ...]:
    return tuple(gpu.name for gpu in facts.gpus or ())


def job_python(facts: Facts) -> str:
    """Return the interpreter that runs the job: the layer's, or the base one for a job that needs no layer."""
    return facts.layer.python if facts.layer else facts.python
