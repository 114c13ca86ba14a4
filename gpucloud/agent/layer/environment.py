"""The empty environment that a setup fills, the variables it sees, and where layers and tools lie."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.node.layer import LayerOrder
from gpucloud.domain.variables import GPUCLOUD_LAYERS
from gpucloud.wholefile import read_text

_PIP = '#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n'
_SHOWN_BY = "gpucloud"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment's folder, and whether it is conda's, which sees nothing of the node's own Python."""

    folder: Path
    conda: bool

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where packages are installed."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    @property
    def path(self) -> list[str]:
        """What its interpreter imports from, save the standard library."""
        return [str(self.site_packages), *([] if self.conda else sys.path)]


def make_venv(folder: Path) -> Environment:
    """Return a virtual environment on top of this interpreter; a stock Ubuntu, without ensurepip, can make it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, stdin=subprocess.DEVNULL)
    made = Environment(folder=folder, conda=False)
    # The layer sees exactly what the base sees, which may be an environment itself: `--system-site-packages` would
    # show the system's packages in its place. `addsitedir` also follows the `.pth` files of what is installed there.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _site_paths()]
    (made.site_packages / "base.pth").write_text("".join(lines))
    return made


def conda_argv(program: str, folder: Path, file: Path) -> list[str]:
    """Return the command that makes the conda environment; conda itself and the first mamba say `env create`."""
    if Path(program).name.startswith("micromamba"):
        return [program, "create", "--yes", "--prefix", str(folder), "--file", str(file)]
    return [program, "env", "create", "--yes", "--prefix", str(folder), "--file", str(file)]


def add_commands(made: Environment, uv: str | None) -> None:
    """Make `uv`, where there is one, `pip` and `pip3` of the environment. Conda's own stay."""
    commands = made.folder / "bin"
    if uv is not None and not (commands / "uv").exists():
        (commands / "uv").symlink_to(uv)
    for path in (commands / "pip", commands / "pip3"):
        if not path.exists():
            path.write_text(_PIP)
            path.chmod(0o755)


def show_base(made: Environment) -> None:
    """Let uv see what the base has: it looks no further than the environment, and would fetch torch, gigabytes, again.

    What packages of the base say of themselves is copied. Those of a distribution have no RECORD, without which uv
    replaces nothing: it does not see them.
    """
    shown = set()
    for path in _site_paths():
        for info in sorted(Path(path).glob("*.dist-info")):
            name = info.name.partition("-")[0].lower()
            if name not in shown and (info / "RECORD").is_file():
                copy = made.site_packages / info.name
                copy.mkdir()
                for file in filter(Path.is_file, info.iterdir()):
                    (copy / file.name).write_bytes(file.read_bytes())
                (copy / "INSTALLER").write_text(_SHOWN_BY)
            shown.add(name)


def hide_base(made: Environment) -> None:
    """Remove what `show_base` copied, save what was installed in its place: the base may change."""
    for info in made.site_packages.glob("*.dist-info"):
        if read_text(info / "INSTALLER") == _SHOWN_BY:
            shutil.rmtree(info)


def _site_paths() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


# The environment variables that a setup and our own installs see.


def variables(order: LayerOrder, places: Places, made: Environment | None, torch_backend: str) -> dict[str, str]:
    """Return the node's variables, ours, and the job's, which win; `made` is None before there is an environment.

    Addresses of indexes travel here only, never in an argument list: they may hold a password. Where another index is
    named than PyPI, torch comes from there too: PyTorch's own may be out of reach.
    """
    job = dict(order.env)
    packages = job.get("PIP_INDEX_URL") or order.pip_mirror
    mirrors = dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), packages) if packages else {}
    backend = {} if packages or "UV_DEFAULT_INDEX" in job else {"UV_TORCH_BACKEND": torch_backend}
    ours = {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CACHE_DIR": str(places.cache / "pip"),
        "UV_CACHE_DIR": str(places.cache / "uv"),
        "UV_NO_PROGRESS": "1",
        "UV_SYSTEM_CERTS": "1",  # as pip: a network may have authorities of its own
        "MAMBA_ROOT_PREFIX": str(places.cache / "mamba"),
    }
    env = {**os.environ, **ours, **backend, **mirrors, **job}
    if made is not None:
        env["PATH"] = f"{made.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        env["CONDA_PREFIX" if made.conda else "VIRTUAL_ENV"] = str(made.folder)
        env["UV_PYTHON"] = str(made.python)
    return env


def only_from(index: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables under which uv takes packages of that index, and of no other."""
    others = ("UV_TORCH_BACKEND", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL", "UV_FIND_LINKS")
    kept = {name: value for name, value in env.items() if name not in others}
    return {**kept, "UV_DEFAULT_INDEX": index, "UV_NO_CONFIG": "1"}  # an index of uv.toml would come before it


# Where layers, the tools that make them and their caches lie.


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders that all jobs of a login share; GPUCLOUD_LAYERS moves them together, so that nodes can share them."""

    layers: Path
    tools: Path
    cache: Path

    def folder(self, key: str) -> Path:
        """Return where the layer of that name lies."""
        return self.layers / key


def places(environ: Mapping[str, str] = os.environ) -> Places:
    """Return this login's places."""
    shared = environ.get(GPUCLOUD_LAYERS)
    if shared:
        return Places(layers=Path(shared), tools=Path(shared) / ".bin", cache=Path(shared) / ".cache")
    home = Path("~/.gpucloud").expanduser()
    return Places(layers=home / "layers", tools=home / "bin", cache=home / "cache")


def platform_name() -> str:
    """Return what wheels are built for here, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine()}"
