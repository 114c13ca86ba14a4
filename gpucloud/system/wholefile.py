"""Files that appear whole: written beside, then renamed. And what is asked of folders by their descriptors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_NAME_BYTES = 255
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

HASHED_BYTES = 1 << 30
"""What is hashed in one go: a disk for results reads 100 MB/s, and who waits for a whole file takes it for stuck."""


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


# Of folders that are open. All raise OSError.


def is_there(name: str, folder: int) -> bool:
    """Whether anything has that name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_file(name: str, folder: int) -> bool:
    """Whether that is a file, and neither a link nor anything else."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def free_name(name: str, ending: str, folder: int) -> str:
    """Return the name with that ending, and a number if it is taken; a long one is cut to what a disk takes."""
    for number in itertools.count(1):
        end = f".{ending}" if number == 1 else f".{ending}.{number}"
        stem = name
        while len(os.fsencode(stem + end)) > _NAME_BYTES:
            stem = stem[:-1]
        if not is_there(stem + end, folder):
            return stem + end
    raise AssertionError("numbers do not end")


def has_equal(name: str, ending: str, names: list[str], folder: int, heard: Callable[[], None]) -> bool:
    """Whether one of the names, which are in order, is the name with that ending, of any number, and of its content."""
    start = f"{name}.{ending}".rstrip("0123456789")
    after = (names[at] for at in range(bisect_left(names, start), len(names)))
    others = itertools.takewhile(lambda other: other.startswith(start), after)
    return any(same((name, folder), (other, folder), heard) for other in others)


def same(one: tuple[str, int], other: tuple[str, int], heard: Callable[[], None]) -> bool:
    """Whether two names, each in a folder, are files of one content; `heard` as in `content_of`."""
    if not (is_file(*one) and is_file(*other)):
        return False
    sizes = {os.stat(name, dir_fd=at, follow_symlinks=False).st_size for name, at in (one, other)}
    return len(sizes) == 1 and len({_content_there(*place, heard) for place in (one, other)}) == 1


def content_of(descriptor: int, heard: Callable[[], None]) -> str:
    """Return the name of an open file's content (`content_name`); `heard` is called after each piece."""
    size, hashes = os.fstat(descriptor).st_size, list[str]()
    for start in range(0, max(size, 1), HASHED_BYTES):
        hashes.append(_sha256_between(descriptor, start, min(start + HASHED_BYTES, size)))
        heard()
    return content_name(hashes)


def content_name(hashes: Sequence[str]) -> str:
    """Return the name of a content by the SHA-256 of each `HASHED_BYTES` of it: that of a single piece is its own."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def opened_below(folder: int, name: str) -> int | None:
    """Return the file of that path, open to be read, reached through no link; None for what is no file.

    FileNotFoundError for nothing.
    """
    *above, last = name.split("/")
    at = os.dup(folder)
    try:
        for part in above:
            below = os.open(part, FOLDER, dir_fd=at)
            os.close(at)
            at = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(last, flags, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
            return None
        raise
    finally:
        os.close(at)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def made_and_opened(at: int, part: str, mode: int | None) -> int:
    """Return the folder of that name below another, opened through no link; it is made if need be, with the mode."""
    is_new = True
    try:
        os.mkdir(part, dir_fd=at)
    except FileExistsError:
        is_new = False
    descriptor = os.open(part, FOLDER, dir_fd=at)
    if is_new and mode is not None:
        os.fchmod(descriptor, mode & 0o755 | stat.S_IRWXU)
    return descriptor


def new_or_own(name: str, flags: int, folder: int) -> int:
    """Return a part, new or begun by us; one that something else has a name for too is begun anew."""
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            descriptor = os.open(name, flags, dir_fd=folder)
        except OSError:
            os.unlink(name, dir_fd=folder)
            continue
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            return descriptor
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)


def _sha256_between(descriptor: int, at: int, end: int) -> str:
    digest = hashlib.sha256()
    while at < end and (chunk := os.pread(descriptor, min(_CHUNK_BYTES, end - at), at)):
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()


def _content_there(name: str, folder: int, heard: Callable[[], None]) -> str:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        return content_of(descriptor, heard)
    finally:
        os.close(descriptor)
