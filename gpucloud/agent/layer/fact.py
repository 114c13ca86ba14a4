"""What a node says of the job's Python: what the base has, and how the job's layer stands."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.layer.installed import freeze, installed_version, torch_cuda
from gpucloud.agent.layer.places import Places, platform_name
from gpucloud.domain.bootstrap.facts import Layer
from gpucloud.domain.hardware.gpus import Gpu
from gpucloud.domain.layer import LayerWanted, is_needed, layer_key
from gpucloud.domain.torchwheels import torch_index
from gpucloud.wholefile import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The interpreter that runs this, and what it has; `packages` as `pip freeze` names them."""

    torch: str | None
    torch_cuda: str | None
    boto3: str | None
    packages: tuple[str, ...]


def base() -> Base:
    """Return what this interpreter has."""
    return Base(
        torch=installed_version("torch", sys.path),
        torch_cuda=torch_cuda(sys.path),
        boto3=installed_version("boto3", sys.path),
        packages=freeze(sys.path),
    )


def index_for(gpus: tuple[Gpu, ...] | None) -> str:
    """Return the index of torch's wheels for these devices; stand-ins are none."""
    if not gpus or smi.are_stand_ins():
        return torch_index(None)
    return torch_index(gpus[0].driver, tuple(gpu.name for gpu in gpus))


def key_of(digest: str, index: str) -> str:
    """Return the name of the layer on this interpreter and platform."""
    version = tuple(sys.version_info[:3])
    return layer_key(digest, python=sys.executable, version=version, platform=platform_name(), torch_index=index)


def layer_fact(places: Places, wanted: LayerWanted | None, base: Base, index: str) -> Layer | None:
    """Return how the job's layer stands, None where the job needs none; asking for it counts as using it."""
    if wanted is None or not is_needed(wanted, boto3=base.boto3, torch=base.torch):
        return None
    key = key_of(wanted.digest, index)
    ready = read_ready(places.folder(key))
    if ready is not None:
        with contextlib.suppress(OSError):
            os.utime(places.folder(key) / "ready.json")
        return ready
    python = str(places.folder(key) / "bin" / "python")
    return Layer(key=key, python=python, ready=False, torch=None, torch_index=index)


def read_ready(folder: Path) -> Layer | None:
    """Return what the layer in the folder holds; None while it is not whole."""
    try:
        said = json.loads(read_text(folder / "ready.json") or "")
        return Layer(
            key=folder.name,
            python=str(folder / "bin" / "python"),
            ready=True,
            torch=said["torch"],
            torch_cuda=said["torch_cuda"],
            boto3=said["boto3"],
            torch_index=said["torch_index"],
            uv=said["uv"],
            packages=tuple(said["packages"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
