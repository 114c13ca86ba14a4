"""This machine's part in the check of a gang."""

from __future__ import annotations

from gpucloud import smi
from gpucloud.agent.gate.workers import work
from gpucloud.agent.interface import carrying
from gpucloud.domain.collectives import on_interface
from gpucloud.domain.gate.gang import GangOrder, GangSeen
from gpucloud.domain.gate.probing import GANG, ProbeOrder


def take_part(order: GangOrder) -> GangSeen:
    """Return what this member saw of the others."""
    if order.device == "cuda" and smi.are_stand_ins():
        return GangSeen(rank=order.rank, met=True, arrived=tuple(range(order.world)))
    probe = ProbeOrder(
        kind=GANG,
        rank=order.rank,
        world=order.world,
        address=order.address,
        port=order.port,
        device=order.device,
        megabytes=order.megabytes,
        patience_s=order.limit_s / 2,
    )
    (heard,) = work(order.python, (probe,), _env(order), limit_s=order.limit_s)
    errors = [one.error for one in heard.said if one.error is not None]
    pairs = tuple(one.pair for one in heard.said if one.pair is not None)
    complaint = None if pairs and not heard.ended else heard.complaint  # else it is a library's warning
    return GangSeen(
        rank=order.rank,
        met=any(one.met for one in heard.said),
        arrived=next((one.arrived for one in heard.said if one.arrived), ()),
        pairs=pairs,
        error=errors[0] if errors else complaint or ("it hangs" if heard.ended else None),
    )


def _env(order: GangOrder) -> dict[str, str]:
    interface = order.interface or carrying(order.own_address)
    found = on_interface(interface) if interface else {}
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(order.devices)} if order.devices else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **found, **chosen, **dict(order.env), "OMP_NUM_THREADS": "1"}
