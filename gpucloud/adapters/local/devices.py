"""This machine's GPUs as the embedded cloud rents them: which types there are, and which devices a node gets."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from gpucloud import smi
from gpucloud.domain.node.hardware import Gpu, model_of

_TYPE = re.compile(r"local\.gpu([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of this machine that its user lets us see (CUDA_VISIBLE_DEVICES), by their UUIDs; all of one model."""

    uuids: tuple[str, ...] = ()
    model: str | None = None
    vram_gib: int | None = None

    def free(self, count: int, taken: Collection[str]) -> tuple[str, ...] | None:
        """Return `count` devices that are not taken; None when there are not so many."""
        left = [uuid for uuid in self.uuids if uuid not in taken]
        return tuple(left[:count]) if len(left) >= count else None


def here() -> Devices:
    """Return this machine's; none when its `nvidia-smi` does not answer.

    A part of one (MIG) is none: a node that is given the whole device may take another's part.
    """
    names_part = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Devices() if names_part else of(smi.gpus()[0] or ())


def of(gpus: tuple[Gpu, ...]) -> Devices:
    """Return those of the first device's model: a job's ranks want equal ones."""
    if not gpus:
        return Devices()
    equal = [gpu for gpu in gpus if (gpu.name, gpu.memory_mib) == (gpus[0].name, gpus[0].memory_mib)]
    return Devices(
        uuids=tuple(gpu.uuid for gpu in equal),
        model=model_of(gpus[0].name),
        vram_gib=round(gpus[0].memory_mib / 1024) if gpus[0].memory_mib is not None else None,
    )


def type_with(count: int) -> str:
    """Return the name of the type that has so many GPUs."""
    return f"local.gpu{count}"


def gpus_of(instance_type: str) -> int:
    """Return how many GPUs a node of the type gets: 0 for the recorded types, which are processes only."""
    m = _TYPE.fullmatch(instance_type)
    return int(m[1]) if m else 0
