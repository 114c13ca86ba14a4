"""The object store in a directory: each object is a plain file, written whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.errors import StoreError
from gpucloud.store.contract import RESERVED, Conflict, Stored, checked

_LOCK = f"{RESERVED}lock"
_HINTS = {
    errno.ENOSPC: "free some space there, or name another store",
    errno.EDQUOT: "free some of your quota there, or name another store",
    errno.EACCES: "make the directory writable for this user, or name another store",
    errno.EPERM: "make the directory writable for this user, or name another store",
    errno.EROFS: "the file system is read-only: name another store",
}


class DirectoryStore:
    """Objects as files below `root`, which may be shared by processes and, over a network file system, machines.

    A file is written beside its place and renamed or linked into it, so a reader meets a whole object or none.
    One lock file orders the writes. A version is the file's modification time, made to rise with every write, and
    its inode. Store time is this machine's clock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none."""
        path = self._path(key)
        with _explained("read", path):
            try:
                with path.open("rb") as file:
                    about = os.fstat(file.fileno())
                    data = file.read()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None
        now = datetime.now(timezone.utc)
        modified = datetime.fromtimestamp(about.st_mtime_ns / 1e9, timezone.utc)
        return Stored(data=data, version=_version(about), modified=modified, store_time=now)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,
    ) -> str:
        """Write the object whole and durably, and return its version; a condition that fails raises `Conflict`.

        A `private` one can be read by its owner only (mode 0600).
        """
        path = self._path(key)
        with _explained("write", path):
            beside = self._write_beside(path, data, 0o600 if private else 0o666)
            try:
                with self._locked():
                    return _place(beside, path, if_absent=if_absent, if_version=if_version)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    beside.unlink()

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted."""
        folder = prefix.rpartition("/")[0]
        top = self._path(folder) if folder else self.root
        with _explained("list", top):
            keys = [path[len(str(self.root)) + 1 :] for path in _files(str(top))]
        return tuple(sorted(key for key in keys if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        path = self._path(key)
        with _explained("remove", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder(path.parent)
        for folder in path.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except OSError:  # not empty, or another writer is about to fill it
                break

    def _path(self, key: str) -> Path:
        return self.root / checked(key)

    def _write_beside(self, path: Path, data: bytes | memoryview, mode: int) -> Path:
        beside = path.with_name(f"{RESERVED}{secrets.token_hex(8)}.tmp")
        with os.fdopen(_create(beside, mode), "wb", buffering=0) as file:
            try:
                rest = memoryview(data).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        return beside

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # flock belongs to the open file, so it excludes threads of one process as well as processes.
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _create(path: Path, mode: int) -> int:
    for _ in range(20):
        # `delete` takes empty folders away, so a folder just made may be gone again.
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    raise FileNotFoundError(errno.ENOENT, "the folder vanishes again and again", str(path.parent))


def _place(beside: Path, path: Path, *, if_absent: bool, if_version: str | None) -> str:
    try:
        there = path.stat()
    except FileNotFoundError:
        there = None
    if if_version is not None and (there is None or _version(there) != if_version):
        raise Conflict(str(path))
    # Two writes within one tick of the file system's clock, in a reused inode, would otherwise look alike.
    moment = max(time.time_ns(), there.st_mtime_ns + 1 if there else 0)
    os.utime(beside, ns=(moment, moment))
    version = _version(beside.stat())
    if if_absent:
        try:
            os.link(beside, path)
        except FileExistsError:
            raise Conflict(str(path)) from None
    else:
        beside.replace(path)
    _sync_folder(path.parent)
    return version


def _version(about: os.stat_result) -> str:
    return f"{about.st_mtime_ns:x}-{about.st_ino:x}"


def _files(top: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(top))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(RESERVED):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            yield entry.path


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check that the store's directory exists and is healthy")
        raise StoreError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error
