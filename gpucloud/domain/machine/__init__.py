"""A machine's own software: driver, fabric, containers; what a job wants of it, and how it was left."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWanted:
    """What a job wants of a machine below Python.

    `install`: gpucloud may install and change system software; else it only looks. `branch` is the driver's, such as
    `580`; `least_driver` the oldest that will do, such as `580.65.06`. `runtime` is `docker`, `apptainer` or empty.
    """

    install: bool
    branch: str
    least_driver: str
    gpus: int
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
