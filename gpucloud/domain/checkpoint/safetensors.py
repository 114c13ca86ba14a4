"""The safetensors layout: headers read, made, and tensors placed. Its types are names here; torch knows its own.

Eight bytes with the header's length (little endian), the header as JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
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
