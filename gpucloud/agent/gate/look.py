"""What can be seen of this machine's GPUs without putting them to work."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.gate.kernel_log import xids
from gpucloud.agent.gate.links import links
from gpucloud.domain.gate.report import Links, Report

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers (PCI class codes); bridges and audio functions are others


def look(devices: tuple[str, ...] = (), *, full: bool = False) -> Report:
    """Return what nvidia-smi, the PCI bus and the kernel's log say; with `full`, NVLink too.

    `devices` are the GPUs that are the node's, empty: as CUDA_VISIBLE_DEVICES says.
    """
    chosen = ",".join(devices) or os.environ.get("CUDA_VISIBLE_DEVICES")
    every, fault = smi.gpus({})
    stand_in = smi.are_stand_ins()
    found, unread = ((), None) if stand_in else xids()  # of stand-ins neither the kernel knows nor the bus
    return Report(
        at=datetime.now(timezone.utc),
        host=socket.gethostname(),
        gpus=None if every is None else smi.visible(every, chosen),
        gpu_fault=fault,
        listed=len(every or ()),
        on_the_bus=() if stand_in else on_the_bus(_PCI),
        links=links(_say) if full and every else Links(),
        xids=found,
        kernel_log=unread,
        stand_in=stand_in,
    )


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


def _say(*words: str) -> str:
    """Return what nvidia-smi answers, empty when it fails: older ones and virtual machines know less."""
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    try:
        done = subprocess.run(
            (program, *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
