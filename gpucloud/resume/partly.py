"""Reads of a checkpoint what one rank needs: headers together with the others, then the parts that hold its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch

from gpucloud.domain.boxes import Box, overlap, span
from gpucloud.domain.chunks import OWN, Chunk, chunks_of
from gpucloud.domain.manifest import Manifest
from gpucloud.domain.parts import PART_BYTES, covering
from gpucloud.domain.safetensors import ITEM_BYTES, LENGTH_BYTES, Header, start_of
from gpucloud.resume.layout import DTYPES
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.reading import Held, Whole, header_of, room_for, whole_of
from gpucloud.resume.sharded import Layout
from gpucloud.store.checkpoints import Checkpoints


class Rooms:
    """Memory for a checkpoint's objects in which only those parts are filled (and take room) that are read."""

    def __init__(self, checkpoints: Checkpoints, manifest: Manifest) -> None:
        self._checkpoints = checkpoints
        self._pieces = manifest.pieces
        self._memory = [room_for(piece) for piece in manifest.pieces]
        self._views = [memoryview(memory) for memory in self._memory]
        self._read: set[tuple[int, int]] = set()

    def read(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Read parts, each as (object, part); those that are here already are not read again. False for damage."""
        missing = sorted(set(wanted) - self._read)
        views = [self._views[number][part * PART_BYTES : (part + 1) * PART_BYTES] for number, part in missing]
        triples = zip(missing, views, strict=True)
        if not self._checkpoints.read_parts((self._pieces[n], part, view) for (n, part), view in triples):
            return False
        self._read.update(missing)
        return True

    def read_heads(self, numbers: Iterable[int]) -> dict[int, str] | None:
        """Return how these objects begin, up to their tensors; None for damage."""
        heads = {}
        for number in numbers:
            if not self.read([(number, 0)]):
                return None
            view = self._views[number]
            start = start_of(view[:LENGTH_BYTES], len(view))
            if not self.read((number, part) for part in covering(0, start)):
                return None
            heads[number] = bytes(view[:start]).decode("latin-1")
        return heads

    def held(self, headers: Mapping[int, Header]) -> dict[int, Held]:
        """Return the objects as `reading` takes them."""
        return {
            number: Held(view, torch.frombuffer(memory, dtype=torch.uint8), headers[number])
            for number, (view, memory) in enumerate(zip(self._views, self._memory, strict=True))
        }


def all_headers(rooms: Rooms, manifest: Manifest, ranks: Ranks) -> dict[int, Header] | None:
    """Return every object's header; each rank reads its share of them and tells the others. None for damage."""
    heads = None
    try:
        heads = rooms.read_heads(range(ranks.rank, len(manifest.pieces), ranks.world))
    except ValueError:
        heads = None
    told = [json.loads(text) for text in ranks.gathered(json.dumps(heads).encode())]
    if None in told:
        return None
    sizes = [piece.size for piece in manifest.pieces]
    return {
        int(number): header_of(memoryview(text.encode("latin-1")), sizes[int(number)])
        for one in told
        for number, text in one.items()
    }


def parts_needed(headers: Mapping[int, Header], layouts: Mapping[str, Layout], own: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of objects, as (object, part), that hold what a rank needs: its share of what it holds together
    with others, all else that is shared whole, and the object `own` as far as that is a rank's own.
    """
    for number, header in headers.items():
        for chunk in chunks_of(number, header):
            if chunk.of.startswith(OWN) and number != own:
                continue
            yield from ((number, part) for part in _parts(chunk, _box_in(chunk, layouts)))


def placed_by(layouts: Mapping[str, Layout], held: Mapping[int, Held]) -> Whole:
    """Return what puts a tensor together as this rank holds it, from the parts that are here."""
    whole = whole_of(held)

    def placed(name: str, parts: list[Chunk]) -> torch.Tensor:
        first = parts[0]
        layout = layouts.get(name)
        if layout is None or not layout.fits(first.shape):
            return whole(name, parts)
        mine = layout.empty(DTYPES[first.dtype])
        for chunk in parts:
            box = Box(chunk.offset, chunk.extent)
            both = overlap(box, layout.box)
            if both is not None:
                mine[both.within(layout.box)] = held[chunk.number].tensor(chunk)[both.within(box)]
        return layout.held(mine)

    return placed


def _box_in(chunk: Chunk, layouts: Mapping[str, Layout]) -> Box | None:
    """Return what a rank needs of a chunk; None when that is nothing."""
    box = Box(chunk.offset, chunk.extent)
    layout = layouts.get(chunk.of)
    return overlap(box, layout.box) if layout is not None and layout.fits(chunk.shape) else box


def _parts(chunk: Chunk, wanted: Box | None) -> range:
    """Return the numbers of the parts from the first byte that is wanted to the last.

    Of rows that are wanted by halves, all comes: they are shorter than a part, nearly always.
    """
    if wanted is None or chunk.begin == chunk.end:
        return range(0)
    found = span(wanted, Box(chunk.offset, chunk.extent))
    item = ITEM_BYTES[chunk.dtype]
    return covering(chunk.begin + found.start * item, len(found) * item)
