"""Where each tensor of a rank's share lies in its arena: decided once, used while names, shapes and types stay."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucloud.domain.fingerprints import SUM_BYTES, blank, sums_at
from gpucloud.domain.safetensors import entries_of, header_bytes, placed
from gpucloud.resume.arena import Arena
from gpucloud.resume.layout import NAMES, size_of, tensor_at
from gpucloud.resume.tree import Tensors

SMALL_BYTES = 256 * 2**10
"""Tensors up to this size lie beside each other, so that a GPU can gather them and send them at once."""

_LEAST_HEADER = 16 * 2**10

Pair = tuple[torch.Tensor, torch.Tensor]
"""A place in the arena, and the tensor that is copied there."""


class Plan:
    """One object: a header with room to grow, then the tensors, each at a place that its type allows.

    Behind it there is room for the sums of what a GPU has (`sums`), which is not part of the object.
    """

    def __init__(self, tensors: Tensors, arena: Arena, *, header: int) -> None:
        self._arena = arena
        self._signature = _signature(tensors)
        # The widest types first: so every tensor is aligned although there are no holes between them.
        order = sorted(tensors, key=lambda name: _rank_of(tensors[name], name))
        self._places = placed((name, NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order)
        self._number = {place.name: number for number, place in enumerate(self._places)}
        self._entries = entries_of(self._places)
        self._tensors_size = self._places[-1].end if self._places else 0
        self._blank = blank(len(self._places))
        self._room = 0
        self.grow(len(self._entries) + sum(map(len, self._blank.values())) + header)

    @property
    def size(self) -> int:
        """The whole object's, in bytes."""
        return self._room + self._tensors_size

    def fits(self, tensors: Tensors) -> bool:
        """Whether these tensors can go to the same places."""
        return _signature(tensors) == self._signature

    def holds(self, tensors: Tensors) -> bool:
        """Whether these, of all that there is, can go to the same places."""
        places = ((self._into.get(name), tensor) for name, tensor in tensors.items())
        return all(p is not None and (p.dtype, p.shape) == (t.dtype, t.shape) for p, t in places)

    def grow(self, header: int) -> None:
        """Have room for a header of that size and half as much again. Raises NoMemory, then all is as before."""
        room = -(-max(_LEAST_HEADER, 3 * header // 2) // 4096) * 4096
        begin = sums_at(room + self._tensors_size)
        end = begin + SUM_BYTES * len(self._places)
        self._arena.hold(end)
        self._room = room
        memory = self._arena.tensor(0, self.size)
        self.begin = memory.data_ptr()
        self.sums = self._arena.tensor(begin, end).view(torch.int64)
        self._into = {place.name: tensor_at(memory, self._room, place) for place in self._places}

    def head(self, metadata: dict[str, str]) -> None:
        """Write the object's header."""
        data = self._header(metadata)
        if len(data) > self._room:
            self.grow(len(data))
            data = self._header(metadata)
        self._arena.settle()
        self._arena.write(0, data)

    def head_in_place(self, metadata: dict[str, str]) -> bool:
        """Write the object's header while tensors are copied behind it; False when there is no room for it."""
        data = self._header(metadata)
        if len(data) > self._room:
            self.grow(len(data))
            return False
        self._arena.write(0, data)
        return True

    def pairs(self, tensors: Tensors) -> Iterator[Pair]:
        """Yield what is to be copied whereto, in the order of places; after `head`, which may move them."""
        for name in sorted(tensors, key=self._number.__getitem__):
            yield self._into[name], tensors[name]

    def _header(self, metadata: dict[str, str]) -> bytes:
        return header_bytes(self._entries, {**self._blank, **metadata}, self._room)


def _signature(tensors: Tensors) -> tuple[tuple[str, torch.dtype, torch.Size], ...]:
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _rank_of(tensor: torch.Tensor, name: str) -> tuple[int, str, bool, str]:
    return -tensor.dtype.itemsize, str(tensor.dtype), size_of(tensor) > SMALL_BYTES, name
