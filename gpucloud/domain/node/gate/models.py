"""GPU models: what a healthy device of each has, and what its data sheet promises.

Sources, read 2026-11: NVIDIA's data sheets of V100 (2020-01), T4 (2019-03), A10 (2021-04; the A10G of AWS is its
variant), A100 (2021-06), L4 and L40S (2023), H100 (2023-07), H200 (2024-11), B200 and B300 (HGX, 2024-11 and 2025), RTX
PRO 6000 Blackwell Server Edition (2025) for memory bandwidth, PCIe and NVLink; memory as `nvidia-smi` reports it. What
each computes is in its `DataSheet`; of cards that no cloud rents only that is known here, from the GA102, Ada and RTX
Blackwell whitepapers and the RTX A6000, A40, A30, A10, L40 and RTX 6000 Ada data sheets: fp16 on tensor cores with sums
in fp32, which is what torch multiplies with.

The floor of an all-reduce is ours: for NVLink models 0.4 of the one direction's bandwidth (a healthy machine reaches
0.75 and more; a machine that fell back to PCIe stays below 0.15), for the others what the slowest cloud shape of the
model still does through the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpucloud.domain.node.hardware import Gpu, model_of

_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_SHARE = 0.3  # of the data sheet's peak: 8192 × 8192 in fp16 reach 0.6 to 0.8 of it on a healthy device
_SHARE_OF_LOW_POWER = 0.2  # 70 W hold a T4 or an L4 to 0.35 to 0.5 of theirs
_LOW_POWER = ("T4", "T4g", "L4")
# GeForce multiplies with sums in fp32 at half of its rate, which is what its whitepapers state as such.
_CARDS_TFLOPS = {
    "A10": 125, "A30": 165, "A40": 149.7, "L40": 181, "RTX A4000": 76.7, "RTX A5000": 111.1, "RTX A6000": 154.8,
    "RTX 5000 Ada Generation": 261, "RTX 6000 Ada Generation": 364.2, "RTX 2080 Ti": 53.8, "RTX 3080": 59.5,
    "RTX 3090": 71, "RTX 3090 Ti": 80, "RTX 4080": 97.5, "RTX 4090": 165.2, "RTX 5080": 112.6, "RTX 5090": 209.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One model. `memory_mib` of the smallest variant; GB/s; `nvlink` is links between two devices, 0 for none.

    `pcie_width` is the lanes that clouds give it: a T4 sits on eight on AWS. `host_generation` is PCIe's of the oldest
    hosts that it is sold in: A100 came to AWS in hosts of PCIe 3 (aws-ofi-nccl, `topology/p4d-24xl-topo.xml`), H100 in
    such of PCIe 4, where 25 GB/s are the most that a copy reaches. `direct_nvlink` is links between two devices on its
    boards without NVSwitch: HGX 4-GPU boards share them among three neighbours (NVIDIA, HGX A100 and H100 4-GPU).
    """

    model: str
    memory_mib: int
    memory_gbps: float
    pcie_generation: int
    pcie_width: int
    host_generation: int
    nvlink: int
    busbw_floor_gbps: float

    @property
    def direct_nvlink(self) -> int:
        """Links between two devices of a board of four without NVSwitch."""
        return self.nvlink // 3


_SPECS = {
    spec.model.casefold(): spec
    for spec in (
        Spec(model="V100", memory_mib=16160, memory_gbps=900, pcie_generation=3, pcie_width=16, host_generation=3,
             nvlink=1, busbw_floor_gbps=15),
        Spec(model="T4", memory_mib=15360, memory_gbps=320, pcie_generation=3, pcie_width=8, host_generation=3,
             nvlink=0, busbw_floor_gbps=1),
        Spec(model="T4g", memory_mib=15360, memory_gbps=320, pcie_generation=3, pcie_width=8, host_generation=3,
             nvlink=0, busbw_floor_gbps=1),
        Spec(model="A10G", memory_mib=23028, memory_gbps=600, pcie_generation=4, pcie_width=8, host_generation=3,
             nvlink=0, busbw_floor_gbps=1.5),
        Spec(model="L4", memory_mib=23034, memory_gbps=300, pcie_generation=4, pcie_width=8, host_generation=3,
             nvlink=0, busbw_floor_gbps=1.5),
        Spec(model="L40S", memory_mib=46068, memory_gbps=864, pcie_generation=4, pcie_width=16, host_generation=3,
             nvlink=0, busbw_floor_gbps=3),
        Spec(model="A100", memory_mib=40960, memory_gbps=1555, pcie_generation=4, pcie_width=16, host_generation=3,
             nvlink=12, busbw_floor_gbps=120),
        Spec(model="H100", memory_mib=81559, memory_gbps=3350, pcie_generation=5, pcie_width=16, host_generation=4,
             nvlink=18, busbw_floor_gbps=180),
        Spec(model="H200", memory_mib=143771, memory_gbps=4800, pcie_generation=5, pcie_width=16, host_generation=4,
             nvlink=18, busbw_floor_gbps=180),
        Spec(model="B200", memory_mib=183359, memory_gbps=7700, pcie_generation=5, pcie_width=16, host_generation=5,
             nvlink=18, busbw_floor_gbps=360),
        Spec(model="B300", memory_mib=275040, memory_gbps=8000, pcie_generation=6, pcie_width=16, host_generation=5,
             nvlink=18, busbw_floor_gbps=360),
        Spec(model="RTX PRO 6000", memory_mib=97250, memory_gbps=1597, pcie_generation=5, pcie_width=16,
             host_generation=4, nvlink=0, busbw_floor_gbps=3),
        Spec(model="RTX PRO 4500", memory_mib=32000, memory_gbps=800, pcie_generation=5, pcie_width=16,
             host_generation=4, nvlink=0, busbw_floor_gbps=2),
    )
}  # fmt: skip
# Cards of the same name without NVSwitch: bridges join two at most, and their memory is slower.
_CARDS = {
    "V100": (900.0, 2.0), "A100": (1555.0, 5.0), "H100": (2000.0, 8.0), "H200": (4800.0, 8.0),
}  # fmt: skip
_OLDEST_CARD_HOST = {"V100": 3, "A100": 3, "H100": 3, "H200": 4}


def spec_of(name: str) -> Spec | None:
    """Return what is known of a device by its name (`NVIDIA H100 80GB HBM3`); None for a model that is not known."""
    spec = _SPECS.get(_key(name))
    if spec is None or spec.model not in _CARDS or not any(word in name for word in ("PCI", "NVL")):
        return spec
    memory_gbps, floor = _CARDS[spec.model]
    return replace(
        spec,
        memory_gbps=memory_gbps,
        host_generation=_OLDEST_CARD_HOST[spec.model],
        nvlink=0,
        busbw_floor_gbps=floor,
    )


def whole_spec_of(gpu: Gpu) -> Spec | None:
    """Return what is known of a device that is there whole; None for one that is divided or shared (MIG, vGPU)."""
    return None if gpu.mig or gpu.virtualization == "VGPU" else spec_of(gpu.name)


def least_tflops(name: str) -> float | None:
    """Return what a healthy device multiplies at least in fp16, in TFLOP/s; None for a model that is not known."""
    model = model_of(name)
    spec = _SPECS.get(_key(name))
    sheet = sheet_of(spec.model) if spec is not None else None
    peak = sheet.tflops.get("fp16") if sheet is not None else _CARDS_TFLOPS.get(model)
    if peak is None:
        return None
    return peak * (_SHARE_OF_LOW_POWER if spec is not None and spec.model in _LOW_POWER else _SHARE)


def link_gbps(generation: int, width: int) -> float:
    """Return what one direction of a PCIe link carries, after its coding (PCI Express base specification)."""
    newest = max(_LANE_GBPS)
    return width * _LANE_GBPS.get(min(max(generation, 1), newest), _LANE_GBPS[newest])


def _key(name: str) -> str:
    """Server and workstation editions of a card are one model: `RTX PRO 6000 Blackwell Server Edition`."""
    return model_of(name).partition(" Blackwell ")[0].casefold()


# Data sheets of the GPU models that clouds rent: what each computes, what joins it to its neighbours, what it needs.
#
# TFLOPS are peaks of one GPU as its maker's data sheet has them, without sparsity: where a sheet gives a tensor
# core's figure with sparsity only, half of it is written here. `source` names the sheet. `cuda` is the oldest toolkit
# that compiles for the model and `driver` the oldest branch that knows it (CUDA Toolkit release notes, NVIDIA's list of
# GPUs).


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One model. `tflops` by precision: `fp32`, and on tensor cores `tf32`, `bf16`, `fp16`, `fp8`.

    A precision that the hardware lacks, or that its maker does not state, is not in there.
    `nvlink_gbps` is GB/s to all neighbours together, both directions, 0 for PCIe alone; `last_driver` is the last
    branch that drives the model, None while every new one does.
    """

    model: str
    source: str
    tflops: Mapping[str, float]
    nvlink_gbps: int
    compute_capability: str
    cuda: str
    driver: int
    last_driver: int | None = None

    @property
    def training_tflops(self) -> float | None:
        """What mixed-precision training reaches at most: bf16, on models without it fp16; None where none is stated."""
        return self.tflops.get("bf16", self.tflops.get("fp16"))


def _tensor(fp32: float, tf32: float, half: float, fp8: float | None = None) -> Mapping[str, float]:
    """Peaks of a model whose tensor cores take bf16 as quickly as fp16."""
    peaks = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return MappingProxyType(peaks if fp8 is None else {**peaks, "fp8": fp8})


def _fp16_only(fp32: float, fp16: float) -> Mapping[str, float]:
    """Peaks of a model before Ampere."""
    return MappingProxyType({"fp32": fp32, "fp16": fp16})


_SHEETS = {
    sheet.model: sheet
    for sheet in (
        DataSheet(
            model="V100", source="NVIDIA V100 (2020-01), SXM2", tflops=_fp16_only(15.7, 125),
            nvlink_gbps=300, compute_capability="7.0", cuda="9.0", driver=384, last_driver=580,
        ),
        DataSheet(
            model="T4", source="NVIDIA T4 (2019-03)", tflops=_fp16_only(8.1, 65),
            nvlink_gbps=0, compute_capability="7.5", cuda="10.0", driver=410,
        ),
        DataSheet(  # AWS's variant of the T4; no sheet of its own was found
            model="T4g", source="NVIDIA T4 (2019-03)", tflops=_fp16_only(8.1, 65),
            nvlink_gbps=0, compute_capability="7.5", cuda="11.4", driver=470,
        ),
        DataSheet(
            model="A100", source="NVIDIA A100 (2021-06), SXM4", tflops=_tensor(19.5, 156, 312),
            nvlink_gbps=600, compute_capability="8.0", cuda="11.0", driver=450,
        ),
        DataSheet(  # not the A10 (125 TFLOPS): AWS's variant has more of fp32 and half of its tensor cores' rate
            model="A10G", source="NVIDIA A10G for AWS (2022-02)", tflops=_tensor(31.5, 35, 70),
            nvlink_gbps=0, compute_capability="8.6", cuda="11.1", driver=455,
        ),
        DataSheet(
            model="L4", source="NVIDIA L4 (2023)", tflops=_tensor(30.3, 60, 121, 242.5),
            nvlink_gbps=0, compute_capability="8.9", cuda="11.8", driver=525,
        ),
        DataSheet(
            model="L40S", source="NVIDIA L40S (2023)", tflops=_tensor(91.6, 183, 362, 733),
            nvlink_gbps=0, compute_capability="8.9", cuda="11.8", driver=535,
        ),
        DataSheet(
            model="H100", source="NVIDIA H100 (2023-07), SXM5", tflops=_tensor(67, 494.5, 989.5, 1979),
            nvlink_gbps=900, compute_capability="9.0", cuda="11.8", driver=525,
        ),
        DataSheet(
            model="H200", source="NVIDIA H200 (2024-11), SXM5", tflops=_tensor(67, 494.5, 989.5, 1979),
            nvlink_gbps=900, compute_capability="9.0", cuda="11.8", driver=550,
        ),
        DataSheet(
            model="B200", source="NVIDIA Blackwell architecture brief (2024), HGX B200 per GPU",
            tflops=_tensor(80, 1100, 2250, 4500),
            nvlink_gbps=1800, compute_capability="10.0", cuda="12.8", driver=570,
        ),
        DataSheet(
            model="B300", source="NVIDIA HGX B300 (2025), an eighth of the board's",
            tflops=_tensor(75, 1125, 2250, 4500),
            nvlink_gbps=1800, compute_capability="10.3", cuda="12.9", driver=575,
        ),
        DataSheet(  # the sheet states fp32 and fp4 (4 PFLOPS with sparsity): the others follow by halves
            model="RTX PRO 6000", source="NVIDIA RTX PRO 6000 Blackwell Server Edition (2025)",
            tflops=_tensor(120, 250, 500, 1000),
            nvlink_gbps=0, compute_capability="12.0", cuda="12.8", driver=570,
        ),
        DataSheet(  # no sheet of the server edition was read
            model="RTX PRO 4500", source="none read", tflops=MappingProxyType({}),
            nvlink_gbps=0, compute_capability="12.0", cuda="12.8", driver=575,
        ),
    )
}  # fmt: skip

MODELS = tuple(_SHEETS)
"""The models with a data sheet, as clouds name them."""


def sheet_of(model: str) -> DataSheet | None:
    """Return the data sheet of a model by its name in the catalog and in job files; None for one that is not here."""
    return _SHEETS.get(model)
