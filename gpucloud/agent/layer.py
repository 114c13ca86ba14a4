"""The environment that a job's `setup` fills, on top of the node's Python; the same setup is run once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.agent.wholefile import read_tail, read_text, write_whole
from gpucloud.domain.bootstrap.facts import Layer
from gpucloud.domain.layer import BOTO3, layer_key, suffices

_PIP = '#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A layer that is wanted: the user's commands, none if empty, run in `code` with `env` added.

    With `boto3` it is installed after them, unless they or the base brought one that suffices.
    """

    setup: str
    digest: str
    code: str
    env: Mapping[str, str]
    boto3: bool = False


def layer_fact(root: Path, key: str) -> Layer:
    """Return how the layer stands; it is ready when its `ready.json` is there."""
    folder = _layers(root) / key
    python = str(folder / "bin" / "python")
    try:
        ready = json.loads(read_text(folder / "ready.json") or "")
        return Layer(key=key, python=python, ready=True, torch=ready["torch"], boto3=ready["boto3"])
    except (ValueError, KeyError, TypeError):
        return Layer(key=key, python=python, ready=False, torch=None)


def build(root: Path, order: Order) -> str | None:
    """Make the layer unless it is ready; return None, or the last lines of the commands that failed.

    Built where it will stay, because scripts that pip installs name their interpreter; `ready.json` comes last,
    and what is there without it is the rest of a build that was killed.
    """
    key = layer_key(order.digest, sys.executable, tuple(sys.version_info[:3]))
    folder = _layers(root) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{key}.lock").open("w") as lock:
        # Another node with the same home for layers, or an earlier call that we lost, may be at it: wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if layer_fact(root, key).ready:
            return None
        shutil.rmtree(folder, ignore_errors=True)
        _make_environment(folder)
        failure = _run(folder, order, order.setup, order.code) if order.setup else None
        if failure is None and order.boto3 and not suffices(installed_version("boto3", _path(folder))):
            failure = _run(folder, order, f"pip install -q '{BOTO3}'", str(folder))
        if failure is None:
            found = {name: installed_version(name, _path(folder)) for name in ("torch", "boto3")}
            write_whole(folder / "ready.json", json.dumps({"setup": order.setup, **found}))
        return failure


def installed_version(package: str, path: list[str]) -> str | None:
    """Return the package's version from its metadata on `path`; importing it may take a second."""
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                return name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return None


def _layers(root: Path) -> Path:
    return Path(os.environ.get("GPUCLOUD_LAYERS") or root / "layers")


def _make_environment(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, stdin=subprocess.DEVNULL)
    # The layer sees exactly what the base sees, which may be an environment itself: `--system-site-packages` would
    # show the system's packages in its place. `addsitedir` also follows the `.pth` files of what is installed there.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _site_paths()]
    (_site_packages(folder) / "base.pth").write_text("".join(lines))
    for name in ("pip", "pip3"):
        path = folder / "bin" / name
        path.write_text(_PIP)
        path.chmod(0o755)


def _site_paths() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def _site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def _path(folder: Path) -> list[str]:
    return [str(_site_packages(folder)), *sys.path]


def _run(folder: Path, order: Order, commands: str, directory: str) -> str | None:
    """Run the commands in the layer; return None, or their last lines when they failed."""
    env = {
        **os.environ,
        **order.env,
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    log_path = folder / "setup.log"
    with log_path.open("ab") as log:
        # A list of commands as the user wrote it, stopped at the first that fails.
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", commands],
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        return None
    tail = "\n".join(read_tail(log_path, 8192).splitlines()[-20:])
    return f"{tail}\n(exit code {done.returncode}; all of it: {log_path})"
