"""The empty environment that a setup fills, the variables it sees, and where layers and tools lie."""

from __future__ import annotations

import os
import pkgutil
import platform
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.agent.layer import pipshim
from gpucloud.domain.node.layer import USUAL_INDEX, LayerOrder, torch_url

_PLAIN = '#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n'


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


def add_pip(made: Environment, wheel: Path) -> None:
    """Unpack pip's wheel into the environment: what `ensurepip` does where it is installed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(made.site_packages)


def add_pip_commands(made: Environment, uv: str | None) -> None:
    """Make `pip` and `pip3` of the environment: to uv where there is one, else to pip. Conda's own stay."""
    text = _PLAIN
    if uv is not None:
        shim = made.folder / "pip-by-uv.py"
        shim.write_bytes(pkgutil.get_data(pipshim.__name__.rpartition(".")[0], "pipshim.py") or b"")
        text = f'#!/bin/sh\nexec {shlex.join([str(made.python), "-I", "-S", str(shim), uv])} "$@"\n'
    for name in ("pip", "pip3"):
        path = made.folder / "bin" / name
        if not path.exists():
            path.write_text(text)
            path.chmod(0o755)


def _site_paths() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


# The environment variables that a setup and our own installs see.


def variables(order: LayerOrder, places: Places, made: Environment | None, index: str) -> dict[str, str]:
    """Return the node's variables, ours, and the job's, which win; `made` is None before there is an environment.

    Addresses of indexes travel here only, never in an argument list: they may hold a password.
    """
    job = dict(order.env)
    packages = job.get("PIP_INDEX_URL") or order.pip_mirror
    mirrors = dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"), packages) if packages else {}
    ours = {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CACHE_DIR": str(places.cache / "pip"),
        "UV_CACHE_DIR": str(places.cache / "uv"),
        "UV_NO_PROGRESS": "1",
        "MAMBA_ROOT_PREFIX": str(places.cache / "mamba"),
        "GPUCLOUD_TORCH_INDEX": f"{(order.torch_mirror or USUAL_INDEX).rstrip('/')}/{index}",
    }
    env = {**os.environ, **ours, **mirrors, **job}
    if made is not None:
        env["PATH"] = f"{made.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        env["CONDA_PREFIX" if made.conda else "VIRTUAL_ENV"] = str(made.folder)
        env["UV_PYTHON"] = str(made.python)
    return env


def installing(env: dict[str, str], index: str, mirror: str | None) -> dict[str, str]:
    """Return the variables under which pip finds torch's build of that index, and no other."""
    url = torch_url(index, mirror, platform.machine())
    if url is None:
        return env
    others = ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL")
    kept = {name: value for name, value in env.items() if name not in others}
    return {**kept, "PIP_INDEX_URL": url, "UV_DEFAULT_INDEX": url}


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
    shared = environ.get("GPUCLOUD_LAYERS")
    if shared:
        return Places(layers=Path(shared), tools=Path(shared) / ".bin", cache=Path(shared) / ".cache")
    home = Path("~/.gpucloud").expanduser()
    return Places(layers=home / "layers", tools=home / "bin", cache=home / "cache")


def platform_name() -> str:
    """Return what wheels are built for here, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine()}"
