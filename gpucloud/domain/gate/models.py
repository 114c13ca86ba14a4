"""GPU models: what a healthy device of each has.

Sources, read 2026-11: NVIDIA's data sheets of V100 (2020-01), T4 (2019-03), A10 (2021-04; the A10G of AWS is its
variant), A100 (2021-06), L4 and L40S (2023), H100 (2023-07), H200 (2024-11), B200 (HGX, 2024-11) for memory bandwidth,
PCIe and NVLink; memory as `nvidia-smi` reports it. The floor of an all-reduce is ours: for NVLink models 0.4 of the one
direction's bandwidth (a healthy machine reaches 0.75 and more; a machine that fell back to PCIe stays below 0.15), for
the others what the slowest cloud shape of the model still does through the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.hardware.gpus import model_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One model. `memory_mib` of the smallest variant; GB/s; `nvlink` is links between two devices, 0 for none.

    `pcie_gbps` is one direction of the link that clouds give it: T4 sits on eight lanes on AWS.
    """

    model: str
    memory_mib: int
    memory_gbps: float
    pcie_generation: int
    pcie_width: int
    pcie_gbps: float
    nvlink: int
    busbw_floor_gbps: float


_SPECS = {
    spec.model: spec
    for spec in (
        Spec(model="V100", memory_mib=16160, memory_gbps=900, pcie_generation=3, pcie_width=16, pcie_gbps=15.8,
             nvlink=1, busbw_floor_gbps=15),
        Spec(model="T4", memory_mib=15360, memory_gbps=320, pcie_generation=3, pcie_width=8, pcie_gbps=7.9,
             nvlink=0, busbw_floor_gbps=1),
        Spec(model="A10G", memory_mib=23028, memory_gbps=600, pcie_generation=4, pcie_width=8, pcie_gbps=15.8,
             nvlink=0, busbw_floor_gbps=1.5),
        Spec(model="L4", memory_mib=23034, memory_gbps=300, pcie_generation=4, pcie_width=8, pcie_gbps=15.8,
             nvlink=0, busbw_floor_gbps=1.5),
        Spec(model="L40S", memory_mib=46068, memory_gbps=864, pcie_generation=4, pcie_width=16, pcie_gbps=31.5,
             nvlink=0, busbw_floor_gbps=3),
        Spec(model="A100", memory_mib=40960, memory_gbps=1555, pcie_generation=4, pcie_width=16, pcie_gbps=31.5,
             nvlink=12, busbw_floor_gbps=120),
        Spec(model="H100", memory_mib=81559, memory_gbps=3350, pcie_generation=5, pcie_width=16, pcie_gbps=63,
             nvlink=18, busbw_floor_gbps=180),
        Spec(model="H200", memory_mib=143771, memory_gbps=4800, pcie_generation=5, pcie_width=16, pcie_gbps=63,
             nvlink=18, busbw_floor_gbps=180),
        Spec(model="B200", memory_mib=183359, memory_gbps=7700, pcie_generation=5, pcie_width=16, pcie_gbps=63,
             nvlink=18, busbw_floor_gbps=360),
    )
}  # fmt: skip
# Cards of the same name without NVSwitch: bridges join two at most, and their memory is slower.
_CARDS = {
    "V100": (900.0, 2.0), "A100": (1555.0, 5.0), "H100": (2000.0, 8.0), "H200": (4800.0, 8.0),
}  # fmt: skip


def spec_of(name: str) -> Spec | None:
    """Return what is known of a device by its name (`NVIDIA H100 80GB HBM3`); None for a model that is not known."""
    spec = _SPECS.get(model_of(name))
    if spec is None or spec.model not in _CARDS or not any(word in name for word in ("PCI", "NVL")):
        return spec
    memory_gbps, floor = _CARDS[spec.model]
    return Spec(
        model=spec.model,
        memory_mib=spec.memory_mib,
        memory_gbps=memory_gbps,
        pcie_generation=spec.pcie_generation,
        pcie_width=spec.pcie_width,
        pcie_gbps=spec.pcie_gbps,
        nvlink=0,
        busbw_floor_gbps=floor,
    )
