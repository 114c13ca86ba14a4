"""Files that are filled in pieces, and then appear whole: large ones by several threads, and parts of what lands."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.quantities import format_size
from gpucloud.store.contract import RESERVED, ObjectStore
from gpucloud.store.directory import create, create_unnamed, name_it, sync_folder
from gpucloud.store.parts import take_room
from gpucloud.system.wholefile import new_or_own

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE_BYTES = 16 << 20


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


class Part:
    """A file on its way, under a name of our own. Methods raise OSError."""

    def __init__(self, folder: int, name: str) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = new_or_own(name, flags, folder)

    def __enter__(self) -> Part:
        """Nothing to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; it stays."""
        self.close()

    def close(self) -> None:
        """Close it; it stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def length(self) -> int:
        """Return how much of it is there."""
        return os.fstat(self.descriptor).st_size

    def write(self, at: int, data: memoryview | bytes) -> None:
        """Write the bytes at that place."""
        left = memoryview(data)
        while left:
            done = os.pwrite(self.descriptor, left, at)
            left, at = left[done:], at + done

    def fill(self, store: ObjectStore, key: str, size: int, *, start: int = 0) -> bool:
        """Write an object of that size from `start` on, piece by piece; False when it ends before. StoreError."""
        room = memoryview(bytearray(min(_PIECE_BYTES, size)))
        for at in range(start, size, _PIECE_BYTES):
            piece = room[: min(_PIECE_BYTES, size - at)]
            if not store.read_into(key, at, piece):
                return False
            self.write(at, piece)
        return True

    def read_into(self, at: int, into: memoryview) -> bool:
        """Fill `into` with what is there from `at` on; False when it ends before."""
        while into:
            done = os.preadv(self.descriptor, [into], at)
            if done == 0:
                return False
            into, at = into[done:], at + done
        return True

    def cut(self, size: int) -> None:
        """Leave so much of it, or make it as long."""
        os.ftruncate(self.descriptor, size)
