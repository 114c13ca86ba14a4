"""Tensors in chunks and boxes: which bytes of which objects make a whole one, and one plain file out of them.

An object's metadata says which of its tensors are parts of larger ones:
`{"shards": {name: {"of": name, "shape": […], "offset": […]}}}`, as text. Every other tensor is one whole chunk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpucloud.domain.checkpoint.objects import ITEM_BYTES, Header, Tensor, entries_of, header_bytes, placed, size_of

OWN = "rank."
"""How the names of a rank's own tensors begin; another rank's have the same names, in another object."""

STAGES = "stages"
"""Under which name a rank keeps its stages of a pipeline, if it has some."""


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


# Boxes of a tensor: what two of them have in common, and where its elements lie.


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `offset` on, `extent` of them in each dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return where this box lies in one that holds it."""
        starts = [at - begin for at, begin in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + n) for start, n in zip(starts, self.extent, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return what both boxes hold; None when that is nothing."""
    begins = tuple(map(max, one.offset, other.offset))
    ends = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


def span(inner: Box, outer: Box) -> range:
    """Return the numbers, in row-major order of `outer`, from its first element of `inner` to its last one."""
    first = last = 0
    for places, size in zip(inner.within(outer), outer.extent, strict=True):
        first, last = first * size + places.start, last * size + places.stop - 1
    return range(first, last + 1)


# One plain safetensors file out of a checkpoint's objects: which tensors, under which names, from which bytes.


_MAIN = "model"
_OF_A_SCRIPT = re.compile(r"data/\d+/\d+/(?:files|node-\d{5})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The file that is to be written: how it begins, how large it is, and what goes where.

    Each move is a chunk and the place in the file where the tensor that it is a part of begins.
    """

    head: bytes
    size: int
    tensors: int
    moves: tuple[tuple[Chunk, int], ...]


def export(headers: Sequence[Header], ranks: Sequence[int], *, everything: bool, about: Mapping[str, str]) -> Exported:
    """Return the file of the model's weights, named as in its `state_dict()`, or with all tensors of the state.

    `ranks` wrote the objects with these `headers`; `about` goes into the file's metadata. Of several modules those
    beside `model` have their names before their weights'. With `everything`, optimizers and other objects follow, by
    rank 0 where each rank has its own, what is no tensor as JSON in the metadata. ValueError for what cannot be read.
    """
    trees = _Trees(headers, ranks)
    names = trees.weights()
    metadata = {"format": "pt", **about}
    if everything:
        names |= trees.beside(names)
        metadata["state"] = json.dumps(trees.rest({tensor: name for name, tensor in names.items()}))
    sources = {name: covering(trees.parts(tensor)) for name, tensor in names.items()}
    first = {name: trees.parts(tensor)[0] for name, tensor in names.items()}
    tensors = placed((name, chunk.dtype, chunk.shape) for name, chunk in first.items())
    head = header_bytes(entries_of(_in_order(tensors, names)), metadata)
    moves = tuple((chunk, len(head) + tensor.begin) for tensor in tensors for chunk in sources[tensor.name])
    size = len(head) + max((tensor.end for tensor in tensors), default=0)
    return Exported(head=head, size=size, tensors=len(tensors), moves=moves)


def rank_of(key: str) -> int:
    """Return the rank that wrote an object; ValueError for one of a script's own directory."""
    name = key.rpartition("/")[2]
    if _OF_A_SCRIPT.match(key) or not name.startswith("rank-"):
        raise ValueError("it holds files of the script's own checkpoint directory, not tensors by name")
    return int(name.split("-")[1])


class _Trees:
    """The state as its objects tell it: JSON in which tensors are named."""

    def __init__(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        self._parts: dict[str, list[Chunk]] = {}
        texts: dict[str, str] = {}
        for number, (header, rank) in enumerate(zip(headers, ranks, strict=True)):
            for chunk in chunks_of(number, header):
                if rank == 0 or not chunk.of.startswith(OWN):
                    self._parts.setdefault(chunk.of, []).append(chunk)
            if rank == 0:
                texts.update(header.metadata)
        try:
            self._shared, self._own = json.loads(texts["shared"]), json.loads(texts["own"])
            self._modules: dict[str, dict[str, Any]] = self._shared["modules"]
            self._buffers: dict[str, dict[str, Any]] = self._own["buffers"]
            staged = STAGES in self._own
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it does not say what its tensors are: {error!r}") from error
        if staged:
            raise ValueError("each rank has a stage of a pipeline, under names of its own")

    def parts(self, tensor: str) -> list[Chunk]:
        """Return the chunks of a tensor, by its name in the checkpoint."""
        try:
            return self._parts[tensor]
        except KeyError as error:
            raise ValueError(f"the tensor {tensor} is in none of its objects") from error

    def weights(self) -> dict[str, str]:
        """Return each weight's name in the file, with its name in the checkpoint."""
        plain = [module for module in self._modules if module == _MAIN or len(self._modules) == 1]
        named = [(module, name, tensor) for module in self._modules for name, tensor in self._state(module)]
        found = {name if module in plain else f"{module}.{name}": tensor for module, name, tensor in named}
        if len(found) < len(named):  # a weight of the model is called like another module's
            found = {f"{module}.{name}": tensor for module, name, tensor in named}
        return found

    def beside(self, taken: Mapping[str, str]) -> dict[str, str]:
        """Return the same of all other tensors but the generators' states."""
        known = set(taken.values())
        trees = (self._shared["optimizers"], self._own["buffers"], self._own.get("others", {}))
        tensors = [tensor for tree in trees for tensor in _tensors(tree) if tensor not in known]
        found = {tensor.removeprefix(OWN): tensor for tensor in tensors}
        clash = set(found) & set(taken)
        if clash:
            raise ValueError(f"two of its tensors would be called {min(clash)}")
        return found

    def rest(self, names: Mapping[str, str]) -> Any:
        """Return optimizers and others with what is no tensor; tensors are told by their names in the file."""
        return _renamed({"optimizers": self._shared["optimizers"], "others": self._own.get("others", {})}, names)

    def _state(self, module: str) -> Iterator[tuple[str, str]]:
        """Yield names and tensors of a module's `state_dict()`, in its order."""
        entries = {**self._modules[module], **self._buffers.get(module, {})}
        order = self._shared.get("names", {}).get(module, entries)
        for name in order:
            node = entries.get(name)
            if isinstance(node, dict) and node.get("$") == "tensor":
                yield name, str(node["name"])


def _tensors(tree: Any) -> Iterator[str]:
    """Yield the tensors that a tree names."""
    if isinstance(tree, list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        if tree.get("$") == "tensor":
            yield str(tree["name"])
        else:
            yield from _tensors(list(tree.values()))


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, list):
        return [_renamed(item, names) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == "tensor":
        return {**tree, "name": names[tree["name"]]}
    return {key: _renamed(item, names) for key, item in tree.items()}


def _in_order(tensors: Sequence[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name] for name in names]
