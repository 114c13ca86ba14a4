"""Tensors in chunks: which parts of which objects make a whole tensor, and where each stretch of bytes goes.

An object's metadata says which of its tensors are parts of larger ones:
`{"shards": {name: {"of": name, "shape": […], "offset": […]}}}`, as text. Every other tensor is one whole chunk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpucloud.domain.safetensors import ITEM_BYTES, Header, Tensor, size_of

OWN = "rank."
"""How the names of a rank's own tensors begin; another rank's have the same names, in another object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor `of` that type and shape: it begins at `offset`, is `extent` large.

    Its bytes are those from `begin` to `end` of the object of that number.
    """

    of: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    number: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that lie together in an object (`source`) and in the whole tensor (`target`, from its beginning)."""

    source: int
    target: int
    length: int


def chunks_of(number: int, header: Header) -> tuple[Chunk, ...]:
    """Return an object's tensors as chunks; ValueError when what it says of them makes no sense."""
    try:
        shards = json.loads(header.metadata.get("shards", "{}"))
        return tuple(_chunk(number, header.start, tensor, shards.get(tensor.name)) for tensor in header.tensors)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the parts of tensors are not told as they should be: {error!r}") from error


def covering(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Return chunks of one tensor that hold each of its bytes exactly once; ValueError when they do not.

    A box that several objects hold (replicas) is taken from the first.
    """
    first = chunks[0]
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
    for chunk in chunks:
        if (chunk.dtype, chunk.shape) != (first.dtype, first.shape):
            raise ValueError(f"the parts of {first.of} are of different tensors")
        boxes.setdefault((chunk.offset, chunk.extent), chunk)
    whole = size_of(first.dtype, first.shape)
    filled = tuple(chunk for chunk in boxes.values() if chunk.end > chunk.begin)
    if sum(chunk.end - chunk.begin for chunk in filled) < whole:
        raise ValueError(f"a part of {first.of} is missing")
    if sum(chunk.end - chunk.begin for chunk in filled) > whole or _overlap(filled):
        raise ValueError(f"parts of {first.of} overlap")
    return filled


def stretches(chunk: Chunk, first: int, last: int) -> Iterator[Stretch]:
    """Yield where the chunk's bytes go that lie in the object from `first` up to `last`, in their order there."""
    first, last = max(first, chunk.begin), min(last, chunk.end)
    if first >= last:
        return
    inner = _inner(chunk)
    length = math.prod(chunk.extent[inner:]) * ITEM_BYTES[chunk.dtype]
    for row in range((first - chunk.begin) // length, -(-(last - chunk.begin) // length)):
        source = chunk.begin + row * length
        begin, end = max(source, first), min(source + length, last)
        yield Stretch(begin, _target(chunk, inner, row) + begin - source, end - begin)


def _chunk(number: int, start: int, tensor: Tensor, shard: dict[str, Any] | None) -> Chunk:
    of, shape, offset = tensor.name, tensor.shape, (0,) * len(tensor.shape)
    if shard is not None:
        of, shape, offset = str(shard["of"]), tuple(shard["shape"]), tuple(shard["offset"])
    if not len(shape) == len(offset) == len(tensor.shape):
        raise ValueError(f"a part of {of} has other dimensions than it")
    if any(type(n) is not int for n in (*shape, *offset)) or any(
        at < 0 or at + extent > whole for at, extent, whole in zip(offset, tensor.shape, shape, strict=True)
    ):
        raise ValueError(f"a part of {of} lies beyond it")
    return Chunk(
        of=of,
        dtype=tensor.dtype,
        shape=shape,
        offset=offset,
        extent=tensor.shape,
        number=number,
        begin=start + tensor.begin,
        end=start + tensor.end,
    )


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share a byte. Sorted by where they begin in the first dimension, few need be compared."""
    if chunks and not chunks[0].shape:
        return len(chunks) > 1
    order = sorted(chunks, key=lambda chunk: chunk.offset)
    for i, one in enumerate(order):
        for other in order[i + 1 :]:
            if other.offset[0] >= one.offset[0] + one.extent[0]:
                break
            if _share(one, other):
                return True
    return False


def _share(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )


def _inner(chunk: Chunk) -> int:
    """Return the first dimension from which on the chunk's bytes lie together in the whole tensor too."""
    inner = len(chunk.shape)
    while inner > 0 and chunk.extent[inner:] == chunk.shape[inner:]:
        inner -= 1
    return inner


def _target(chunk: Chunk, inner: int, row: int) -> int:
    """Return where, in the whole tensor, the stretch of that number begins."""
    index = list(chunk.offset)
    for dimension in range(inner - 1, -1, -1):
        row, within = divmod(row, chunk.extent[dimension])
        index[dimension] += within
    place = 0
    for at, size in zip(index, chunk.shape, strict=True):
        place = place * size + at
    return place * ITEM_BYTES[chunk.dtype]
