"""What a device's own way to the host can carry, as the kernel tells of the ports above it."""

from __future__ import annotations

from pathlib import Path

from gpucloud.domain.gate.models import link_gbps
from gpucloud.domain.gate.report import HostLink
from gpucloud.domain.hardware.gpus import Gpu

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
