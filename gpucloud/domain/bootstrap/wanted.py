"""What a job needs of every node."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.data import DataWanted
from gpucloud.domain.gate import GateWanted
from gpucloud.domain.machine import MachineWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job needs of every node. `env` may hold secrets: it travels on standard input only.

    `power_off` is the command by which a node ends itself after its paid time, empty for none; `boto3` says that the
    job's store needs it. `devices` are the GPUs that are the node's, empty for all; `store_endpoint` is where the store
    answers (`https://host:port`), empty where it is not in S3. `machine`, `data` and `gate` are None or empty where the
    job wants nothing of the kind.
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
    devices: tuple[str, ...] = ()
    store_endpoint: str = ""
    power_off: tuple[str, ...] = ()
    boto3: bool = False
