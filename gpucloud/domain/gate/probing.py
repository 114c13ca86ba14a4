"""What a probe in the job's Python is told, and what it says line by line."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.gate.gang import PairSeen
from gpucloud.domain.gate.report import CollectiveProbe, DeviceProbe, TorchSeen

MACHINE, GANG = "machine", "gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOrder:
    """One worker's part. `kind` is MACHINE (its device, then an all-reduce with the others) or GANG (pair by pair).

    `device` is `cuda` or `cpu`; `megabytes` is the size of messages; `patience_s` how long the others are waited for.
    """

    kind: str
    rank: int
    world: int
    address: str
    port: int
    device: str
    megabytes: int
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One line of a worker: what it has found since the last one."""

    torch: TorchSeen | None = None
    probe: DeviceProbe | None = None
    collective: CollectiveProbe | None = None
    met: bool = False
    arrived: tuple[int, ...] = ()
    pair: PairSeen | None = None
    error: str | None = None
