"""Data sheets of the GPU models that clouds rent: what each computes, what joins it to its neighbours, what it needs.

TFLOPS are peaks of one GPU as its maker's data sheet has them, without sparsity: where a sheet gives a tensor core's
figure with sparsity only, half of it is written here. `source` names the sheet. `cuda` is the oldest toolkit that
compiles for the model and `driver` the oldest branch that knows it (CUDA Toolkit release notes, NVIDIA's list of GPUs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
