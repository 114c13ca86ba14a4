"""Tensors as bytes in the safetensors layout, which every tool can open.

Eight bytes with the header's length (little endian), the header as JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format). A tensor that is a part of a larger one says so in the metadata:
`{"shards": {name: {"of": name, "shape": […], "offset": […]}}}`, as text.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor's bytes lie in an object, counted from the end of its header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an object says of itself; `start` is where its tensors begin."""

    start: int
    places: tuple[Place, ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A tensor of an object as a part of a tensor `of` that shape, from `offset` on in each dimension."""

    of: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    place: Place


def placed(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[Place, ...]:
    """Return places without holes for tensors in that order."""
    places, end = [], 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        places.append(Place(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
    return tuple(places)


def entries_of(places: Iterable[Place]) -> str:
    """Return the places as a header's JSON has them, without the braces around: the same for every save."""
    entries = {p.name: {"dtype": NAMES[p.dtype], "shape": p.shape, "data_offsets": (p.begin, p.end)} for p in places}
    return json.dumps(entries, separators=(",", ":"))[1:-1]


def header_bytes(entries: str, metadata: dict[str, str], room: int = 0) -> bytes:
    """Return the header with its length before it, in at least `room` bytes and a multiple of eight."""
    text = f'{{"__metadata__":{json.dumps(metadata)}{"," if entries else ""}{entries}}}'.encode()
    length = max(len(text) + (-len(text) % 8), room - 8)
    return struct.pack("<Q", length) + text.ljust(length)


def read_header(data: memoryview, size: int | None = None) -> Header:
    """Return the header of an object that begins so, and has that size; ValueError when the layout is broken."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        room = (len(data) if size is None else size) - 8 - length
        places = tuple(_place(name, entry, room) for name, entry in header.items())
        return Header(start=8 + length, places=places, metadata=dict(metadata))
    except (struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not in the safetensors layout: {error!r}") from error


def chunks_of(header: Header) -> tuple[Chunk, ...]:
    """Return what the object's tensors are parts of; most are whole. ValueError when that makes no sense."""
    shards = json.loads(header.metadata.get("shards", "{}"))
    return tuple(_chunk(place, shards.get(place.name)) for place in header.places)


def tensor_at(memory: torch.Tensor, start: int, place: Place) -> torch.Tensor:
    """Return the tensor that lies there in memory (uint8), sharing it; in memory of its own where that is crooked."""
    flat = memory[start + place.begin : start + place.end]
    if flat.data_ptr() % place.dtype.itemsize or flat.storage_offset() % place.dtype.itemsize:
        flat = flat.clone()
    return flat.view(place.dtype).reshape(place.shape)


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes."""
    return tensor.numel() * tensor.element_size()


def _place(name: str, entry: dict[str, Any], room: int) -> Place:
    dtype, (begin, end), shape = DTYPES[entry["dtype"]], entry["data_offsets"], tuple(entry["shape"])
    numbers = (begin, end, *shape)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a size or place is no number")
    if end - begin != math.prod(shape) * dtype.itemsize or end > room:
        raise ValueError("a tensor's size does not fit its shape, or the object")
    return Place(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def _chunk(place: Place, shard: dict[str, Any] | None) -> Chunk:
    if shard is None:
        return Chunk(of=place.name, shape=place.shape, offset=(0,) * len(place.shape), place=place)
    chunk = Chunk(of=shard["of"], shape=tuple(shard["shape"]), offset=tuple(shard["offset"]), place=place)
    if not len(chunk.shape) == len(chunk.offset) == len(place.shape):
        raise ValueError("a part of a tensor has other dimensions than it")
    if any(o < 0 or o + n > s for o, n, s in zip(chunk.offset, place.shape, chunk.shape, strict=True)):
        raise ValueError("a part of a tensor lies beyond it")
    return chunk
