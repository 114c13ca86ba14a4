"""A code folder as a manifest: what is in it, under one name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

FILE = 0o100644
PROGRAM = 0o100755
LINK = 0o120777
FOLDER = 0o040755


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, link or empty folder; `path` is relative, its parts joined by `/`.

    As in git, `mode` is one of four values, so that two machines with different umasks agree, and a
    link's content is its target. A folder has no content (`sha256` None); only empty ones are listed.
    """

    path: str
    size: int
    mtime_ns: int
    mode: int
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every entry of a tree, sorted by path; make it with `manifest`."""

    entries: tuple[Entry, ...]

    @property
    def sha256(self) -> str:
        """The tree's name: over paths, modes and contents; times do not count."""
        digest = hashlib.sha256()
        for entry in self.entries:
            # A path cannot hold a NUL, so the lines cannot be read in two ways.
            line = f"{entry.mode:o} {entry.sha256 or '-'} {entry.path}\0"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def manifest(entries: tuple[Entry, ...]) -> Manifest:
    """Return the manifest of a tree with these entries."""
    return Manifest(entries=tuple(sorted(entries, key=lambda entry: entry.path)))


def beside(code: str, sha256: str) -> str:
    """Return where the tree of that name lies on a machine that has another at `code`.

    A name that is none comes from a state that machines can write: `code` itself then.
    """
    return str(PurePosixPath(code).with_name(sha256)) if is_name(sha256) else code


def is_name(sha256: str) -> bool:
    """Return whether that is how a tree is called."""
    return re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
