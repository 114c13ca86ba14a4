"""The gate refuses no good machine and passes no bad one: machines as data, healthy and with one fault each.

What tools write is written anew from each row of `tests/data/gate_machines.yaml` (nvidia-smi's from a genuine
recording, with the row's words in their places), read by the code that nodes run, and judged.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from gpucloud.agent.gate.look import holders, host_links, links
from gpucloud.agent.metrics.kernel_log import found, stamped
from gpucloud.domain.node.gate.judge import judge
from gpucloud.domain.node.gate.report import (
    CollectiveProbe,
    DeviceProbe,
    GateWanted,
    Report,
    Severity,
    StoreFacts,
    TorchFacts,
    UnderLoad,
)
from gpucloud.domain.node.hardware import model_of
from gpucloud.system.smi import parse
from tests.prove.goal import Figure, Form, Goal

_DATA = Path(__file__).resolve().parent.parent / "data"
_CATALOG = Path(__file__).resolve().parent.parent.parent / "gpucloud/adapters/aws/prices/catalog.json"
_RECORDED = (_DATA / "nvidia_smi" / "h200x4.xml").read_text()
_SPEED = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
# Long, and of no consequence to anything that is judged.
_UNREAD = (
    "supported_clocks", "clocks_event_reasons_counters", "bar1_memory_usage", "cc_protected_memory_usage",
    "encoder_stats", "fbc_stats", "inforom_version", "platformInfo", "module_power_readings",
)  # fmt: skip
_NOW = 5_000_000.0  # seconds since boot: own hosts run for months
_LOADED = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04"
_SCRIPTS = "NVRM: Xid (PCI:0000:10:00): 31, pid=1, name=python, Ch 00000008, MMU Fault"
_OLD = "NVRM: Xid (PCI:0000:10:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response from GPU0"


@dataclass(slots=True)
class Machine:
    """A row of the table, and what its tools write and its devices do; a fault changes that."""

    row: dict[str, Any]
    kind: dict[str, Any]
    smi: ElementTree.Element
    pairs: dict[tuple[int, int], str]
    ports: list[list[int]]
    log: list[str]
    probes: list[DeviceProbe]
    loads: list[UnderLoad]
    collective: CollectiveProbe | None
    torch: TorchFacts
    store: StoreFacts
    fault: str | None = None
    missing: bool = False
    listed: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return int(self.row["n"])

    @property
    def share(self) -> bool:
        """Whether it is a share of a device, which has no figures of its own."""
        return bool(self.row.get("mig") or self.row.get("vgpu"))

    @property
    def switched(self) -> bool:
        return self.row.get("joined") in ("NV12", "NV18") and "NVL" not in self.kind["name"]

    @property
    def sxm(self) -> bool:
        """Whether NVLink joins its devices by a board, and not by bridges."""
        words = ("SXM4", "HBM3", "B200", "B300")
        board = any(word in self.kind["name"] for word in words) or self.kind["name"] == "NVIDIA H200"
        return board and self.count > 1 and not self.share

    def gpu(self, index: int = 0) -> ElementTree.Element:
        return list(self.smi.iter("gpu"))[index]

    def set(self, path: str, text: str, index: int = 0) -> None:
        _set(self.gpu(index), path, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a machine: how it shows, which finding must name it, and which machines can have it."""

    code: str
    plant: Callable[[Machine], None]
    of: Callable[[Machine], bool] = lambda _: True


def _rows() -> tuple[dict[str, Any], dict[str, Any]]:
    table = yaml.safe_load((_DATA / "gate_machines.yaml").read_text())
    return table["machines"], table["gpus"]


@cache
def _template() -> ElementTree.Element:
    root = ElementTree.fromstring(_RECORDED)
    first, *others = root.iter("gpu")
    for gpu in others:
        root.remove(gpu)
    for child in [child for child in first if child.tag in _UNREAD]:
        first.remove(child)
    return root


def machine(row: dict[str, Any], kind: dict[str, Any]) -> Machine:
    """Return the machine of a row, healthy."""
    count = row["n"]
    smi = copy.deepcopy(_template())
    first = next(smi.iter("gpu"))
    others = [copy.deepcopy(first) for _ in range(count + len(row.get("also", ())) - 1)]
    smi.extend(others)
    for index, gpu in enumerate([first, *others]):
        _describe(gpu, index, row, kind)
    for index, name in enumerate(row.get("also", ()), start=count):
        gpu = list(smi.iter("gpu"))[index]
        _set(gpu, "product_name", name)
        _set(gpu, "fb_memory_usage/total", "4096 MiB")
    unlike = row.get("unlike", {})
    indices = range(count)
    copies = unlike.get("copies", [row["copies"]] * count)
    tflops = unlike.get("tflops", [kind["tflops"] * (1 - 0.01 * (i % 4)) for i in indices])
    return Machine(
        row=row,
        kind=kind,
        smi=smi,
        pairs={(a, b): _joined(row.get("joined", "SYS"), a, b) for a in indices for b in indices if a < b},
        ports=[_ports(row, kind)] * count,
        log=[f"[5.0] {_LOADED}", f"[60.0] {_SCRIPTS}", f"[90.0] {_OLD}"],
        probes=[
            DeviceProbe(
                index=i,
                right=True,
                repeatable=True,
                memory_right=True,
                memory_gb=9.0,
                tflops=tflops[i],
                to_device_gbps=float(copies[i]),
                from_device_gbps=float(copies[i]) * 1.05,
                memory_gbps=float(kind["gbps"]),
                total_mib=kind["mib"] or 122_000,
            )
            for i in indices
        ],
        loads=[UnderLoad(index=i, generation=_shown_generation(row, kind), width=_shown_width(row, kind, i),
                         slowdowns=("sw_power_cap",), sm_clock=1700) for i in indices],
        collective=_added_up(row) if count > 1 else None,
        torch=TorchFacts(version="2.11.0+cu126", cuda="12.6", available=True, devices=count),
        store=StoreFacts(endpoint="https://s3.us-west-2.amazonaws.com", seconds=0.02),
        listed=count + len(row.get("also", ())),
    )  # fmt: skip


def _added_up(row: dict[str, Any]) -> CollectiveProbe:
    return CollectiveProbe(backend="nccl", ranks=row["n"], right=True, busbw_gbps=row["busbw"])


def _describe(gpu: ElementTree.Element, index: int, row: dict[str, Any], kind: dict[str, Any]) -> None:
    gpu.set("id", f"00000000:{16 + index:02X}:00.0")
    mib = row.get("mib", kind["mib"])
    words = {
        "product_name": row.get("vgpu", kind["name"]),
        "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
        "fb_memory_usage/total": f"{mib} MiB" if mib else "N/A",
        "fb_memory_usage/used": "4 MiB" if mib else "N/A",
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen": str(kind["gen"] or "N/A"),
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "1",  # idle links fall back
        "pci/pci_gpu_link_info/link_widths/max_link_width": f"{kind['lanes']}x" if kind["lanes"] else "N/A",
        "pci/pci_gpu_link_info/link_widths/current_link_width": _width_words(row, kind, index),
        "fabric/state": "Completed" if row.get("fabric") else "N/A",
        "mig_mode/current_mig": "Enabled" if row.get("mig") else "Disabled",
        "gpu_virtualization_mode/virtualization_mode": "VGPU" if row.get("vgpu") else _virtual(row),
        "ecc_mode/current_ecc": "N/A" if kind["ecc"] == "none" else "Enabled",
    }
    for path, text in words.items():
        _set(gpu, path, text)
    volatile = _find(gpu, "ecc_errors/volatile")
    if kind["ecc"] == "none":
        for child in volatile:
            child.text = "N/A"
    elif kind["ecc"] == "kinds":
        volatile.clear()
        for name in ("single_bit", "double_bit"):
            ElementTree.SubElement(ElementTree.SubElement(volatile, name), "total").text = "0"
    if row.get("old"):
        gpu.remove(_find(gpu, "gpu_recovery_action"))
        reasons = _find(gpu, "clocks_event_reasons")
        reasons.tag = "clocks_throttle_reasons"
        for child in reasons:
            child.tag = child.tag.replace("clocks_event_reason", "clocks_throttle_reason")


def _virtual(row: dict[str, Any]) -> str:
    return "Pass-Through" if row["host"] == "vm" else "None"


def _host(row: dict[str, Any], index: int) -> tuple[int, int] | None:
    shown = row.get("unlike", {}).get("host", [row["host"]] * (index + 1))[index]
    generation, by, lanes = str(shown).partition("x")
    return (int(generation), int(lanes)) if by else None


def _shown_width(row: dict[str, Any], kind: dict[str, Any], index: int) -> int | None:
    """What the device trains to; cloud shapes of small cards give it eight lanes."""
    host = _host(row, min(index, row["n"] - 1))
    small = any(word in kind["name"] for word in ("T4", "A10G", "L4")) and "L40" not in kind["name"]
    return min(kind["lanes"], host[1]) if host else 8 if small else kind["lanes"]


def _width_words(row: dict[str, Any], kind: dict[str, Any], index: int) -> str:
    width = _shown_width(row, kind, index)
    return f"{width}x" if width else "N/A"


def _shown_generation(row: dict[str, Any], kind: dict[str, Any]) -> int | None:
    """What a link is trained to under load: as fast as its slower end, which virtual machines show too."""
    if kind["gen"] is None:
        return None
    host = _host(row, 0)
    slower = next(generation for generation, most in ((3, 12.4), (4, 25.5), (5, 60)) if row["copies"] <= most)
    fast = host[0] if host else row.get("link", slower)
    return min(kind["gen"], fast)


def _joined(kind: str, one: int, other: int) -> str:
    """A cube of V100: each has links to four of the seven others."""
    if kind != "cube":
        return kind
    near = one // 4 == other // 4 or other - one == 4
    return ("NV2" if (one + other) % 3 else "NV1") if near else "SYS"


def _ports(row: dict[str, Any], kind: dict[str, Any]) -> list[int]:
    """Links up and down: of a part of a board without switches, those to the rest of it are down by right."""
    lanes = row.get("joined", "")
    if not lanes.startswith("NV") or row["n"] == 1:
        return [0, 0]
    if "A100-SXM" in kind["name"]:
        return [4 * (row["n"] - 1), 12 - 4 * (row["n"] - 1)] if lanes == "NV4" else [12, 0]
    return [18, 0] if any(word in kind["name"] for word in ("H100", "H200", "B200", "B300")) else [int(lanes[2:]), 0]


def observed(shown: Machine, folder: Path) -> Report:
    """Return the report of what the machine's tools write, by the code that nodes run."""
    text = ElementTree.tostring(shown.smi, encoding="unicode")
    listed = parse(text)
    every = () if shown.fault else listed
    gpus = every[: shown.count] if not shown.row.get("also") else every
    log = found(map(stamped, shown.log), now=_NOW)
    on_the_bus = [gpu.pci.lower()[4:] for gpu in listed] + shown.lost
    return Report(
        at=datetime(2026, 11, 24, tzinfo=timezone.utc),
        gpus=None if shown.missing else gpus,
        gpu_fault=shown.fault,
        listed=0 if shown.missing or shown.fault else shown.listed,
        on_the_bus=tuple(on_the_bus),
        links=links(lambda word, *_: _topo(shown) if word == "topo" else _nvlink(shown)),
        host_links=host_links(gpus, folder / "bus"),
        holders=holders(gpus, folder),
        xids=log.xids,
        switch_errors=log.switch_errors,
        newest=log.newest,
        clock_kept=True,
        free_bytes=1 << 40,
        write_mbps=1500.0,
        store=shown.store,
        torch=None if shown.missing or shown.fault else shown.torch,
        probes=tuple(shown.probes) if shown.torch.available and not shown.fault and not shown.missing else (),
        collective=shown.collective,
        under_load=tuple(shown.loads),
    )


def _topo(shown: Machine) -> str:
    names = [f"GPU{i}" for i in range(shown.count)]
    rows = ["\t".join(["", *names, "CPU Affinity"])]
    for a in range(shown.count):
        cells = [" X " if a == b else shown.pairs[min(a, b), max(a, b)] for b in range(shown.count)]
        rows.append("\t".join([names[a], *cells, "0-63"]))
    return "\n".join(rows)


def _nvlink(shown: Machine) -> str:
    lines = []
    for index, (up, down) in enumerate(shown.ports):
        lines.append(f"GPU {index}: {shown.kind['name']} (UUID: GPU-{index})")
        lines += [f"\t Link {i}: 26.562 GB/s" for i in range(up)] + [
            f"\t Link {up + i}: <inactive>" for i in range(down)
        ]
    return "\n".join(lines)


def _tree(shown: Machine, folder: Path) -> None:
    """The kernel's tree of the machine's ports: a root port, a switch's two, the device."""
    bus = folder / "bus"
    bus.mkdir(parents=True)
    for index in range(shown.count):
        host = _host(shown.row, index)
        if host is None:
            continue
        place = folder / f"pci{index:04d}:00"
        for name, generation, lanes in (
            (f"{index:04x}:00:01.0", *host),
            (f"{index:04x}:01:00.0", 5, 16),
            (f"{index:04x}:02:00.0", 5, min(16, host[1])),
            (f"0000:{16 + index:02x}:00.0", shown.kind["gen"], shown.kind["lanes"]),
        ):
            place /= name
            place.mkdir(parents=True)
            (place / "vendor").write_text("0x10de\n")
            (place / "max_link_speed").write_text(f"{_SPEED[generation]} GT/s PCIe\n")
            (place / "max_link_width").write_text(f"{lanes}\n")
        (bus / place.name).symlink_to(place)


def _find(element: ElementTree.Element, path: str) -> ElementTree.Element:
    found_ = element.find(path)
    assert found_ is not None, path
    return found_


def _set(gpu: ElementTree.Element, path: str, text: str) -> None:
    _find(gpu, path).text = text


# Faults


def _drop_last(shown: Machine) -> None:
    shown.lost.append(shown.gpu(shown.count - 1).get("id", "").lower()[4:])
    shown.smi.remove(shown.gpu(shown.count - 1))
    shown.listed -= 1
    shown.probes.pop()


def _double_bits(shown: Machine) -> None:
    path = "ecc_errors/volatile/" + ("double_bit/total" if shown.kind["ecc"] == "kinds" else "dram_uncorrectable")
    shown.set(path, "17")


def _slow_down(shown: Machine) -> None:
    for tag in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for child in shown.gpu().iterfind(f"{tag}/*"):
            if child.tag.endswith("hw_thermal_slowdown"):
                child.text = "Active"


def _held(*, told: bool) -> Callable[[Machine], None]:
    def plant(shown: Machine) -> None:
        whole = int(shown.gpu().findtext("fb_memory_usage/total", "").split()[0])
        shown.set("fb_memory_usage/used", f"{whole - 600} MiB")
        if told:
            process = ElementTree.SubElement(_find(shown.gpu(), "processes"), "process_info")
            for tag, text in (("pid", "4711"), ("type", "C"), ("process_name", "python3"), ("used_memory", "9000 MiB")):
                ElementTree.SubElement(process, tag).text = text

    return plant


def _probe(**changes: Any) -> Callable[[Machine], None]:
    def plant(shown: Machine) -> None:
        shown.probes[0] = replace(shown.probes[0], **changes)

    return plant


def _slow_copies(shown: Machine) -> None:
    """The link is trained to its first generation, and carries what that does."""
    width = shown.loads[0].width or 16
    shown.loads[0] = replace(shown.loads[0], generation=1)
    reached = min(0.2 * width, 0.15 * shown.probes[0].to_device_gbps if shown.count > 1 else 99.0)
    shown.probes[0] = replace(shown.probes[0], to_device_gbps=reached, from_device_gbps=reached)


def _locked(shown: Machine) -> None:
    shown.probes[0] = replace(shown.probes[0], tflops=shown.probes[0].tflops * 0.12)
    shown.loads[0] = replace(shown.loads[0], sm_clock=210, slowdowns=())


def _log(line: str) -> Callable[[Machine], None]:
    return lambda shown: shown.log.append(f"[{_NOW - 90:.1f}] {line}")


def _xid(number: int, words: str) -> Callable[[Machine], None]:
    return _log(f"NVRM: Xid (PCI:0000:10:00): {number}, pid='<unknown>', name=<unknown>, {words}")


def _collective(**changes: Any) -> Callable[[Machine], None]:
    def plant(shown: Machine) -> None:
        assert shown.collective is not None
        shown.collective = replace(shown.collective, **changes)

    return plant


def _half_joined(shown: Machine) -> None:
    shown.pairs[0, 1] = "NV2"


def _torch(**changes: Any) -> Callable[[Machine], None]:
    def plant(shown: Machine) -> None:
        shown.torch = replace(shown.torch, **changes)

    return plant


def _set_in_first(path: str, text: str) -> Callable[[Machine], None]:
    return lambda shown: shown.set(path, text)


def _fail_smi(shown: Machine) -> None:
    shown.fault = "no answer within 60 s"


def _no_driver(shown: Machine) -> None:
    shown.missing = True


def _old_driver(shown: Machine) -> None:
    _set(shown.smi, "driver_version", "470.256.02")
    shown.torch = replace(shown.torch, available=False, devices=0)


def _no_store(shown: Machine) -> None:
    shown.store = replace(shown.store, seconds=None, error="timed out")


_several = lambda shown: shown.count > 1  # noqa: E731
_whole = lambda shown: not shown.share  # noqa: E731
_known = lambda shown: not shown.share and shown.kind["name"] != "NVIDIA GH200 480GB" and shown.row["host"] != "none"  # noqa: E731
_told = lambda shown: not shown.row.get("old")  # noqa: E731
_corrects = lambda shown: shown.kind["ecc"] != "none"  # noqa: E731
_in_table = lambda shown: not shown.share and "tflops" in shown.kind and _is_known(shown)  # noqa: E731


def _is_known(shown: Machine) -> bool:
    """Whether a data sheet says what it computes, or neighbours do."""
    strange = ("GH200", "GB10", "Orin", "GTX 1080", "RTX PRO 4500")
    return shown.count > 1 or not any(word in shown.kind["name"] for word in strange)


def _has_memory(shown: Machine) -> bool:
    return bool(shown.row.get("mib", shown.kind["mib"]))


def _in_models(shown: Machine) -> bool:
    cards = ("GeForce", "RTX A6000", "RTX 6000 Ada", "NVIDIA A10", "A40", "GH200", "GB10", "Orin")
    return not shown.share and ("A10G" in shown.kind["name"] or "A100" in shown.kind["name"]
                                or not any(word in shown.kind["name"] for word in cards))  # fmt: skip


FAULTS: dict[str, Fault] = {
    "a device left the driver": Fault(code="count", plant=_drop_last, of=lambda m: not m.row.get("also")),
    "a device is another model": Fault(
        code="model", plant=_set_in_first("product_name", "NVIDIA T1000"), of=lambda m: not m.row.get("also")
    ),
    "half of its memory is gone": Fault(
        code="memory",
        plant=lambda m: m.set("fb_memory_usage/total", f"{m.kind['mib'] * 2 // 5} MiB"),
        of=_in_models,
    ),
    "memory errors": Fault(code="ecc", plant=_double_bits, of=_corrects),
    "a row waits to be remapped": Fault(
        code="repair-pending", plant=_set_in_first("remapped_rows/remapped_row_pending", "Yes"), of=_corrects
    ),
    "a row cannot be remapped": Fault(
        code="repair-failed", plant=_set_in_first("remapped_rows/remapped_row_failure", "Yes"), of=_corrects
    ),
    "the driver asks for a reset": Fault(
        code="recovery", plant=_set_in_first("gpu_recovery_action", "GPU Reset"), of=_told
    ),
    "heat": Fault(code="slowdown", plant=_slow_down),
    "the hardware slows it down under load": Fault(
        code="slowdown",
        plant=lambda m: m.loads.__setitem__(0, replace(m.loads[0], slowdowns=("hw_slowdown",))),
    ),
    "the fabric is not ready": Fault(
        code="fabric", plant=_set_in_first("fabric/state", "In Progress"), of=lambda m: bool(m.row.get("fabric"))
    ),
    "most lanes are gone": Fault(
        code="pcie-width",
        plant=_set_in_first("pci/pci_gpu_link_info/link_widths/current_link_width", "1x"),
        of=lambda m: _in_models(m) or (m.row["host"] not in ("vm", "none", "3x1", "5x1") and not m.share),
    ),
    "two devices lack links": Fault(code="nvlink", plant=_half_joined, of=lambda m: m.sxm),
    "two devices are joined by PCIe alone": Fault(
        code="nvlink", plant=lambda m: m.pairs.__setitem__((0, 1), "SYS"), of=lambda m: m.sxm
    ),
    "links of a device are down": Fault(
        code="nvlink",
        plant=lambda m: m.ports.__setitem__(0, [m.ports[0][0] - 2, m.ports[0][1] + 2]),
        of=lambda m: m.sxm,
    ),
    "a device fell off the bus": Fault(code="xid", plant=_xid(79, "GPU has fallen off the bus.")),
    "its processor stopped answering": Fault(
        code="xid", plant=_xid(119, "Timeout after 6s of waiting for RPC response")
    ),
    "its power cable is loose": Fault(code="xid", plant=_xid(54, "GPU auxiliary power is not connected")),
    "a switch failed": Fault(
        code="sxid",
        plant=_log("nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"),
        of=lambda m: m.switched,
    ),
    "torch is for CPUs": Fault(code="cpu-torch", plant=_torch(cuda=None, available=False, devices=0)),
    "the driver is too old": Fault(code="wheel-too-new", plant=_old_driver),
    "CUDA does not start": Fault(
        code="no-cuda", plant=_torch(available=False, devices=0, error="Error 802: system not yet initialized")
    ),
    "it computes wrong": Fault(code="wrong-result", plant=_probe(right=False)),
    "it computes otherwise each time": Fault(code="not-repeatable", plant=_probe(repeatable=False)),
    "its memory forgets": Fault(code="wrong-memory", plant=_probe(memory_right=False)),
    "it dies at work": Fault(code="compute", plant=_probe(error="CUDA error: unspecified launch failure")),
    "its link is trained down": Fault(
        code="copy-slow",
        plant=_slow_copies,
        of=lambda m: (
            not m.share and m.row["host"] not in ("none", "5x1", "3x1") and (m.row["host"] != "vm" or _in_models(m))
        ),
    ),
    "its clocks are locked": Fault(code="compute-slow", plant=_locked, of=_in_table),
    "it is slower than its neighbours": Fault(
        code="compute-slow", plant=lambda m: _probe(tflops=m.probes[1].tflops * 0.6)(m), of=_several
    ),
    "its memory is slow": Fault(
        code="memory-slow", plant=lambda m: _probe(memory_gbps=0.3 * m.kind["gbps"])(m), of=_in_models
    ),
    "NVLink is not used": Fault(code="collective-slow", plant=_collective(busbw_gbps=11.0), of=lambda m: m.sxm),
    "sums are wrong": Fault(code="wrong-sum", plant=_collective(right=False), of=_several),
    "collectives hang": Fault(
        code="collective", plant=_collective(busbw_gbps=None, error="it hangs: 2 ranks did not end"), of=_several
    ),
    "somebody computes on it": Fault(code="in-use", plant=_held(told=True), of=_has_memory),
    "its memory is held by nobody who can be seen": Fault(code="held", plant=_held(told=False), of=_has_memory),
    "nvidia-smi hangs": Fault(code="driver-fault", plant=_fail_smi),
    "there is no driver": Fault(code="no-driver", plant=_no_driver),
    "the store is out of reach": Fault(code="store", plant=_no_store),
}
"""Each by what is wrong; a machine that cannot have it, or on which nothing can show it, is left out."""


def _run(form: Form) -> Iterator[Figure]:
    rows, kinds = _rows()
    wrong: Counter[str] = Counter()
    met: set[str] = set()
    planted = 0
    for number, row in enumerate(rows):
        kind = kinds[row["gpu"]]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            healthy = machine(row, kind)
            _tree(healthy, folder)
            wrong.update(_wrong_of_healthy(healthy, folder))
            able = [what for what, fault in FAULTS.items() if fault.of(healthy)]
            chosen = able if form is Form.LONG else [able[(number * step) % len(able)] for step in (7, 11)]
            for what in dict.fromkeys(chosen):
                met.add(what)
                planted += 1
                wrong.update(_wrong_of_faulty(machine(row, kind), what, folder))
    yield Figure(name="gate.refused-good", value=wrong["refused"], limit=0)
    yield Figure(name="gate.passed-bad", value=wrong["passed"], limit=0)
    yield Figure(name="gate.warned-good", value=wrong["warned"], limit=0)
    yield Figure(name="gate.models-left-out", value=len(_left_out(rows, kinds)), limit=0)
    yield Figure(name="gate.machines", value=len(rows), limit=60, least=True)
    yield Figure(name="gate.faults", value=len(met), limit=20 if form is Form.SHORT else len(FAULTS), least=True)
    yield Figure(name="gate.faulty", value=planted, limit=len(rows), least=True)


def _wanted(row: dict[str, Any], kind: dict[str, Any]) -> GateWanted:
    return GateWanted(gpus=row["n"], models=(row.get("as") or model_of(row.get("vgpu", kind["name"])),))


def _wrong_of_healthy(shown: Machine, folder: Path) -> Iterator[str]:
    for one in judge(observed(shown, folder), _wanted(shown.row, shown.kind)):
        fails = one.severity is Severity.FAIL
        # An old Xid of a device is told of every machine here, and a program's own of none.
        if fails or one.code not in ("xid", *shown.row.get("warns", ())):
            sys.stderr.write(f"gate: {shown.row['what']}: {'refused' if fails else 'warned of'}: {one.code}: {one}\n")
            yield "refused" if fails else "warned"


def _wrong_of_faulty(shown: Machine, what: str, folder: Path) -> Iterator[str]:
    fault, wanted = FAULTS[what], _wanted(shown.row, shown.kind)
    fault.plant(shown)
    failed = [one.code for one in judge(observed(shown, folder), wanted) if one.severity is Severity.FAIL]
    if fault.code not in failed:
        sys.stderr.write(f"gate: {shown.row['what']}: {what}: passed ({', '.join(failed) or 'nothing found'})\n")
        yield "passed"


def _left_out(rows: list[dict[str, Any]], kinds: dict[str, Any]) -> set[str]:
    """Models of the catalog that no machine of the table has."""
    types = json.loads(_CATALOG.read_text())["types"].values()
    named = {re.sub(r" Blackwell.*", "", model_of(kinds[row["gpu"]]["name"])).casefold() for row in rows}
    left = {one["gpu"] for one in types if one["gpu"].casefold() not in named}
    for model in sorted(left):
        sys.stderr.write(f"gate: no machine with {model}\n")
    return left


GOAL = Goal(
    promise="the gate refuses no good machine of a table, warns of nothing that is as it should be, and refuses"
    " each that has one of the faults, by the finding that names it; every GPU model of the catalog is among them",
    real="the readers of nvidia-smi, of its tables of links, of the kernel's log and of its tree of ports, and the"
    " judgement; what H200 with NVLink and one H100 show, both in virtual machines, is genuine",
    simulated="the other machines: nvidia-smi's answer is the genuine one with words exchanged, figures are from data"
    " sheets, AWS's topologies and public reports; faults show as NVIDIA's documents say",
    run=_run,
)
