"""A job's Python on this node: where layers and tools lie, the environment that a setup fills, and how both stand."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.job.code import SETUPS
from gpucloud.domain.node.bootstrap.facts import Layer
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.node.layer import LayerOrder, LayerWanted, is_needed, layer_key, torch_backend
from gpucloud.domain.variables import GPUCLOUD_LAYERS
from gpucloud.system import smi
from gpucloud.system.wholefile import read_text

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
    shown = {info.name.partition("-")[0].lower() for info in made.site_packages.glob("*.dist-info")}
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


# What a node says of the job's Python: what the base has, and how the job's layer stands.


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
    if ready is not None and is_set_up(wanted.tree, key):
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


def is_set_up(tree: str, key: str) -> bool:
    """Whether the setup of that layer has run in the tree of code, if it is of one: they are removed, and come back."""
    return not tree or _mark(tree, key).exists()


def mark_set_up(tree: str, key: str) -> None:
    """Note in the tree of code, if the layer is of one, that its setup has run there."""
    if tree:
        _mark(tree, key).parent.mkdir(exist_ok=True)
        _mark(tree, key).touch()


def _mark(tree: str, key: str) -> Path:
    return Path(tree, SETUPS, key)


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
