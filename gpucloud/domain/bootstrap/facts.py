"""What a node says of itself, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.container import ImageFact
from gpucloud.domain.gate import GateFact
from gpucloud.domain.hardware.gpus import Gpu
from gpucloud.domain.layer import LayerWanted
from gpucloud.domain.machine import MachineFact


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the node's `facts` command is asked, on its standard input.

    `layer` is what the job wants of its Python, None if it takes the base's as it is. `data` are the keys of data sets,
    `image` the job's container image. `visit`: a supervisor asks, and not the node itself.
    """

    layer: LayerWanted | None = None
    data: tuple[str, ...] = ()
    image: str = ""
    visit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The job's own environment; `torch` and `boto3` are their versions for its Python.

    `torch_cuda` is what its torch was built for, None: the CPU; `torch_index` whose wheels suit this machine's driver.
    `uv` is the version that made it, None: pip did. `packages` is what was installed into it, as `pip freeze` says it.
    """

    key: str
    python: str
    ready: bool
    torch: str | None
    boto3: str | None = None
    torch_cuda: str | None = None
    torch_index: str = ""
    uv: str | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node is and has, from one call of the package's `facts`.

    `python` is the base interpreter (GPUCLOUD_PYTHON on the node, else `python3`), `torch` and `boto3` their versions
    there, `torch_cuda` the CUDA of that torch, `packages` what the base has; `package` is the SHA-256 of the zip that
    answered; `gpus` is None where there is no `nvidia-smi`, and `gpu_fault` is what it said when it failed;
    `stand_in` says that they are named by an emulated machine and not there;
    `agent_package` is the zip of the agent that runs, if one does. `machine` is how its driver and system software were
    left on this boot, `gate` what its last check on this boot said, `staged` the keys of the data sets that are whole,
    `image` the job's image if it was pulled. `boots_itself`: its own bootstrap is under way.
    `driver_package` is the zip of the job's driver, if one runs.
    """

    python: str
    version: tuple[int, ...]
    torch: str | None
    root: str
    package: str
    free_bytes: int
    cpus: int
    time: datetime
    boot_id: str
    gpus: tuple[Gpu, ...] | None
    gpu_fault: str | None
    agent_package: str | None
    agent_busy: bool
    layer: Layer | None
    boto3: str | None = None
    torch_cuda: str | None = None
    packages: tuple[str, ...] = ()
    machine: MachineFact | None = None
    staged: tuple[str, ...] = ()
    gate: GateFact | None = None
    image: ImageFact | None = None
    boots_itself: bool = False
    stand_in: bool = False
    driver_package: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """A node without our package, or whose Python is too old to read it; `python` is None where there is none."""

    python: str | None
    version: tuple[int, ...] | None


def parse_facts(stdout: bytes) -> Facts | Bare:
    """Return what the node answered; the last line counts (a login banner may come first). Raises Malformed."""
    lines = stdout.strip().splitlines()
    last = lines[-1] if lines else b""
    try:
        return from_json(Facts, last)
    except Malformed:
        return from_json(Bare, last)
