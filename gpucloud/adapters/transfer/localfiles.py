"""The files of this machine that are copied to nodes."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.errors import UsageError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A file of this machine and what it becomes on a node; `sha256` where it is known already."""

    local: Path
    path: str
    size: int
    mode: int
    mtime_ns: int
    sha256: str = ""


def sent(local: Path, path: str) -> Sent:
    """Return a local file as one to be sent to a path."""
    status = local.stat()
    mode = stat.S_IMODE(status.st_mode) & 0o777
    return Sent(local=local, path=path, size=status.st_size, mode=mode, mtime_ns=status.st_mtime_ns)


def local_tree(folder: Path, below: str) -> tuple[tuple[Sent, ...], tuple[tuple[str, str], ...]]:
    """Return the files of a folder and its links, to be sent `below` a path. UsageError for a link that leads out."""
    files, links = [], []
    real = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).as_posix()
        name = f"{below}/{inner}" if below else inner
        if path.is_symlink():
            target = os.path.realpath(path)
            if not target.startswith(f"{real}/"):
                raise UsageError(f"the link {path} leads out of {folder}", hint="copy what it names into the folder")
            links.append((name, os.path.relpath(target, os.path.realpath(path.parent))))
        elif path.is_file():
            files.append(sent(path, name))
    return tuple(files), tuple(links)


def sha256_of(path: Path) -> str:
    """Return the hash of a local file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
