"""Files that a command puts into somebody's repository, and may bring up to date: what is edited there stays."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class Forge(str, Enum):
    """Whose CI."""

    GITHUB = "github"
    GITLAB = "gitlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What becomes of each path: written, removed, kept since only its owner changed it, or in the way."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    in_the_way: tuple[str, ...]


def update(
    wanted: Mapping[str, bytes], there: Mapping[str, bytes], record: Mapping[str, str], outdated: Collection[str]
) -> Update:
    """Return what to do; `record` has the SHA-256 of each file as it was written last, `outdated` what may go.

    A file that is there is written over if it is as it was written last. One that was edited since is kept where what
    is wanted is what was written then: only its owner has changed it. It is in the way where both have.
    """
    written, kept, in_the_way = [], [], []
    for path, data in wanted.items():
        now = there.get(path)
        if now == data:
            continue
        if now is None or sha256(now) == record.get(path):
            written.append(path)
        elif sha256(data) == record.get(path):
            kept.append(path)
        else:
            in_the_way.append(path)
    removed = [
        path for path in outdated if path not in wanted and path in there and _is_ours(there[path], path, record)
    ]
    return Update(
        written=tuple(written), removed=tuple(sorted(removed)), kept=tuple(kept), in_the_way=tuple(in_the_way)
    )


def sha256(data: bytes) -> str:
    """Return the hash that a record holds."""
    return hashlib.sha256(data).hexdigest()


def _is_ours(data: bytes, path: str, record: Mapping[str, str]) -> bool:
    return sha256(data) == record.get(path)
