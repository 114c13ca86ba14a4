"""NVIDIA's drivers: their versions, and which one a CUDA needs."""

from __future__ import annotations

import re

# NVIDIA, "CUDA Compatibility", table "CUDA Toolkit minor version compatibility" (docs.nvidia.com/deploy/
# cuda-compatibility, read 2026-11): CUDA's major version → the least Linux driver.
_LEAST = {13: "580.65.06", 12: "525.60.13", 11: "450.80.02"}


def least_driver(cuda: str) -> str | None:
    """Return the oldest driver that runs what is built for that CUDA, such as `12.8`; None for one not in the table."""
    major = cuda.partition(".")[0]
    return _LEAST.get(int(major)) if major.isdigit() else None


def is_older(version: str, than: str) -> bool:
    """Whether one driver version is older than the other; `580.95.05` is older than `580.126.09`."""
    return _parts(version) < _parts(than)


def branch_of(version: str) -> str:
    """Return the branch of a driver version: `580` of `580.178.04`."""
    return version.partition(".")[0]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
