"""Large files of a known size that are filled in any order, by several threads, and then appear whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.quantities import format_size
from gpucloud.store.contract import RESERVED
from gpucloud.store.directory import create, create_unnamed, name_it, sync_folder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM_KEPT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Filling:
    """A file that is not there before `finish`. Its room is taken at once, so that a full disk is met first.

    All methods raise StoreError.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Nothing is left of a filling that is not finished."""
        self._path = path
        self._size = size
        digest = hashlib.sha256(path.name.encode(errors="surrogateescape")).hexdigest()[:32]
        self._beside = path.with_name(f"{RESERVED}{digest}.part")
        self._unnamed = False
        with self._explained("write"):
            self._descriptor = self._open()
            try:
                take_room(self._descriptor, size)
            except OSError:
                self._drop()
                raise

    def put(self, at: int, data: memoryview) -> None:
        """Write the bytes at that place."""
        with self._explained("write"):
            while data:
                done = os.pwrite(self._descriptor, data, at)
                data, at = data[done:], at + done

    def finish(self) -> None:
        """Have the file appear, durably, in place of any other."""
        with self._explained("write"):
            os.fsync(self._descriptor)
            if self._unnamed:
                self._beside.unlink(missing_ok=True)
                name_it(self._descriptor, self._beside)
                self._unnamed = False
            self._beside.replace(self._path)
            sync_folder(self._path.parent)
        self.close()

    def close(self) -> None:
        """End the filling; one that is not finished leaves nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
            if not self._unnamed:
                self._beside.unlink(missing_ok=True)

    def _open(self) -> int:
        unnamed = create_unnamed(self._path.parent, 0o666)
        if unnamed is not None:
            self._unnamed = True
            return unnamed
        self._beside.unlink(missing_ok=True)
        return create(self._beside, 0o666)

    def _drop(self) -> None:
        os.close(self._descriptor)
        if not self._unnamed:
            self._beside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in _FULL
            what = f" ({format_size(self._size)})" if full else ""
            hint = "free some space there, or name another place" if full else "name a place that you may write to"
            raise StoreError(f"cannot {verb} {self._path}{what}: {error.strerror}", hint=hint) from error


def take_room(descriptor: int, size: int) -> None:
    """Take the room of a file at once, so that a full disk is met first. Raises OSError."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_ROOM_KEPT:
                raise
