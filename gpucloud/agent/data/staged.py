"""Which data sets are whole on this node, told quickly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucloud.agent.wholefile import read_text
from gpucloud.domain.data import DataFile

_LOOKED_AT = 10_000  # files of a set, spread evenly: 0.05 s


def staged(root: Path, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the keys whose set is marked whole, undamaged as far as sizes and times tell, at its target."""
    return tuple(key for key in keys if _stands(root, key))


def _stands(root: Path, key: str) -> bool:
    record = _read(root / "data" / f"{key}.json")
    folder, target = record.get("folder"), record.get("target")
    if (
        not isinstance(folder, str)
        or not isinstance(target, str)
        or os.path.realpath(target) != os.path.realpath(folder)
    ):
        return False
    files = _read(Path(folder) / ".gpucloud-data.json").get("files")
    return isinstance(files, list) and all(_is_whole(folder, row) for row in _spread(files))


def _spread(files: list[Any]) -> Iterator[Any]:
    yield from files[:: max(1, len(files) // _LOOKED_AT)]


def _is_whole(folder: str, row: list[Any]) -> bool:
    path, size, identity = row
    try:
        status = os.lstat(f"{folder}/{path}")
    except OSError:
        return False
    stamp_s = DataFile(path=path, size=size, sha256=identity.partition(" ")[2]).stamp_s
    return status.st_size == size and status.st_mtime_ns == stamp_s * 10**9


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(read_text(path) or "{}")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
