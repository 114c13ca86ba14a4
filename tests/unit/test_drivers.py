"""Drivers: which one a CUDA needs, and which of two is older."""

from __future__ import annotations

import pytest

from gpucloud.domain.node.hardware import is_older, least_driver


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [
        ("14.0", None),
        ("13.2", "580.65.06"),
        ("13.0", "580.65.06"),
        ("12.8", "525.60.13"),
        ("12.6", "525.60.13"),
        ("11.8", "450.80.02"),
        ("10.2", None),
    ],
)
def test_every_minor_version_of_a_cuda_runs_under_the_least_driver_of_its_first(cuda: str, driver: str | None) -> None:
    assert least_driver(cuda) == driver


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("580.95.05", "580.126.09", True),
        ("570.211.01", "580.65.06", True),
        ("580.65.05", "580.65.06", True),
        ("99.1", "525.60.13", True),
        ("580.65.06", "580.65.06", False),
        ("580.159.04", "580.65.06", False),
        ("580.100.1", "580.65.06", False),
    ],
)
def test_versions_are_compared_number_by_number(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older
