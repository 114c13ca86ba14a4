"""A checkpoint's objects: the safetensors layout, and the sums that prove parts, objects and tensors.

Eight bytes with the header's length (little endian), the header as JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LENGTH_BYTES = 8
"""Before the header: its length."""

LARGEST_HEADER = 100_000_000
"""In bytes; safetensors' own readers refuse larger ones."""

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


class UnknownType(ValueError):
    """A tensor of a type that this version does not know: no damage."""


_TYPE = re.compile("[A-Z][A-Z0-9_]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of an object; its bytes are counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an object says of itself; `start` is where its tensors begin."""

    start: int
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]


def start_of(data: bytes | memoryview, size: int, largest: int = LARGEST_HEADER) -> int:
    """Return where the tensors begin in an object of that size with these first eight bytes.

    ValueError without a header, or when it has more bytes than `largest`.
    """
    if len(data) < LENGTH_BYTES:
        raise ValueError("shorter than a header")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(largest, size - LENGTH_BYTES):
        raise ValueError("the header is longer than headers are, or than the object")
    return LENGTH_BYTES + int(length)


def read_header(data: bytes | memoryview, size: int | None = None) -> Header:
    """Return the header of an object that begins so; ValueError when the layout is broken, UnknownType for a type.

    `size` is the object's, left out where that is all of it.
    """
    size = len(data) if size is None else size
    start = start_of(data, size, largest=size)
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:start]))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        tensors = tuple(_tensor(name, entry, size - start) for name, entry in header.items())
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not in the safetensors layout: {error!r}") from error
    return Header(start=start, tensors=tensors, metadata=metadata)


def placed(wanted: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """Return tensors (name, dtype, shape) one after the other without holes.

    The widest come first, so that all are aligned; else they keep their order.
    """
    tensors, end = [], 0
    for name, dtype, shape in sorted(wanted, key=lambda one: -ITEM_BYTES[one[1]]):
        begin, end = end, end + size_of(dtype, shape)
        tensors.append(Tensor(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
    return tuple(tensors)


def entries_of(tensors: Iterable[Tensor]) -> str:
    """Return what a header's JSON says of the tensors, without the braces around: many headers can share it."""
    entries = {t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": (t.begin, t.end)} for t in tensors}
    return json.dumps(entries, separators=(",", ":"))[1:-1]


def header_bytes(entries: str, metadata: Mapping[str, str], room: int = 0) -> bytes:
    """Return the header with its length before it, in at least `room` bytes and a multiple of eight."""
    text = f'{{"__metadata__":{json.dumps(dict(metadata))}{"," if entries else ""}{entries}}}'.encode()
    length = max(len(text) + (-len(text) % 8), room - LENGTH_BYTES)
    return struct.pack("<Q", length) + text.ljust(length)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of such a tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def _tensor(name: str, entry: Any, room: int) -> Tensor:
    dtype, (begin, end), shape = entry["dtype"], entry["data_offsets"], tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError(f"a size or place of {name} is no number")
    if dtype not in ITEM_BYTES:
        unknown = UnknownType if isinstance(dtype, str) and _TYPE.fullmatch(dtype) else ValueError
        raise unknown(f"{name} is of the unknown type {dtype!r}")
    if end - begin != size_of(dtype, shape) or end > room:
        raise ValueError(f"the size of {name} does not fit its shape, or the object")
    return Tensor(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


# What proves bytes: an object in parts with their CRC32, and fingerprints of tensors.


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


def bytes_in(part: Sequence[memoryview]) -> int:
    """Return how many bytes the views have together."""
    return sum(view.nbytes for view in part)


def sums_of(pieces: Sequence[memoryview]) -> Sums:
    """Return the sums of the pieces' bytes, one after the other as one object."""
    return Sums(size=bytes_in(pieces), crc32=tuple(crc32_of(part) for part in cut(pieces)))


def count_of(size: int) -> int:
    """Return how many parts an object of that size has."""
    return -(-size // PART_BYTES)


def covering(at: int, length: int) -> range:
    """Return the numbers, from 0, of the parts that hold `length` bytes from `at` on."""
    return range(at // PART_BYTES, count_of(at + length) if length else at // PART_BYTES)


# A tensor's fingerprint: three sums that show whether it is as saved, wherever it lies and whoever holds its parts.
#
# A tensor's numbers are read as words, which are whole numbers of two bytes with a sign; of one byte where the numbers
# are. A fingerprint is their sum, and the same sum with each word times the place of its number (from 1) in the first
# dimension, and in the last; all of 32 bits, in which also a changed sign bit is far from the edge. Of a tensor in
# parts, those of the parts add up to that of the whole.
#
# An object carries them in its header's metadata, under `prints`, in the order of its tensors. What writes the object
# fills them in, so they come first there, where their place is known.
#
# What is copied from a GPU has been summed there too, by stretches of one tensor or several neighbours, as words as
# wide as a stretch allows. Behind the object in memory there are, for each, where it begins and ends there and a word's
# bytes, then all their sums; each number of 64 bits.


_MARK = b'{"__metadata__":{"prints": "'
_DIGITS = 8
_WORD = 2 ** (4 * _DIGITS)
_KEY = "prints"
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sum of a tensor's words, as they are, by their place in its first dimension, and in its last."""

    total: int
    by_first: int
    by_last: int

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return that of the tensor of which these are two parts."""
        return fingerprint(self.total + other.total, self.by_first + other.by_first, self.by_last + other.by_last)

    def __str__(self) -> str:
        """Return its digits."""
        return "".join(f"{number:0{_DIGITS}x}" for number in (self.total, self.by_first, self.by_last))


SUM_BYTES = 32
"""What stands behind an object for each stretch that a GPU has summed."""

NOTHING = Fingerprint(0, 0, 0)
"""That of a tensor without numbers."""


def fingerprint(total: int, by_first: int, by_last: int) -> Fingerprint:
    """Return the fingerprint with these sums, of any size."""
    return Fingerprint(total % _WORD, by_first % _WORD, by_last % _WORD)


def parsed(text: str) -> Fingerprint:
    """Return what `str` was of. ValueError for any other text."""
    if len(text) != 3 * _DIGITS:
        raise ValueError(f"{text[:40]!r} is no fingerprint")
    return Fingerprint(*(int(text[at : at + _DIGITS], 16) for at in range(0, len(text), _DIGITS)))


def blank(count: int) -> Mapping[str, str]:
    """Return what comes first in the metadata of an object with so many tensors."""
    return {_KEY: _NONE * (3 * _DIGITS * count)}


def place(header: bytes | memoryview, count: int) -> slice | None:
    """Return where the fingerprints of so many tensors are in an object; None where it has no room for them."""
    begin = LENGTH_BYTES + len(_MARK)
    end = begin + 3 * _DIGITS * count
    if bytes(header[LENGTH_BYTES:begin]) != _MARK or bytes(header[end : end + 1]) != b'"':
        return None
    return slice(begin, end)


def written(found: Iterable[Fingerprint]) -> bytes:
    """Return what goes there."""
    return "".join(map(str, found)).encode()


def sums_at(size: int) -> int:
    """Return where, behind an object of that size, the sums begin."""
    return -(-size // 8) * 8


def of_header(header: Header) -> tuple[Fingerprint, ...] | None:
    """Return those of the object's tensors, in their order; None where whoever wrote it filled none in. ValueError."""
    text = header.metadata.get(_KEY, _NONE)
    if _NONE in text:
        return None
    if len(text) != 3 * _DIGITS * len(header.tensors):
        raise ValueError("there are not as many fingerprints as tensors")
    return tuple(parsed(text[at : at + 3 * _DIGITS]) for at in range(0, len(text), 3 * _DIGITS))
