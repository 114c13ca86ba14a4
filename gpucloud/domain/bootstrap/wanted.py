"""What a job needs of every node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucloud.domain.container import ImageWanted
from gpucloud.domain.data import DataWanted
from gpucloud.domain.gate import GateWanted
from gpucloud.domain.layer import LayerWanted
from gpucloud.domain.machine import MachineWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverWanted:
    """Where a machine that drives its own job finds its order: the store's URL and the key there. No secret is here."""

    store: str
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job needs of every node. `env` may hold secrets: it travels on standard input only.

    `power_off` is the command by which a node ends itself after its paid time, empty for none; `boto3` says that the
    job's store needs it, `torch` that gpucloud installs it where the base has none. `conda` is the environment file,
    below `code`; mirrors are indexes in place of the usual ones. `devices` are the GPUs that are the node's, empty for
    all; `store_endpoint` is where the store answers (`https://host:port`), empty where it is not in S3. `machine`,
    `data` and `gate` are None or empty where the job wants nothing of the kind; `driver` is for jobs that drive
    themselves.
    """

    package: str
    code: str
    setup: str | None
    setup_digest: str
    env: tuple[tuple[str, str], ...]
    torchrun: bool
    gpus: int
    asks_for_gpus: bool
    machine: MachineWanted | None = None
    data: tuple[DataWanted, ...] = ()
    gate: GateWanted | None = None
    image: ImageWanted | None = None
    devices: tuple[str, ...] = ()
    store_endpoint: str = ""
    power_off: tuple[str, ...] = ()
    boto3: bool = False
    torch: bool = False
    conda: str | None = None
    pip_mirror: str | None = None
    torch_mirror: str | None = None
    driver: DriverWanted | None = None

    @property
    def layer(self) -> LayerWanted | None:
        """What the job wants of its Python; None: nothing beside what the base must have."""
        always = self.setup is not None or self.conda is not None
        if not (always or self.boto3 or self.torch):
            return None
        return LayerWanted(digest=self.setup_digest, always=always, boto3=self.boto3, torch=self.torch)


def with_driver(wanted: Wanted, version: str) -> Wanted:
    """Return what is wanted of a later node: the driver of that version, which an earlier node of the job got."""
    return wanted if wanted.machine is None else replace(wanted, machine=replace(wanted.machine, version=version))
