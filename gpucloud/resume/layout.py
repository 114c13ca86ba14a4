"""Tensors of torch in the safetensors layout, whose rules are `gpucloud.domain.safetensors` and `…chunks`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gpucloud.domain import chunks, safetensors
from gpucloud.domain.safetensors import header_bytes

__all__ = [
    "DTYPES",
    "NAMES",
    "Chunk",
    "Header",
    "Place",
    "chunks_of",
    "entries_of",
    "header_bytes",
    "placed",
    "read_header",
    "size_of",
    "tensor_at",
]

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
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tensor at `place` as a part of the one `of` that name and shape: it begins at `offset` in each dimension."""

    of: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    place: Place


def placed(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[Place, ...]:
    """Return places without holes for tensors, the widest types first, else in that order."""
    return tuple(map(_place, safetensors.placed((name, NAMES[dtype], shape) for name, dtype, shape in tensors)))


def entries_of(places: Iterable[Place]) -> str:
    """Return the places as a header's JSON has them, without the braces around: the same for every save."""
    return safetensors.entries_of(map(_tensor, places))


def read_header(data: memoryview, size: int | None = None) -> Header:
    """Return the header of an object that begins so, and has that size; ValueError when the layout is broken."""
    found = safetensors.read_header(data, len(data) if size is None else size)
    return Header(start=found.start, places=tuple(map(_place, found.tensors)), metadata=found.metadata)


def chunks_of(header: Header) -> tuple[Chunk, ...]:
    """Return what the object's tensors are parts of; most are whole. ValueError when that makes no sense."""
    plain = safetensors.Header(start=header.start, tensors=tuple(map(_tensor, header.places)), metadata=header.metadata)
    found = zip(header.places, chunks.chunks_of(0, plain), strict=True)
    return tuple(Chunk(of=c.of, shape=c.shape, offset=c.offset, place=place) for place, c in found)


def tensor_at(memory: torch.Tensor, start: int, place: Place) -> torch.Tensor:
    """Return the tensor that lies there in memory (uint8), sharing it; in memory of its own where that is crooked."""
    flat = memory[start + place.begin : start + place.end]
    if flat.data_ptr() % place.dtype.itemsize or flat.storage_offset() % place.dtype.itemsize:
        flat = flat.clone()
    return flat.view(place.dtype).reshape(place.shape)


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes."""
    return tensor.numel() * tensor.element_size()


def _place(tensor: safetensors.Tensor) -> Place:
    dtype = DTYPES[tensor.dtype]
    return Place(name=tensor.name, dtype=dtype, shape=tensor.shape, begin=tensor.begin, end=tensor.end)


def _tensor(place: Place) -> safetensors.Tensor:
    dtype = NAMES[place.dtype]
    return safetensors.Tensor(name=place.name, dtype=dtype, shape=place.shape, begin=place.begin, end=place.end)
