"""What `nvidia-smi` and the PCI bus say of this machine's GPUs; asked by the agent and by the embedded cloud."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar
from xml.etree import ElementTree

from gpucloud.domain.node.hardware import Gpu, GpuProcess
from gpucloud.domain.variables import GPUCLOUD_STAND_IN_GPUS
from gpucloud.system.processes import answered

_STAND_IN = GPUCLOUD_STAND_IN_GPUS
_TIMEOUT_S = 60.0  # the first answer of eight GPUs that no service holds open takes half a minute on a good machine
NO_PARTS: Mapping[str, str] = MappingProxyType({})
_LISTED = re.compile(r"(?:GPU [0-9]+: .*\(UUID: (?P<device>GPU-[^)]+)\)|\s+MIG .*\(UUID: (?P<part>MIG-[^)]+)\))")
_NAMES_PART = re.compile(r"MIG-(?!GPU-)")
_OLDER_PART = re.compile(r"MIG-(GPU-[0-9a-fA-F-]{1,64})/[0-9]{1,4}/[0-9]{1,4}")  # drivers before R470
_CHOSEN = ("idle", "applications_clocks_setting", "display_clocks_setting", "sync_boost")


def gpus(
    environ: Mapping[str, str] = os.environ, *, timeout_s: float = _TIMEOUT_S
) -> tuple[tuple[Gpu, ...] | None, str | None]:
    """Return the devices, or None where there is no `nvidia-smi`; and what it said when it failed.

    CUDA_VISIBLE_DEVICES counts: devices that a job here cannot see are not listed.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    try:
        answer = answered((program, "-q", "-x"), timeout_s=timeout_s)
        if answer.exit_code == 0:
            chosen = environ.get("CUDA_VISIBLE_DEVICES")
            return visible(parse(answer.stdout), chosen, mig_parts(chosen)), None
    except subprocess.TimeoutExpired:
        return (), f"no answer within {timeout_s:.0f} s"
    except (OSError, ValueError) as error:
        return (), str(error)
    return (), f"exit code {answer.exit_code}: {(answer.stdout + answer.stderr).strip()[:200]}"


def said(*words: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return what nvidia-smi answers, empty when it fails: older ones and virtual machines know less."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = answered((program, *words), timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.exit_code == 0 else ""


def are_stand_ins(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this node's GPUs are named and not there, as an emulated machine says of itself by a variable.

    Nothing is computed on them, and nothing is installed for them: the machine below is somebody's own.
    """
    return bool(environ.get(_STAND_IN))


PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers (PCI class codes); bridges and audio functions are others


def on_the_bus(folder: Path = PCI) -> tuple[str, ...]:
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


class _Device(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def uuid(self) -> str: ...


D = TypeVar("D", bound=_Device)


def visible(found: tuple[D, ...], devices: str | None, parts: Mapping[str, str] = NO_PARTS) -> tuple[D, ...]:
    """Return those that CUDA_VISIBLE_DEVICES lets a process see, in its order.

    A word that names none, several or one once more ends the list. A part of a device (MIG; `parts` says of which)
    stands for it, and alone: CUDA uses one part (NVIDIA's MIG user guide, "CUDA_VISIBLE_DEVICES").
    """
    if devices is None:
        return found
    chosen: list[D] = []
    for word in (part.strip() for part in devices.split(",")):
        older = _OLDER_PART.fullmatch(word)
        whole = parts.get(word) or (older[1] if older else "")
        named = [g for g in found if (g.uuid == whole if whole else _is_named(g, word))]
        if len(named) != 1 or named[0] in chosen or (whole and chosen):
            break
        chosen += named
        if whole:
            break
    return tuple(chosen)


def mig_parts(devices: str | None, *, timeout_s: float = _TIMEOUT_S) -> Mapping[str, str]:
    """Return the device of each MIG part that there is, by their UUIDs; none where `devices` name no part."""
    return parse_parts(said("-L", timeout_s=timeout_s)) if _NAMES_PART.search(devices or "") else NO_PARTS


def parse_parts(listed: str) -> Mapping[str, str]:
    """Return the device of each part in the output of `nvidia-smi -L`, by their UUIDs."""
    parts, device = {}, ""
    for line in listed.splitlines():
        if (found := _LISTED.match(line)) is None:
            continue
        if found["device"]:
            device = found["device"]
        elif device:
            parts[found["part"]] = device
    return parts


def _is_named(device: _Device, word: str) -> bool:
    return str(device.index) == word or (len(word) > len("GPU-") and device.uuid.startswith(word))


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the devices in the output of `nvidia-smi -q -x`; ValueError for any other text."""
    try:
        root = ElementTree.fromstring(text)  # noqa: S314
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi answered no XML: {error}") from error
    driver = _text(root, "driver_version") or ""
    return tuple(_gpu(index, element, driver) for index, element in enumerate(root.iter("gpu")))


def _gpu(index: int, gpu: ElementTree.Element, driver: str) -> Gpu:
    link = "pci/pci_gpu_link_info"
    power = next((p for p in ("gpu_power_readings", "power_readings") if gpu.find(p) is not None), "power_readings")
    return Gpu(
        index=index,
        uuid=_text(gpu, "uuid") or "",
        name=_text(gpu, "product_name") or "",
        memory_mib=_whole(gpu, "fb_memory_usage/total"),
        driver=driver,
        pci=gpu.get("id", ""),
        memory_used_mib=_whole(gpu, "fb_memory_usage/used"),
        use=_whole(gpu, "utilization/gpu_util"),
        temperature=_whole(gpu, "temperature/gpu_temp"),
        power=next((w for p in _POWER if (w := _number(gpu, f"{power}/{p}")) is not None), None),
        power_limit=next((w for p in _LIMIT if (w := _number(gpu, f"{power}/{p}")) is not None), None),
        sm_clock=_whole(gpu, "clocks/sm_clock"),
        sm_clock_most=_whole(gpu, "max_clocks/sm_clock"),
        pcie_generation=_whole(gpu, f"{link}/pcie_gen/current_link_gen"),
        pcie_generation_most=_whole(gpu, f"{link}/pcie_gen/max_link_gen"),
        pcie_width=_whole(gpu, f"{link}/link_widths/current_link_width"),
        pcie_width_most=_whole(gpu, f"{link}/link_widths/max_link_width"),
        ecc=_says(gpu, "ecc_mode/current_ecc", "Enabled"),
        ecc_uncorrected=_uncorrected(gpu),
        repair_pending=any(_text(gpu, path) == "Yes" for path in _PENDING),
        repair_failed=any(_text(gpu, path) == "Yes" for path in _FAILED),
        recovery=_text(gpu, "gpu_recovery_action"),
        recovery_told=(gpu.findtext("gpu_recovery_action") or "").strip() not in ("", *_UNTOLD),
        slowdowns=_slowdowns(gpu),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        persistence=_text(gpu, "persistence_mode") == "Enabled",
        fabric=_text(gpu, "fabric/state"),
        virtualization=_text(gpu, "gpu_virtualization_mode/virtualization_mode"),
        processes=tuple(_processes(gpu)),
    )


_POWER = ("instant_power_draw", "average_power_draw", "power_draw")
_LIMIT = ("current_power_limit", "power_limit", "enforced_power_limit")
_PENDING = (
    "remapped_rows/remapped_row_pending",
    "retired_pages/pending_retirement",
    "ecc_errors/channel_repair_pending",
    "ecc_errors/tpc_repair_pending",
)
_FAILED = ("remapped_rows/remapped_row_failure", "ecc_errors/unrepairable_memory")


def _uncorrected(gpu: ElementTree.Element) -> int | None:
    """Turing and later count by memory; Volta and Pascal by kind, and theirs that nothing corrects are of two bits."""
    volatile = gpu.find("ecc_errors/volatile")
    counts = [] if volatile is None else [_whole(volatile, child.tag) for child in volatile if "uncorr" in child.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else _whole(gpu, "ecc_errors/volatile/double_bit/total")


def _processes(gpu: ElementTree.Element) -> Iterator[GpuProcess]:
    """Yield the programs that hold it, as far as they can be seen from here: other containers' are not there."""
    for process in gpu.iterfind("processes/process_info"):
        pid = _whole(process, "pid")
        if pid is not None:
            name = _text(process, "process_name") or ""
            used = _whole(process, "used_memory")
            yield GpuProcess(pid=pid, name=name, kind=_text(process, "type") or "", used_mib=used)


def _slowdowns(gpu: ElementTree.Element) -> tuple[str, ...]:
    """Drivers before R535 call them throttle reasons."""
    found = []
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for child in gpu.find(name) if gpu.find(name) is not None else ():  # type: ignore[union-attr]
            reason = re.sub(r"^clocks_(event|throttle)_reason_(gpu_)?", "", child.tag)
            if (child.text or "").strip() == "Active" and reason not in _CHOSEN:
                found.append(reason)
    return tuple(found)


def _text(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in ("", "None", *_UNTOLD) else text


_UNTOLD = ("N/A", "[N/A]", "Unknown Error", "GPU is lost")


def _says(element: ElementTree.Element, path: str, word: str) -> bool | None:
    text = _text(element, path)
    return None if text is None else text == word


def _number(element: ElementTree.Element, path: str) -> float | None:
    m = re.match(r"-?[0-9]+(\.[0-9]+)?", _text(element, path) or "")
    return float(m[0]) if m else None


def _whole(element: ElementTree.Element, path: str) -> int | None:
    number = _number(element, path)
    return None if number is None else int(number)
