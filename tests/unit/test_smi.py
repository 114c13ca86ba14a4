"""What `nvidia-smi -q -x` says becomes GPUs; the recording is genuine (tests/data/nvidia_smi)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.domain.node.hardware import GpuProcess, model_of
from gpucloud.system.smi import parse, parse_parts, visible

DATA = Path(__file__).parent.parent / "data" / "nvidia_smi"
RECORDED = (DATA / "h200x4.xml").read_text()
# As NVIDIA's MIG user guide shows `nvidia-smi -L`.
LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-00000001-0000-0000-0000-000000000001)
  MIG 3g.71gb     Device  0: (UUID: MIG-11111111-1111-4111-8111-111111111111)
  MIG 3g.71gb     Device  1: (UUID: MIG-22222222-2222-4222-8222-222222222222)
"""


def test_a_genuine_recording_gives_every_device() -> None:
    gpus = parse(RECORDED)
    assert [(gpu.index, gpu.name, gpu.memory_mib, gpu.driver) for gpu in gpus] == [
        (index, "NVIDIA H200", 143771, "580.159.04") for index in range(4)
    ]
    first = gpus[0]
    assert (first.temperature, first.power, first.power_limit, first.use) == (42, 126.84, 700.0, 0)
    assert (first.pcie_generation, first.pcie_width, first.pcie_generation_most, first.pcie_width_most) == (
        5,
        16,
        5,
        16,
    )
    assert (first.ecc, first.ecc_uncorrected, first.repair_pending, first.repair_failed) == (True, 0, False, False)
    assert (first.sm_clock, first.sm_clock_most, first.fabric, first.recovery) == (1980, 1980, "Completed", None)
    assert (first.slowdowns, first.mig, first.persistence) == ((), False, True)


def test_an_idle_device_is_not_slowed_down() -> None:
    assert parse(RECORDED)[1].slowdowns == ()


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("hw_thermal_slowdown>Not Active<", "hw_thermal_slowdown>Active<", {"slowdowns": ("hw_thermal_slowdown",)}),
        ("<remapped_row_pending>No<", "<remapped_row_pending>Yes<", {"repair_pending": True}),
        ("<remapped_row_failure>No<", "<remapped_row_failure>Yes<", {"repair_failed": True}),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>3<", {"ecc_uncorrected": 3}),
        ("<current_mig>Disabled<", "<current_mig>Enabled<", {"mig": True}),
        ("<gpu_recovery_action>None<", "<gpu_recovery_action>Reset<", {"recovery": "Reset"}),
        ("<gpu_temp>42 C<", "<gpu_temp>Unknown Error<", {"temperature": None}),
    ],
)
def test_one_changed_word_is_seen_in_the_first_device(old: str, new: str, seen: dict[str, object]) -> None:
    assert old in RECORDED
    gpu = parse(RECORDED.replace(old, new, 1))[0]
    assert {name: getattr(gpu, name) for name in seen} == seen


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-00000003", [3]),
        ("1,9,2", [1]),
        ("-1", []),
        ("0,0,1", [0]),
        ("GPU-0000000", []),  # of four: CUDA takes none
        ("GPU-", []),
        (",1", []),
        ("all", []),
        ("x" * 100_000, []),
        ("MIG-GPU-00000002-0000-0000-0000-000000000002/3/0", [2]),
        ("MIG-11111111-1111-4111-8111-111111111111", [1]),
        ("MIG-11111111-1111-4111-8111-111111111111,MIG-22222222-2222-4222-8222-222222222222", [1]),
        ("0,MIG-11111111-1111-4111-8111-111111111111", [0]),
        ("MIG-33333333-3333-4333-8333-333333333333", []),
        ("MIG-GPU-../../x/3/0", []),
    ],
)
def test_devices_that_a_job_cannot_see_are_not_listed(devices: str | None, indices: list[int]) -> None:
    parts = parse_parts(LISTED)
    assert [gpu.index for gpu in visible(parse(RECORDED), devices, parts)] == indices


def test_parts_are_told_by_the_device_above_them() -> None:
    second = parse(RECORDED)[1].uuid
    assert parse_parts(LISTED) == {f"MIG-{n * 8}-{n * 4}-4{n * 3}-8{n * 3}-{n * 12}": second for n in "12"}
    assert parse_parts("  MIG 1g.5gb Device 0: (UUID: MIG-1)\nNo devices found.\n" + "GPU 0: (" * 1000) == {}


def test_the_programs_that_hold_a_device_are_seen_in_a_genuine_recording() -> None:
    (idle,), (busy,) = (parse((DATA / f"h100x1-{name}.xml").read_text()) for name in ("idle", "busy"))
    assert idle.processes == ()
    assert busy.processes == (GpuProcess(pid=470, name="python3", kind="C", used_mib=1258),)
    assert (busy.memory_used_mib, busy.slowdowns, busy.sm_clock) == (1267, ("sw_power_cap",), 1275)
    assert (busy.virtualization, busy.recovery, busy.recovery_told, busy.fabric) == ("Pass-Through", None, True, None)


def test_double_bit_errors_of_older_models_are_counted() -> None:
    # Volta and Pascal, as the manual of nvidia-smi and its data type definition have it.
    kinds = "<single_bit><total>4</total></single_bit><double_bit><dram>17</dram><total>17</total></double_bit>"
    volatile = RECORDED.partition("<volatile>")[2].partition("</volatile>")[0]
    assert parse(RECORDED.replace(volatile, kinds, 1))[0].ecc_uncorrected == 17


def test_a_device_that_shares_the_machines_memory_has_none_of_its_own() -> None:
    gpu = parse(RECORDED.replace("<total>143771 MiB</total>", "<total>N/A</total>", 1))[0]
    assert gpu.memory_mib is None


@pytest.mark.parametrize("word", ["", "N/A"])
def test_a_driver_that_does_not_know_of_recovery_is_told_from_one_that_asks_for_none(word: str) -> None:
    old = RECORDED.replace("<gpu_recovery_action>None<", f"<gpu_recovery_action>{word}<", 1)
    assert [gpu.recovery_told for gpu in parse(old)] == [False, True, True, True]


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log>"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no XML"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_devices_name_holds_its_model(name: str, model: str) -> None:
    assert model_of(name) == model
