"""Large objects between memory and a file: several parts at once, each at its place, none of them copied."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from gpucloud.domain.parts import PART_BYTES, Part, Sums, cut, size_of
from gpucloud.store.crc import crc32_of
from gpucloud.store.together import all_done

# A file system that cannot set room aside says so in one of these ways.
_NO_ROOM_KEPT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def write_parts(descriptor: int, pieces: Sequence[memoryview]) -> Sums:
    """Fill the empty file with the pieces, one after the other, and return their sums. Raises OSError."""
    parts = tuple(cut(pieces))
    size = size_of(pieces)
    _keep_room(descriptor, size)

    def write(number: int) -> int:
        _write(descriptor, parts[number], number * PART_BYTES)
        return crc32_of(parts[number])

    return Sums(size=size, crc32=tuple(all_done(write, range(len(parts)))))


def read_parts(descriptor: int, at: int, into: memoryview) -> bool:
    """Fill `into` with the file's bytes from `at` on; False when it ends before that. Raises OSError."""
    parts = tuple(cut((into,)))

    def read(number: int) -> bool:
        return _read(descriptor, parts[number][0], at + number * PART_BYTES)

    return all(all_done(read, range(len(parts))))


def _keep_room(descriptor: int, size: int) -> None:
    """A full disk is met before the first byte, and the file lies in few stretches."""
    if size > PART_BYTES and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_ROOM_KEPT:
                raise


def _write(descriptor: int, part: Part, at: int) -> None:
    for view in part:
        rest = view
        while rest:
            done = os.pwrite(descriptor, rest, at)
            rest, at = rest[done:], at + done


def _read(descriptor: int, into: memoryview, at: int) -> bool:
    rest = into
    while rest:
        done = os.preadv(descriptor, [rest], at)
        if done == 0:
            return False
        rest, at = rest[done:], at + done
    return True
