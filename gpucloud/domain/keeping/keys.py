"""Paths of a script's files as names of objects, and back."""

from __future__ import annotations

import os
from urllib.parse import quote, unquote_to_bytes

from gpucloud.domain.keeping.listing import OURS
from gpucloud.domain.manifest import Manifest, data_key

LEVEL = "best_effort"
"""What a checkpoint of such a script promises: what the script saves, as it resumes from it."""

_FOLDER = "files/"
_PLAIN = "/ !$&'()+,;=@[]{}~"  # any other byte but letters, digits and _.- is written %2F


def object_name(path: str) -> str:
    """Return the object's name for a file's path below the directory, whatever bytes are in it."""
    return _FOLDER + quote(os.fsencode(path), safe=_PLAIN)


def paths_of(manifest: Manifest) -> tuple[str, ...] | None:
    """Return the path of each piece, in their order; None when they are not the files of a directory.

    Nor is one that would lie elsewhere than below it, whoever wrote it.
    """
    start = data_key(manifest.commit, _FOLDER)
    if not manifest.pieces or not all(piece.key.startswith(start) for piece in manifest.pieces):
        return None
    paths = tuple(os.fsdecode(unquote_to_bytes(piece.key[len(start) :])) for piece in manifest.pieces)
    return paths if len(set(paths)) == len(paths) and all(map(_is_below, paths)) else None


def _is_below(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and not any(part in ("", ".", "..") or part.startswith(OURS) for part in parts)
