"""A checkpoint's objects in memory, verified; and what a rank takes from them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import OWN, Chunk, chunks_of
from gpucloud.domain.checkpoint.manifest import Manifest, Piece
from gpucloud.domain.checkpoint.objects import (
    NOTHING,
    Fingerprint,
    Header,
    UnknownType,
    of_header,
    read_header,
    size_of,
)
from gpucloud.domain.errors import CheckpointUnreadable
from gpucloud.domain.job.quantities import format_size
from gpucloud.resume.restore.comparing import Saved
from gpucloud.resume.state.state import Content
from gpucloud.resume.state.tree import DTYPES, Name, chunk_at, decode
from gpucloud.store.checkpoints import Checkpoints

Whole = Callable[[str, list[Chunk]], torch.Tensor]
"""Puts the tensor of a name together from chunks."""


@dataclass(frozen=True, slots=True)
class Held:
    """One object's bytes, and what its header says."""

    data: memoryview
    memory: torch.Tensor
    header: Header

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Return a tensor that shares the object's memory."""
        return chunk_at(self.memory, chunk)


def hold(checkpoints: Checkpoints, manifest: Manifest, wanted: Sequence[int]) -> dict[int, Held] | None:
    """Return the wanted objects, by their number in the manifest; None when one is missing or not as written.

    Raises StoreError, ValueError when bytes that are as written are no checkpoint, and CheckpointUnreadable when they
    are one that cannot be read here.
    """
    if any(piece.size == 0 for piece in manifest.pieces):
        return None
    # Fresh pages of the kernel's: nothing is set to zero by us, and torch and the store see the same bytes.
    room = {number: room_for(manifest.pieces[number]) for number in wanted}
    views = {number: memoryview(memory) for number, memory in room.items()}
    if not checkpoints.read([(manifest.pieces[number], views[number]) for number in wanted]):
        return None
    return {
        number: Held(views[number], torch.frombuffer(room[number], dtype=torch.uint8), header_of(views[number]))
        for number in wanted
    }


def room_for(piece: Piece) -> mmap.mmap:
    """Return memory for an object; CheckpointUnreadable where there is none."""
    try:
        return mmap.mmap(-1, piece.size)
    except (OSError, MemoryError) as error:
        raise CheckpointUnreadable(
            f"there is no memory for the {format_size(piece.size)} of {piece.key}: {error}",
            hint="a machine with more memory, or fewer ranks on it",
        ) from error


def header_of(data: memoryview, size: int | None = None) -> Header:
    """Return what `read_header` does; CheckpointUnreadable for types of tensors that only others know."""
    try:
        return read_header(data, size)
    except UnknownType as error:
        raise CheckpointUnreadable(
            f"the newest checkpoint cannot be read: {error}",
            hint="go on with the gpucloud that saved it, or a newer one",
        ) from error


def owner_of(piece: Piece) -> int:
    """Return the rank that wrote an object."""
    return int(piece.key.rpartition("/")[2].split("-")[1])


class Contents:
    """What a checkpoint says, once all headers are known; `whole` finds the tensor of a name that all ranks share."""

    def __init__(self, headers: Mapping[int, Header], owners: Sequence[int], whole: Whole) -> None:
        self._headers = headers
        self._whole = whole
        self._number_of = {owner: number for number, owner in enumerate(owners)}
        self._parts: dict[str, list[Chunk]] = {}
        for number in sorted(headers):
            for chunk in chunks_of(number, headers[number]):
                if not chunk.of.startswith(OWN):
                    self._parts.setdefault(chunk.of, []).append(chunk)
        self._trees = json.loads(headers[self._number_of[0]].metadata["shared"])

    def named(self, kind: str) -> dict[str, Any]:
        """Return the states of that kind with names in place of tensors."""
        states: dict[str, Any] = decode(self._trees[kind], _Lookup(Name))
        return states

    def shared(self, kind: str) -> dict[str, Any]:
        """Return the states of that kind; ValueError or KeyError when a part of one is missing."""
        states: dict[str, Any] = decode(self._trees[kind], _Lookup(self._tensor))
        return states

    def own(self, rank: int, held: Mapping[int, Held], place: Whole) -> tuple[dict[str, Any], int]:
        """Return the own part of the rank, or of rank 0 where that rank was not there, and whose it is.

        `place` takes a tensor from what is held. It is given the name that the tensor would have if ranks held it
        together: they may do that now.
        """
        owner = rank if rank in self._number_of else 0
        number = self._number_of[owner]
        chunks = {chunk.of: chunk for chunk in chunks_of(number, held[number].header) if chunk.of.startswith(OWN)}
        tree = json.loads(held[number].header.metadata["own"])

        def tensor(name: str) -> torch.Tensor:
            if name not in chunks:
                return self._tensor(name)
            return place(name.removeprefix(OWN), [chunks[name]])

        part = decode(tree, _Lookup(tensor))
        if not isinstance(part, dict):
            raise ValueError("a rank's own part is no table")  # noqa: TRY004  it is the file that is wrong
        return part, owner

    def saved(self, rank: int) -> Saved:
        """Return what the checkpoint says of what it holds for the rank. ValueError where that makes no sense."""
        number = self._number_of[rank if rank in self._number_of else 0]
        shared: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Fingerprint]] = {}
        own: dict[str, Fingerprint] = {}
        for other, header in self._headers.items():
            prints = of_header(header)
            for chunk, one in zip(chunks_of(other, header), prints or (), strict=bool(prints)):
                if not chunk.of.startswith(OWN):
                    shared.setdefault(chunk.of, {})[chunk.offset, chunk.extent] = one  # replicas are alike
                elif other == number:
                    own[chunk.of] = one
        tree = json.loads(self._headers[number].metadata["own"])
        told = all(of_header(header) is not None for header in self._headers.values())
        return Saved(
            shared=self._trees,
            own={key: tree[key] for key in ("buffers", "others")},
            shared_prints={n: sum(p.values(), NOTHING) for n, p in shared.items()} if told else None,
            own_prints=own if told else None,
        )

    def _tensor(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        first = parts[0]
        if any((chunk.shape, chunk.dtype) != (first.shape, first.dtype) for chunk in parts):
            raise ValueError(f"the parts of {name} are of different tensors")
        if sum(chunk.end - chunk.begin for chunk in parts) != size_of(first.dtype, first.shape):
            raise ValueError(f"a part of {name} is missing")
        tensor: torch.Tensor = self._whole(name, parts)
        return tensor


def whole_of(held: Mapping[int, Held]) -> Whole:
    """Return what puts a tensor together, in memory of its own, from objects that are all here."""

    def whole(_name: str, parts: list[Chunk]) -> torch.Tensor:
        if len(parts) == 1:
            return held[parts[0].number].tensor(parts[0]).clone()
        tensor = torch.empty(parts[0].shape, dtype=DTYPES[parts[0].dtype])
        for chunk in parts:
            tensor[inside(chunk)] = held[chunk.number].tensor(chunk)
        return tensor

    return whole


def inside(chunk: Chunk) -> tuple[slice, ...]:
    """Return where the chunk lies in its whole tensor, as an index of that."""
    return tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.extent, strict=True))


def shapes_only(_name: str, parts: list[Chunk]) -> torch.Tensor:
    """Return a tensor without data: to see whether a checkpoint makes sense."""
    return torch.empty(parts[0].shape, dtype=DTYPES[parts[0].dtype], device="meta")


def content(contents: Contents, rank: int, held: Mapping[int, Held], place: Whole | None = None) -> Content:
    """Return what the rank needs; `place` puts together what is the rank's own, whole if left out."""
    own, owner = contents.own(rank, held, place or whole_of(held))
    return Content(shared=contents.shared, own=own, own_rank=owner)


class _Lookup(dict[str, Any]):
    """Finds each tensor when it is asked for."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, name: str) -> Any:
        return self._find(name)
