"""Which drivers there are for a machine: what its packages are called, what a GPU's generation allows."""

from __future__ import annotations

import re

DEFAULT_BRANCH = "580"
"""Installed where the job names none: the oldest that runs PyPI's wheels of PyTorch, and the newest that Volta has."""

# Device ids as the PCI ID database lists them: TU102 begins at 1e02, GV100 ends at 1dff; GB100 begins at 2900.
_FIRST_TURING = 0x1E00
_FIRST_BLACKWELL = 0x2900
_LAST_BRANCH_BEFORE_TURING = 580  # NVIDIA, "Driver lifecycle": Maxwell, Pascal and Volta end with R580


def upstream(package_version: str) -> str:
    """Return the driver version in a package's: `580.178.04` in `1:580.178.04-0ubuntu0.24.04.1`."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", package_version)
    return match[1] if match else package_version


def open_modules(device_ids: tuple[int, ...]) -> bool:
    """Whether the open kernel modules drive all of these GPUs: Turing and newer; Blackwell has no others.

    Source: NVIDIA, "Transitioning to open-source GPU kernel modules".
    """
    return all(device >= _FIRST_TURING for device in device_ids)


def branch_refused(branch: str, device_ids: tuple[int, ...]) -> str | None:
    """Return why no driver of the branch can drive these GPUs; None when it can."""
    number = int(branch)
    oldest, newest = min(device_ids, default=_FIRST_TURING), max(device_ids, default=_FIRST_TURING)
    if oldest < _FIRST_TURING and number > _LAST_BRANCH_BEFORE_TURING:
        return f"driver {branch} does not know GPUs older than Turing (PCI device 10de:{oldest:04x}); 580 is the last"
    if oldest < _FIRST_TURING and newest >= _FIRST_BLACKWELL:
        return "no driver drives Blackwell and GPUs older than Turing in one machine"
    return None
