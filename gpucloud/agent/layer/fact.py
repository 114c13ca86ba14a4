"""What a node says of the job's Python: what the base has, and how the job's layer stands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.layer.environment import Places, platform_name
from gpucloud.domain.node.bootstrap.facts import Layer
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.node.layer import LayerWanted, is_needed, layer_key, torch_backend
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


def gpu_kind(gpus: tuple[Gpu, ...] | None) -> tuple[str, str]:
    """Return which builds of torch suit these devices, for uv, and their driver; stand-ins are none."""
    if not gpus or smi.are_stand_ins():
        return torch_backend(()), ""
    return torch_backend(tuple(gpu.name for gpu in gpus)), gpus[0].driver


def key_of(digest: str, gpu: tuple[str, str]) -> str:
    """Return the name of the layer on this interpreter and platform."""
    version = tuple(sys.version_info[:3])
    return layer_key(digest, python=sys.executable, version=version, platform=platform_name(), gpu=gpu)


def layer_fact(places: Places, wanted: LayerWanted | None, base: Base, gpu: tuple[str, str]) -> Layer | None:
    """Return how the job's layer stands, None where the job needs none; asking for it counts as using it."""
    if wanted is None or not is_needed(wanted, boto3=base.boto3, torch=base.torch):
        return None
    key = key_of(wanted.digest, gpu)
    ready = read_ready(places.folder(key))
    if ready is not None:
        with contextlib.suppress(OSError):
            os.utime(places.folder(key) / "ready.json")
        return ready
    python = str(places.folder(key) / "bin" / "python")
    return Layer(key=key, python=python, ready=False, torch=None, torch_backend=gpu[0])


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
            torch_backend=said["torch_backend"],
            uv=said["uv"],
            packages=tuple(said["packages"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


# What is installed for an interpreter, read from metadata; nothing is imported, which for torch takes seconds.


_METADATA = re.compile(r"(.+?)-(\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def installed_version(package: str, path: Iterable[str]) -> str | None:
    """Return the version of the package that an interpreter with this `sys.path` would import."""
    prefix = f"{package}=="
    return next((line[len(prefix) :] for line in _distributions(path) if line.startswith(prefix)), None)


def freeze(path: Iterable[str]) -> tuple[str, ...]:
    """Return `name==version` for everything on the path, sorted; the first of a name counts, as it does for import."""
    found: dict[str, str] = {}
    for line in _distributions(path):
        found.setdefault(re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(), line)
    return tuple(sorted(found.values(), key=str.lower))


def torch_cuda(path: Iterable[str]) -> str | None:
    """Return the CUDA that the torch on the path was built for, such as `13.0`; None: for the CPU, or no torch."""
    for folder in path:
        text = read_text(Path(folder or ".") / "torch" / "version.py")
        if text is not None:
            m = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return m[1] if m else None
    return None


def _distributions(path: Iterable[str]) -> Iterable[str]:
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # a zip, or a place that is not there
        for name in names:
            m = _METADATA.fullmatch(name)
            if m is not None:
                yield f"{m[1]}=={m[2]}"
