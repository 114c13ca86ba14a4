"""One checkpoint as one plain safetensors file: a few parts of objects in memory at a time, however large it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from gpucloud.domain.chunks import Chunk, stretches
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.exporting import Exported, export, rank_of
from gpucloud.domain.manifest import Manifest
from gpucloud.store.filling import Filling
from gpucloud.store.together import all_done
from gpucloud.usecases.checkpoints import Moved, Part, Shelf, parts_of, unheard

Moves = dict[str, list[tuple[Chunk, int]]]
"""By an object's key, in the order of its bytes: the chunks that are wanted, each with the place of its tensor."""


def planned(shelf: Shelf, manifest: Manifest, *, everything: bool, about: Mapping[str, str]) -> Exported:
    """Return the file that will be written; UsageError when it is no state that can be exported, or damaged."""
    try:
        ranks = [rank_of(piece.key) for piece in manifest.pieces]
        headers = all_done(shelf.header, manifest.pieces)
        return export(headers, ranks, everything=everything, about=about)
    except ValueError as error:
        raise UsageError(
            f"the checkpoint of step {manifest.commit.step} cannot be exported: {error}",
            hint="--pull DIR brings it as it is; --verify says what is damaged",
        ) from error


def write(shelf: Shelf, manifest: Manifest, exported: Exported, path: Path, moved: Moved = unheard) -> int:
    """Write the file whole, or nothing, and return how many bytes were read for it.

    StoreError when the disk is full or the checkpoint damaged.
    """
    moves = _moves(manifest, exported)
    parts = [part for part in parts_of(manifest.pieces) if _needed(part, moves)]
    with closing(Filling(path, exported.size)) as file:
        file.put(0, memoryview(exported.head))

        def scatter(part: Part, data: memoryview) -> None:
            for chunk, place in _within(part, moves):
                for one in stretches(chunk, part.at, part.at + part.length):
                    at = one.source - part.at
                    file.put(place + one.target, data[at : at + one.length])

        damages = shelf.read(parts, scatter, moved)
        if damages:
            raise StoreError(f"the checkpoint is damaged: {damages[0]}", hint="--step with an older one")
        file.finish()
    return sum(part.length for part in parts)


def bytes_to_read(manifest: Manifest, exported: Exported) -> int:
    """Return how many bytes `write` will read."""
    moves = _moves(manifest, exported)
    return sum(part.length for part in parts_of(manifest.pieces) if _needed(part, moves))


def _moves(manifest: Manifest, exported: Exported) -> Moves:
    moves: Moves = {piece.key: [] for piece in manifest.pieces}
    for chunk, place in sorted(exported.moves, key=lambda move: move[0].begin):
        moves[manifest.pieces[chunk.number].key].append((chunk, place))
    return moves


def _needed(part: Part, moves: Moves) -> bool:
    return bool(_within(part, moves))


def _within(part: Part, moves: Moves) -> list[tuple[Chunk, int]]:
    """Return the moves that take bytes of the part. Those of an object do not overlap: their ends are sorted too."""
    wanted = moves[part.piece.key]
    first = bisect_right([chunk.end for chunk, _ in wanted], part.at)
    last = part.at + part.length
    return [move for move in wanted[first:] if move[0].begin < last]
