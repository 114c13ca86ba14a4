"""What can be seen of this machine's GPUs without work: who holds them, how they are joined, what ways they have."""

from __future__ import annotations

import os
import pwd
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.agent.metrics.kernel_log import KernelErrors, kernel_log
from gpucloud.domain.node.gate.models import link_gbps
from gpucloud.domain.node.gate.report import GateOrder, Holder, HostLink, Links, Report, failures
from gpucloud.domain.node.gate.rules import held_findings
from gpucloud.domain.node.hardware import Gpu, GpuProcess
from gpucloud.system import smi

_RELEASES_WITHIN_S = 10.0  # memory of a program that was just ended comes back after seconds
_LOOK_S = 1.0


def look(order: GateOrder, *, busy: bool = False) -> Report:
    """Return what nvidia-smi, the PCI bus and the kernel's log say; NVLink too where the whole check is wanted.

    The GPUs are those that are the node's, without such as CUDA_VISIBLE_DEVICES says. Such as are held still are
    looked at again for a while: who holds them may be at its end.
    """
    observed = _seen(order, busy=busy)
    until = time.monotonic() + _RELEASES_WITHIN_S
    while failures(held_findings(observed, order.wanted)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
        observed = _seen(order, busy=busy)
    every = observed.listed > 0
    return replace(observed, links=links(smi.said) if order.wanted.full and every else Links())


def with_log(report: Report, log: KernelErrors) -> Report:
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
        on_the_bus=() if stand_in else smi.on_the_bus(),
        host_links=() if stand_in else host_links(gpus or (), smi.PCI),
        holders=() if stand_in else holders(gpus or ()),
        busy=busy or stand_in,
        stand_in=stand_in,
    )
    # Of stand-ins neither the kernel knows nor the bus.
    return report if stand_in else with_log(report, kernel_log(sudo=order.sudo))


# Which programs hold the devices, and whose they are.


_PROC = Path("/proc")
# They serve whoever computes, and keep a few MiB of every device while nobody does.
_SERVICES = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nv-hostengine", "nvidia-persistenced")


def holders(gpus: tuple[Gpu, ...], proc: Path = _PROC) -> tuple[Holder, ...]:
    """Return the programs that hold these devices, services of the driver's own left out."""
    return tuple(
        _holder(gpu, process, proc)
        for gpu in gpus
        for process in gpu.processes
        if process.name.rpartition("/")[2].split(" ")[0] not in _SERVICES
    )


def _holder(gpu: Gpu, process: GpuProcess, proc: Path) -> Holder:
    try:
        owner = (proc / str(process.pid)).stat().st_uid
    except OSError:  # it ended, or hides from us
        owner = None
    return Holder(
        gpu=gpu.index,
        pid=process.pid,
        name=process.name,
        owner=_name(owner),
        own=owner == os.getuid() and owner != 0,
        computes="C" in process.kind,
        used_mib=process.used_mib,
    )


def _name(owner: int | None) -> str:
    if owner is None:
        return ""
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


# What a device's own way to the host can carry, as the kernel tells of the ports above it.


_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_GUESTS = ("Pass-Through", "VGPU")


def host_links(gpus: tuple[Gpu, ...], devices: Path) -> tuple[HostLink, ...]:
    """Return each device's way; of one in a virtual machine none, for the ports there are not the host's.

    A link carries what both its ends can (`max_link_speed`, `max_link_width`), a way what its narrowest link can. Below
    a switch several devices share one way, and copy one after the other when they are tried.
    """
    return tuple(
        link
        for gpu in gpus
        if gpu.pci and gpu.virtualization not in _GUESTS and (link := _link(gpu, devices)) is not None
    )


def _link(gpu: Gpu, devices: Path) -> HostLink | None:
    place = devices / address(gpu.pci)
    try:
        place = place.resolve(strict=True)
    except OSError:
        return None
    ports = []
    while (place / "vendor").exists():
        ports.append(_port(place))
        place = place.parent
    able = [port for port in ports if port is not None]
    if len(ports) < 2 or len(able) < len(ports):  # on the root bus itself, or a port that does not say
        return None
    generation, width = min(able, key=lambda port: link_gbps(*port))
    return HostLink(index=gpu.index, generation=generation, width=width, slot_width=min(able[0][1], able[1][1]))


def address(pci: str) -> str:
    """Return a device's address as the kernel writes it: `0000:3b:00.0` of nvidia-smi's `00000000:3B:00.0`."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}"


def _port(place: Path) -> tuple[int, int] | None:
    """Return what a port can do, generation and lanes: `16.0 GT/s PCIe` and `16`; unknown ones say so, or 255."""
    try:
        speed = (place / "max_link_speed").read_text().split(" ")[0]
        width = int((place / "max_link_width").read_text())
    except (OSError, ValueError):
        return None
    generation = _GENERATIONS.get(speed if "." in speed else f"{speed}.0")
    return (generation, width) if generation is not None and 0 < width <= 32 else None


# How devices are joined, as nvidia-smi writes it.


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")
_PORTS = re.compile(r"GPU (\d+):")


def links(say: Callable[..., str]) -> Links:
    """Return the links; `say` runs nvidia-smi with these words."""
    return Links(pairs=pairs(say("topo", "-m")), ports=ports(say("nvlink", "-s")))


def pairs(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return what `nvidia-smi topo -m` writes for every two devices, the lower index first."""
    lines = _COLOUR.sub("", text).splitlines()
    columns: list[int] = []
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not columns and "GPU0" in cells[1:]:
            columns = [int(m[1]) for cell in cells[1:] if (m := _GPU.fullmatch(cell))]
        elif columns and (row := _GPU.fullmatch(cells[0])):
            one = int(row[1])
            found += [(one, other, kind) for other, kind in zip(columns, cells[1:], strict=False) if one < other]
    return tuple(found)


def ports(text: str) -> tuple[tuple[int, int, int], ...]:
    """Return for each device how many links `nvidia-smi nvlink -s` calls up (with a speed) and down (`<inactive>`)."""
    found: dict[int, list[int]] = {}
    device = -1
    for line in text.splitlines():
        head = _PORTS.match(line)
        if head:
            device = int(head[1])
        elif device >= 0 and line.strip().startswith("Link "):
            counts = found.setdefault(device, [0, 0])
            counts["inactive" in line] += 1
    return tuple((index, up, down) for index, (up, down) in sorted(found.items()))
