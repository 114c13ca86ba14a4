"""What can be seen of this machine's GPUs without putting them to work."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.gate.holders import holders
from gpucloud.agent.gate.hostlinks import host_links
from gpucloud.agent.gate.kernel_log import LogSeen, kernel_log
from gpucloud.agent.gate.links import links
from gpucloud.domain.gate.devices import held_findings
from gpucloud.domain.gate.findings import failures
from gpucloud.domain.gate.report import Links, Report
from gpucloud.domain.gate.wanted import GateOrder

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers (PCI class codes); bridges and audio functions are others
_RELEASES_WITHIN_S = 10.0  # memory of a program that was just ended comes back after seconds
_LOOK_S = 1.0


def look(order: GateOrder, *, busy: bool = False) -> Report:
    """Return what nvidia-smi, the PCI bus and the kernel's log say; NVLink too where the whole check is wanted.

    The GPUs are those that are the node's, without such as CUDA_VISIBLE_DEVICES says. Such as are held still are
    looked at again for a while: who holds them may be at its end.
    """
    seen = _seen(order, busy=busy)
    until = time.monotonic() + _RELEASES_WITHIN_S
    while failures(held_findings(seen, order.wanted)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
        seen = _seen(order, busy=busy)
    every = seen.listed > 0
    return replace(seen, links=links(smi.said) if order.wanted.full and every else Links())


def with_log(report: Report, log: LogSeen) -> Report:
    """Return the report with what the kernel's log says now."""
    return replace(report, xids=log.xids, switch_errors=log.switch_errors, kernel_log=log.unread, newest=log.newest)


def _seen(order: GateOrder, *, busy: bool) -> Report:
    chosen = ",".join(order.devices) or os.environ.get("CUDA_VISIBLE_DEVICES")
    every, fault = smi.gpus({})
    stand_in = smi.are_stand_ins()
    gpus = None if every is None else smi.visible(every, chosen, smi.mig_parts(chosen))
    report = Report(
        at=datetime.now(timezone.utc),
        host=socket.gethostname(),
        gpus=gpus,
        gpu_fault=fault,
        listed=len(every or ()),
        on_the_bus=() if stand_in else on_the_bus(_PCI),
        host_links=() if stand_in else host_links(gpus or (), _PCI),
        holders=() if stand_in else holders(gpus or ()),
        busy=busy or stand_in,
        stand_in=stand_in,
    )
    # Of stand-ins neither the kernel knows nor the bus.
    return report if stand_in else with_log(report, kernel_log(sudo=order.sudo))


def on_the_bus(folder: Path) -> tuple[str, ...]:
    """Return the addresses of NVIDIA's devices on the PCI bus; one that fell off may still be here."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(e.name for e in entries if _read(e / "vendor") == _NVIDIA and _read(e / "class")[:6] in _DISPLAY)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
