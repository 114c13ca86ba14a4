"""Paths of a script's files as names of objects, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

from gpucloud.domain.keeping.listing import OURS
from gpucloud.domain.manifest import Level, Manifest, Piece, Promise, data_key

PROMISE = Promise(Level.BEST_EFFORT, "what a resume continues is up to the script, which saves by itself")
"""What a checkpoint of such a script promises: what the script saves, as it resumes from it."""

_PLAIN = "/ !$&'()+,;=@[]{}~"  # any other byte but letters, digits and _.- is written %2F
_NAME = re.compile(r"(?:files|node-(\d{5}))/(.+)", re.DOTALL)


def object_name(path: str, node: int | None = None) -> str:
    """Return the object's name for a file's path below the directory, whatever bytes are in it.

    `node` is whose file it is, where each node's are kept.
    """
    folder = "files" if node is None else f"node-{node:05d}"
    return f"{folder}/{quote(os.fsencode(path), safe=_PLAIN)}"


def paths_of(manifest: Manifest) -> tuple[str, ...] | None:
    """Return the path of each piece, in their order; None when they are not the files of a directory.

    Nor is one that would lie elsewhere than below it, whoever wrote it. Pieces of several nodes may have one path.
    """
    placed = _placed(manifest)
    return None if placed is None else tuple(path for _, path, _ in placed)


def files_for(manifest: Manifest, node: int = 0) -> tuple[tuple[str, Piece], ...] | None:
    """Return the files that a node gets, each with its path: its own, and of the others' what it has not itself.

    A replicated tensor is in one node's part only, and every node reads it. None as `paths_of` says it.
    """
    placed = _placed(manifest)
    if placed is None:
        return None
    found: dict[str, Piece] = {}
    for _, path, piece in sorted(placed, key=lambda one: (one[0] != node, one[0])):
        found.setdefault(path, piece)
    return tuple(sorted(found.items())) if _fit(found) else None


def files_apart(manifest: Manifest) -> tuple[tuple[str, Piece], ...] | None:
    """Return all files of all nodes, each with its path in one folder; None as `paths_of` says it.

    Below `node-<number>/` where two nodes have a file of one path that is not the same.
    """
    placed = _placed(manifest)
    if placed is None:
        return None
    merged = files_for(manifest) or ()
    contents = {path: piece.sums for path, piece in merged}
    if merged and all(contents[path] == piece.sums for _, path, piece in placed):
        return merged
    return tuple((f"node-{node}/{path}", piece) for node, path, piece in placed)


def written_before(now_ns: int, pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return when each file was written; all moved by as much, where one says later than now.

    A script that looks for its newest file would else find one of a clock that was ahead, and never its next.
    """
    times = [now_ns if piece.mtime_ns is None else piece.mtime_ns for piece in pieces]
    ahead_ns = max(0, max(times, default=0) - now_ns)
    return tuple(max(0, time - ahead_ns) for time in times)


def _placed(manifest: Manifest) -> list[tuple[int, str, Piece]] | None:
    """Return the node, the path and the piece of each file."""
    start, found = data_key(manifest.commit, ""), []
    for piece in manifest.pieces:
        match = _NAME.fullmatch(piece.key[len(start) :]) if piece.key.startswith(start) else None
        if match is None:
            return None
        path = os.fsdecode(unquote_to_bytes(match[2]))
        if not _is_below(path):
            return None
        found.append((int(match[1] or 0), path, piece))
    return found if found and len({(node, path) for node, path, _ in found}) == len(found) else None


def _fit(paths: Iterable[str]) -> bool:
    """Whether no file is where another one needs a folder."""
    names = set(paths)
    return not any("/".join(path.split("/")[:n]) in names for path in names for n in range(1, path.count("/") + 1))


def _is_below(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and not any(part in ("", ".", "..") or part.startswith(OURS) for part in parts)
