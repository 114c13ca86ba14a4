"""Which build of torch a driver can run, and where it is found."""

from __future__ import annotations

import re

from gpucloud.domain.hardware.drivers import is_older, least_driver

TORCH = "torch>=2.6,<2.14"
"""What is installed for a torchrun job that names no torch itself: the range that this package is tested with."""

USUAL_INDEX = "https://download.pytorch.org/whl"

CPU = "cpu"
_DEFAULT_ON_PYPI = "cu130"  # PyPI's Linux wheels for x86-64, torch 2.11 to 2.13 (wheel metadata, 2026-11)

# Wheels of CUDA 12.8 and 13 hold code for Turing and newer; those of 12.6 go back to Maxwell, and from torch 2.11 on
# leave Hopper out (pytorch/pytorch issues 172352 and 178665, RELEASE.md; read 2026-11). cu128 ends with torch 2.11.
_OLD_GPUS = re.compile(
    r"\b(V100S?|TITAN V|GV100|P100|P40|P4|GTX 10\d\d|TITAN Xp?|M60|M40|M4|GTX 9\d\d|Quadro [PM]\d+)\b"
)


def torch_index(driver: str | None, names: tuple[str, ...] = ()) -> str:
    """Return the index of torch's wheels for a machine with this driver and GPUs of these names; `cpu` without one.

    A driver that is too old for any gets `cu126`: the check of what was installed says so with both versions.
    """
    if driver is None:
        return CPU
    if any(_OLD_GPUS.search(name) for name in names):
        return "cu126"
    newest = next((cuda for cuda in ("13", "12") if not is_older(driver, least_driver(cuda) or "")), "11")
    return {"13": "cu130", "12": "cu128", "11": "cu126"}[newest]


def torch_url(index: str, mirror: str | None, machine: str) -> str | None:
    """Return the URL of the index; None where the usual index of packages has that very build."""
    if mirror is None and index == _DEFAULT_ON_PYPI and machine == "x86_64":
        return None
    return f"{(mirror or USUAL_INDEX).rstrip('/')}/{index}"


def why_no_gpu(torch: str, cuda: str | None, driver: str) -> str | None:
    """Return why this torch would not use GPUs under this driver, with both versions; None if it would."""
    if cuda is None:
        return f"torch {torch} is built for the CPU, and the node has NVIDIA GPUs (driver {driver})"
    least = least_driver(cuda)
    if least is not None and is_older(driver, least):
        return f"torch {torch} is built for CUDA {cuda}, which needs driver {least}; the node has {driver}"
    return None


def names_torch(text: str) -> bool:
    """Whether a setup text, a requirements file or a conda file installs torch by its name."""
    return re.search(r"(?<![\w.-])(?:py)?torch(?:-\d|(?![\w./-]|\s*:))", _without_comments(text)) is not None


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
