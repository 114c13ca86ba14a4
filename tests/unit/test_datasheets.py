"""Data sheets: figures that are per GPU, dense, and as the generations' hardware makes them."""

from __future__ import annotations

import pytest

from gpucloud.domain.node.gate.models import MODELS, DataSheet, sheet_of
from gpucloud.domain.node.hardware import is_older, least_driver


def sheet(model: str) -> DataSheet:
    found = sheet_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "fp32", "tf32", "half", "fp8"),
    [
        ("V100", 15.7, None, 125, None),
        ("T4", 8.1, None, 65, None),
        ("A10G", 31.5, 35, 70, None),
        ("A100", 19.5, 156, 312, None),
        ("L4", 30.3, 60, 121, 242.5),
        ("L40S", 91.6, 183, 362, 733),
        ("H100", 67, 494.5, 989.5, 1979),
        ("H200", 67, 494.5, 989.5, 1979),
        ("B200", 80, 1100, 2250, 4500),
        ("B300", 75, 1125, 2250, 4500),
        ("RTX PRO 6000", 120, 250, 500, 1000),
    ],
)
def test_peaks_are_the_makers_without_sparsity(
    model: str, fp32: float, tf32: float | None, half: float, fp8: float | None
):
    tflops = sheet(model).tflops
    assert [tflops.get(name) for name in ("fp32", "tf32", "fp16", "fp8")] == [fp32, tf32, half, fp8]
    assert sheet(model).training_tflops == half


@pytest.mark.parametrize("model", MODELS)
def test_each_halving_of_the_bits_doubles_the_rate(model: str):
    # A figure with sparsity beside one without, or of a whole board beside one GPU's, would break this.
    tflops = sheet(model).tflops
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
        if wide in tflops and narrow in tflops:
            assert tflops[narrow] / tflops[wide] == pytest.approx(2, rel=0.03)
    if "bf16" in tflops:
        assert tflops["bf16"] == tflops["fp16"]


@pytest.mark.parametrize("model", MODELS)
def test_peaks_are_of_one_gpu_of_today(model: str):
    tflops = sheet(model).tflops
    assert all(8 <= tflops[name] <= 125 for name in ("fp32",) if name in tflops)
    assert all(60 <= tflops[name] <= 2250 for name in ("fp16",) if name in tflops)


def test_before_ampere_there_is_neither_bf16_nor_tf32():
    for model in ("V100", "T4", "T4g"):
        assert set(sheet(model).tflops) == {"fp32", "fp16"}


def test_fp8_begins_with_ada_and_hopper():
    with_fp8 = {model for model in MODELS if "fp8" in sheet(model).tflops}
    assert with_fp8 == {"L4", "L40S", "H100", "H200", "B200", "B300", "RTX PRO 6000"}


def test_what_was_not_read_is_not_made_up():
    assert sheet("RTX PRO 4500").tflops == {}
    assert sheet("RTX PRO 4500").training_tflops is None
    assert sheet_of("Radeon Pro V520") is None


@pytest.mark.parametrize("model", MODELS)
def test_the_oldest_driver_is_one_of_the_oldest_cudas_time(model: str):
    one = sheet(model)
    least = least_driver(one.cuda)
    assert one.source
    # A driver of the CUDA's own major version runs what is built with it.
    assert least is None or not is_older(f"{one.driver}.999", least)


def test_volta_has_a_last_driver():
    # Branch 580 is the last for Volta; CUDA 13 does not compile for it.
    assert {model: sheet(model).last_driver for model in MODELS if sheet(model).last_driver} == {"V100": 580}


def test_nvlink_is_what_the_sxm_boards_have():
    assert {model: sheet(model).nvlink_gbps for model in MODELS if sheet(model).nvlink_gbps} == {
        "V100": 300, "A100": 600, "H100": 900, "H200": 900, "B200": 1800, "B300": 1800,
    }  # fmt: skip
