"""The empty environment that a setup fills: on top of the node's Python, or from a conda file."""

from __future__ import annotations

import pkgutil
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gpucloud.agent.layer import pipshim

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
