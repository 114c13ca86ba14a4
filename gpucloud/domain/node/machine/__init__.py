"""A machine's own software: driver, fabric, containers; what a job wants of it, and how it was left."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from gpucloud.domain.codec import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWanted:
    """What a job wants of a machine below Python.

    `install`: gpucloud may install and change system software; else it only looks. `branch` is the driver's, such as
    `580`, empty for any that is not older than `least_driver`, such as `580.65.06`. `version` is the driver that an
    earlier node of the job got: it is taken where it can still be had. `gpus` is 0 for a job that wants no driver;
    unless the job `asked` for GPUs, a machine that has none needs none. `runtime` is `docker`, `apptainer`, `auto`
    (what is there, else Docker) or empty.
    """

    install: bool
    branch: str
    least_driver: str
    gpus: int
    asked: bool = True
    version: str = ""
    mig: str | None = None
    mps: bool = False
    exporter: bool = False
    runtime: str = ""
    efa: bool = False
    apt_mirror: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFact:
    """How a machine was left on this boot: the digest of the `MachineWanted` that was met, and the versions found."""

    digest: str
    versions: tuple[tuple[str, str], ...] = ()


def digest(wanted: MachineWanted) -> str:
    """Return what names the wish; the version, which is taken only where a driver is installed, does not count."""
    return hashlib.sha256(to_json(replace(wanted, version="")).encode()).hexdigest()
