"""The programs that make layers: found on the node, else fetched once, pinned, into the shared tools folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpucloud.agent.layer.environment import Places
from gpucloud.domain.node.layer import MICROMAMBA, MICROMAMBA_VERSION, UV_VERSION, UV_WHEELS, PinnedFile
from gpucloud.system.wholefile import write_whole

_OLDEST_UV = (0, 12)  # its UV_TORCH_BACKEND knows the builds for CUDA 13; that of 0.9.0 does not
_CONDAS = ("micromamba", "mamba", "conda")
_CONDA_HOMES = ("miniforge3", "mambaforge", "miniconda3", "anaconda3")
_TIMEOUT_S = 20.0
_MOST_BYTES = 200 << 20


class Unreachable(Exception):
    """The file could not be had; the message says from where and why, without credentials."""


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
    """Return the path of the pinned uv: by this interpreter's pip, whose settings and `environ` say from where, else
    from PyPI's own files. Raises Unreachable.
    """
    wheel = UV_WHEELS.get(platform.machine()) if sys.platform == "linux" else None
    if wheel is None:
        raise Unreachable(f"no uv is pinned for {sys.platform} on {platform.machine()}")
    program = _own_uv(places)
    places.tools.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.tools) as folder:
        archive = Path(folder, wheel.name)
        if importlib.util.find_spec("pip") is not None:
            _download_by_pip(f"uv=={UV_VERSION} --hash=sha256:{wheel.sha256}", folder, environ)
        else:
            fetch(wheel, archive)
        with zipfile.ZipFile(archive) as opened:
            write_whole(program, opened.read(f"uv-{UV_VERSION}.data/scripts/uv"), mode=0o755)
    if uv_version(str(program)) is None:
        raise Unreachable(f"uv {UV_VERSION} does not run here")
    return str(program)


def conda_program(places: Places, path: str) -> str:
    """Return a micromamba, mamba or conda: the node's, else micromamba, pinned and fetched. Raises Unreachable."""
    for found in _condas(places, path):
        if found is not None and _first_line([str(found), "--version"]):
            return str(found)
    file = MICROMAMBA.get(platform.machine()) if sys.platform == "linux" else None
    if file is None:
        raise Unreachable(f"no micromamba is pinned for {sys.platform} on {platform.machine()}")
    program = _own_micromamba(places)
    fetch(file, program, mode=0o755)
    return str(program)


def fetch(pinned: PinnedFile, target: Path, *, mode: int = 0o600) -> None:
    """Write what is at its address to `target` if it has the pinned hash. Raises Unreachable."""
    request = urllib.request.Request(pinned.url, headers={"User-Agent": "gpucloud"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            data = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise Unreachable(f"{pinned.url}: HTTP {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:  # URLError, timeouts and TLS errors are OSErrors
        raise Unreachable(f"{pinned.url}: {getattr(error, 'reason', None) or error}") from error
    if hashlib.sha256(data).hexdigest() != pinned.sha256:
        raise Unreachable(f"{pinned.url} is not the file that is pinned (SHA-256 {pinned.sha256[:12]}…)")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data, mode=mode)


def _download_by_pip(requirement: str, folder: str, environ: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    argv += ["-d", folder, "-r", "/dev/stdin"]
    done = subprocess.run(argv, input=requirement, env=dict(environ), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = (said or ["ERROR: it says nothing"])[-1].removeprefix("ERROR: ")
        raise Unreachable(f"pip has no {requirement.partition(' ')[0]}: {reason}")


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


def _first_line(argv: list[str]) -> str:
    """Return the first line of what the program says; empty where it does not run."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0] if done.returncode == 0 else ""
