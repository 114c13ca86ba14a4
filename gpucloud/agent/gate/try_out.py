"""Putting this machine's GPUs to work, and adding what came of it to the report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpucloud import smi
from gpucloud.agent.gate.workers import Heard, free_port, work
from gpucloud.domain.gate.probing import MACHINE, ProbeOrder
from gpucloud.domain.gate.report import CollectiveProbe, DeviceProbe, Report, TorchSeen, UnderLoad
from gpucloud.domain.gate.wanted import GateOrder
from gpucloud.domain.hardware.gpus import Gpu

_LIMIT_S = 240.0  # a cold disk needs a minute to import torch on eight ranks at once
_MEGABYTES = 256
_LOOK_LIMIT_S = 5.0  # beside workers that have a limit of their own


def try_out(order: GateOrder, report: Report, *, device: str = "cuda", limit_s: float = _LIMIT_S) -> Report:
    """Return the report with what the job's torch made of the devices, one worker on each."""
    # Too few devices are found out without workers that wait for those that have none.
    most = len(report.gpus or ()) if device == "cuda" else order.wanted.gpus
    count, port = max(1, min(order.wanted.gpus, most)), free_port()
    orders = tuple(
        ProbeOrder(
            kind=MACHINE, rank=rank, world=count, address="127.0.0.1", port=port, device=device, megabytes=_MEGABYTES
        )
        for rank in range(count)
    )
    watched = _Watched(tuple(gpu.uuid for gpu in report.gpus or ()))
    heard = work(order.python, orders, _env(order), limit_s=limit_s, beside=watched.look)
    torch = _torch(heard)
    able = torch.available and torch.devices >= count if device == "cuda" else torch.version is not None
    return replace(
        report,
        torch=torch,
        probes=tuple(_probe(rank, one) for rank, one in enumerate(heard)) if able else (),
        collective=_collective(heard, device) if able and count > 1 else None,
        under_load=watched.best(),
    )


@dataclass(slots=True)
class _Watched:
    """The devices while they work: a PCIe link that rests is slow, and heat comes with load."""

    uuids: tuple[str, ...]
    seen: dict[int, UnderLoad] = field(default_factory=dict)

    def look(self) -> None:
        for gpu in smi.gpus({}, timeout_s=_LOOK_LIMIT_S)[0] or () if self.uuids else ():
            if gpu.uuid in self.uuids:
                self.seen[gpu.index] = _better(self.seen.get(gpu.index), gpu)

    def best(self) -> tuple[UnderLoad, ...]:
        return tuple(load for _, load in sorted(self.seen.items()))


def _better(before: UnderLoad | None, gpu: Gpu) -> UnderLoad:
    old = before or UnderLoad(index=gpu.index, generation=None, width=None)
    return UnderLoad(
        index=gpu.index,
        generation=max(filter(None, (old.generation, gpu.pcie_generation)), default=None),
        width=max(filter(None, (old.width, gpu.pcie_width)), default=None),
        slowdowns=tuple(sorted({*old.slowdowns, *gpu.slowdowns})),
        sm_clock=max(filter(None, (old.sm_clock, gpu.sm_clock)), default=None),
    )


def _env(order: GateOrder) -> dict[str, str]:
    # torch numbers devices by speed unless told otherwise; nvidia-smi numbers them by their place on the bus.
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(order.devices)} if order.devices else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "1", **chosen}


def _torch(heard: tuple[Heard, ...]) -> TorchSeen:
    said = [one.torch for worker in heard for one in worker.said if one.torch is not None]
    if said:
        return said[0]
    return TorchSeen(error=heard[0].complaint or "the job's Python said nothing")


def _probe(rank: int, heard: Heard) -> DeviceProbe:
    said = [one.probe for one in heard.said if one.probe is not None]
    if said:
        return said[0]
    return DeviceProbe(index=rank, error="it hangs" if heard.ended else heard.complaint or "its worker died")


def _collective(heard: tuple[Heard, ...], device: str) -> CollectiveProbe:
    said = [one.collective for worker in heard for one in worker.said if one.collective is not None]
    if said:
        return said[0]
    complaints = [worker.complaint for worker in heard if worker.complaint and not worker.ended]
    error = complaints[0] if complaints else f"it hangs: {sum(worker.ended for worker in heard)} ranks did not end"
    return CollectiveProbe(backend="nccl" if device == "cuda" else "gloo", ranks=len(heard), error=error)
