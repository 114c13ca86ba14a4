"""A script's directory on the disk: listed, judged file by file, copied while the script goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from gpucloud.domain.checkpoint.directory import OURS, Listing, Signature
from gpucloud.store import ObjectStore, get_small, open_store
from gpucloud.store.checkpoints import Checkpoints, under

_TORCH = (".pt", ".pth", ".ckpt")
_JSON_BYTES = 256 << 20
_COPY_BYTES = 8 << 20
# Another file system, or one whose kernel cannot: then by our own hands.
_ELSEWHERE = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def look(directory: Path) -> dict[str, Signature]:
    """Return every file below the directory; what goes away meanwhile is not there. Empty for no directory."""
    found: dict[str, Signature] = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(OURS)]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118  thousands of files, several times a second
            try:
                about = os.stat(path)  # noqa: PTH116
            except OSError:
                continue
            if stat.S_ISREG(about.st_mode) and not name.startswith(OURS):
                relative = os.path.relpath(path, directory)
                found[relative] = Signature(size=about.st_size, mtime_ns=about.st_mtime_ns, inode=about.st_ino)
    return found


def is_whole(path: Path) -> bool | None:
    """Whether the file shows by its form that it was written to its end; None where its form does not tell.

    Nothing is unpickled: a zip (torch.save) ends with its directory, safetensors names its length at its beginning,
    JSON can be parsed. OSError when it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(8)
    if path.suffix == ".safetensors":
        return _is_whole_safetensors(path)
    if head[:4] == b"PK\3\4":
        return _is_whole_zip(path)
    if path.suffix == ".json":
        return _is_json(path)
    return False if path.suffix in _TORCH and len(head) < len(b"PK\3\4") else None


class Texts:
    """The texts of small files, each read again when it has changed."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, str]] = {}

    def of(self, directory: Path, paths: Iterable[str], listing: Listing) -> dict[str, str]:
        """Return what is in each of the files that is a text, and as it is listed."""
        kept = {path: self._known(directory, path, listing[path]) for path in paths}
        self._read = {path: (listing[path], text) for path, text in kept.items() if text is not None}
        return {path: text for path, (_, text) in self._read.items()}

    def _known(self, directory: Path, path: str, signature: Signature) -> str | None:
        known = self._read.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        try:
            with (directory / path).open("rb") as file:
                same = _signature(os.fstat(file.fileno())) == signature
                return file.read(signature.size).decode() if same else None
        except (OSError, UnicodeDecodeError):
            return None


def copy(directory: Path, content: Iterable[tuple[str, Signature]], into: Path) -> bool:
    """Copy the files below `into`, with their times; False when one is not, or is no longer, what it was listed as."""
    rows = tuple(content)
    for path, signature in rows:
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (directory / path).open("rb") as source, target.open("wb") as copied:
                same = _signature(os.fstat(source.fileno())) == signature
                if not same or not _copied(source.fileno(), copied.fileno(), signature.size):
                    return False
                put_time(target, signature.mtime_ns)
        except FileNotFoundError:
            return False
    return all(_still(directory / path, signature) for path, signature in rows)


def put_time(path: Path, mtime_ns: int) -> None:
    """Have the file or folder be last written then. OSError."""
    os.utime(path, ns=(mtime_ns, mtime_ns))


def move(source: Path, target: Path) -> None:
    """Move a file with its time, whatever lies at its target, to another file system too. OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    try:
        source.replace(target)
    except OSError:
        shutil.move(source, target)


def _is_whole_zip(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            end = archive.start_dir
            return all(entry.header_offset + 30 + entry.compress_size <= end for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
        return False


def _is_whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == len(b"8 bytes.") else size
        if 8 + length > size:
            return False
        try:
            entries = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            return bool(8 + length + max(ends, default=0) == size)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            return False


def _is_json(path: Path) -> bool | None:
    if path.stat().st_size > _JSON_BYTES:
        return None
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _copied(source: int, target: int, size: int) -> bool:
    """Copy `size` bytes, by the kernel where it can (some file systems then share the blocks); False for fewer."""
    done = 0
    while done < size:
        count = _some(source, target, min(_COPY_BYTES, size - done))
        if count == 0:
            return False
        done += count
    return True


def _some(source: int, target: int, size: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, size)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
    data = os.read(source, size)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


def _still(path: Path, signature: Signature) -> bool:
    try:
        return _signature(path.stat()) == signature
    except OSError:
        return False


def _signature(about: os.stat_result) -> Signature:
    return Signature(size=about.st_size, mtime_ns=about.st_mtime_ns, inode=about.st_ino)


# Where a directory's checkpoints are: their store, and the prefix below which they lie in it.


class CheckpointLocation:
    """One job's checkpoints in the store at that URL, of which `keep` stay. Every call may raise StoreError."""

    def __init__(self, url: str, prefix: str, *, keep: int) -> None:
        self.store: ObjectStore = open_store(url)
        self.checkpoints = Checkpoints(self.store, prefix, keep=keep)
        self._prefix = prefix

    def key(self, name: str) -> str:
        """Return the key of an object in the store, by its name below the prefix."""
        return under(self._prefix, name)

    def get(self, name: str) -> bytes | None:
        """Return a small object, None when there is none; one that is too large has no bytes."""
        stored = get_small(self.store, self.key(name))
        return stored.data if stored else None

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a small object whole. Raises Conflict with `if_absent` when it is there."""
        self.store.put(self.key(name), data, if_absent=if_absent)

    def read_into(self, name: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        return self.store.read_into(self.key(name), at, into)
