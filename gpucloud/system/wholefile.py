"""Files that appear whole: written beside, then renamed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o600, lasting: bool = False) -> None:
    """Replace the file at once; a reader finds the old content or the new. Raises OSError, and leaves no rest.

    Threads and processes may write it at once. `mode` whatever the process's umask is. `lasting`: it is on the disk
    before it counts, as after a power cut.
    """
    with open_whole(path, mode=mode, lasting=lasting) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_whole(path: Path, *, mode: int = 0o600, lasting: bool = False) -> Iterator[BinaryIO]:
    """Give a file to write, which replaces that of the path at the end of the block; as `write_whole` otherwise."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def read_text(path: Path) -> str | None:
    """Return the file's text; None when it is not there or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_tail(path: Path, size: int) -> str:
    """Return at most the last `size` bytes of the file as text; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size).decode("utf-8", errors="replace")
    except OSError:
        return ""


def read_last_lines(path: Path, size: int) -> str:
    """Return the whole lines in the last `size` bytes of the file: nobody could tell that half a secret is one."""
    text = read_tail(path, size + 1)  # with the byte before, which may end a line
    try:
        return text if path.stat().st_size <= size else text.partition("\n")[2]
    except OSError:
        return ""
