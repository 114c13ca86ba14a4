"""Folders of the directory store: made durably, looked through, and new files in them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from gpucloud.store.contract import RESERVED

_OPEN_FILES = Path("/proc/self/fd")
_TRIES = 20
_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}  # network file systems, old kernels


def create(path: Path, mode: int) -> int:
    """Return a new file, open for writing; its folder is made if need be."""
    for _ in range(_TRIES):
        # `delete` takes empty folders away, so a folder just made may be gone again.
        with contextlib.suppress(FileNotFoundError):
            make_folder(path.parent)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    raise FileNotFoundError(errno.ENOENT, "the folder vanishes again and again", str(path.parent))


def create_unnamed(folder: Path, mode: int) -> int | None:
    """Return a new file without a name, open for writing, which is gone when its writer dies; None where there is none.

    `name_it` gives it one.
    """
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    for _ in range(_TRIES):
        try:
            make_folder(folder)
            return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in _NO_UNNAMED:
                return None
            raise
    return None


def name_it(descriptor: int, path: Path) -> None:
    """Give the unnamed file its name. Raises OSError."""
    opened = os.open(_OPEN_FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a folder does Python have the link followed to the file that is open (bpo-37612).
        os.link(str(descriptor), path, src_dir_fd=opened, follow_symlinks=True)
    finally:
        os.close(opened)


def files(top: str) -> Iterator[str]:
    """Yield the path of every file below; none where there is no folder."""
    try:
        entries = list(os.scandir(top))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(RESERVED):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from files(entry.path)
        else:
            yield entry.path


def make_folder(folder: Path) -> None:
    """Make the folder and those above it, durably; one that is there is no error."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make what was done in the folder durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
