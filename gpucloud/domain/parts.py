"""An object in parts of one size, each with its CRC32: what was written, and which parts a reader of a range needs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PART_BYTES = 32 * 2**20
"""Of every part but the last. S3 takes 10,000 parts, so that an object may have 312 GiB."""

Part = tuple[memoryview, ...]
"""The bytes of one part, where they lie: one after the other, none of them empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What an object's bytes are: `size`, and the CRC32 (zlib) of each PART_BYTES of it in order."""

    size: int
    crc32: tuple[int, ...]


def cut(pieces: Sequence[memoryview]) -> Iterator[Part]:
    """Yield the pieces' bytes, one after the other, as parts; nothing is copied. Without a byte there is no part."""
    part: list[memoryview] = []
    room = PART_BYTES
    for piece in pieces:
        rest = piece.cast("B") if piece.nbytes else memoryview(b"")
        while rest:
            part.append(rest[:room])
            rest = rest[room:]
            room -= len(part[-1])
            if room == 0:
                yield tuple(part)
                part, room = [], PART_BYTES
    if part:
        yield tuple(part)


def crc32_of(part: Sequence[memoryview], crc32: Callable[[memoryview, int], int] = zlib.crc32) -> int:
    """Return the CRC32 of the views' bytes, one after the other; `crc32` continues one as zlib's does."""
    value = 0
    for view in part:
        value = crc32(view, value)
    return value


def size_of(part: Sequence[memoryview]) -> int:
    """Return how many bytes the views have together."""
    return sum(view.nbytes for view in part)


def sums_of(pieces: Sequence[memoryview]) -> Sums:
    """Return the sums of the pieces' bytes, one after the other as one object."""
    return Sums(size=size_of(pieces), crc32=tuple(crc32_of(part) for part in cut(pieces)))


def count_of(size: int) -> int:
    """Return how many parts an object of that size has."""
    return -(-size // PART_BYTES)


def covering(at: int, length: int) -> range:
    """Return the numbers, from 0, of the parts that hold `length` bytes from `at` on."""
    return range(at // PART_BYTES, count_of(at + length) if length else at // PART_BYTES)
