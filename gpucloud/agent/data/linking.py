"""The path under which scripts find a set: a link to where it lies."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from gpucloud.domain.errors import NodeError

_OURS = re.compile(r"/(gpucloud-data|data/sets)/[0-9a-f]{64}$")


def require(target: Path, *, below_root: bool) -> None:
    """Raise NodeError when something that is not ours is at the target, or it could not be made."""
    if target.is_symlink():
        if _OURS.search(str(target.readlink())):
            return
        raise NodeError(f"{target} is a link to {target.readlink()}", hint="name another folder under `data:`")
    if target.exists():
        if target.is_dir() and not os.listdir(target):
            return
        raise NodeError(f"{target} is there already and is not empty", hint="name another folder under `data:`")
    if below_root or _writable(target) or _run("sudo", "-n", "true"):
        return
    raise NodeError(
        f"{target} cannot be made: {_above(target)} belongs to somebody else, and sudo asks for a password",
        hint=f"name a folder below {Path.home()} under `data:`",
    )


def link(target: Path, folder: Path, *, below_root: bool) -> None:
    """Make the target a link to the folder, in one step where one was there; by sudo where it must be."""
    if target.is_symlink() and str(target.readlink()) == str(folder):
        return
    if below_root or _writable(target):
        _make(target, folder)
        return
    beside = f"{target}.gpucloud-{os.getpid()}"
    made = _run("sudo", "-n", "mkdir", "-p", str(target.parent)) and (
        target.is_symlink() or not target.exists() or _run("sudo", "-n", "rmdir", str(target))
    )
    made = made and _run("sudo", "-n", "ln", "-s", "-T", str(folder), beside)
    if not made or not _run("sudo", "-n", "mv", "-T", beside, str(target)):
        raise NodeError(f"{target} cannot be made a link to {folder}", hint="name another folder under `data:`")


def _make(target: Path, folder: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    beside = target.with_name(f".{target.name}.gpucloud-{os.getpid()}")
    beside.symlink_to(folder)
    beside.replace(target)


def _writable(target: Path) -> bool:
    return os.access(_above(target), os.W_OK)


def _above(target: Path) -> Path:
    return next(folder for folder in target.parents if folder.is_dir())


def _run(*argv: str) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
