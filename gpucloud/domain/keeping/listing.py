"""A directory as it is seen at one moment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OURS = ".gpucloud-"
"""Names that begin so are no part of a script's directory: the store keeps them for itself."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """What tells one content of a file from another without reading it."""

    size: int
    mtime_ns: int
    inode: int


Listing = Mapping[str, Signature]
"""The files below the directory, by `/`-separated path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A small text file beside a set that names checkpoints: its path, what it said and when, and their paths."""

    path: str
    text: str
    mtime_ns: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSet:
    """Files that are a checkpoint together; `name` is their folder, or the file's own name.

    `step` is what the names say, None where they say nothing. `complete`: nothing more is expected. `marked`: a file
    that is written last says so; without one, each file must show by itself that it is whole. `pointers` are
    kept with it, and so are, in `also`, the files of other checkpoints that are named.
    """

    name: str
    step: int | None
    paths: tuple[str, ...]
    complete: bool
    marked: bool
    also: tuple[str, ...] = ()
    pointers: tuple[Pointer, ...] = ()

    @property
    def named(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return what its pointers name, however often they are written again."""
        return tuple((pointer.path, pointer.names) for pointer in self.pointers)

    def content(self, listing: Listing) -> tuple[tuple[str, Signature], ...]:
        """Return what tells this set from what it was before."""
        return tuple((path, listing[path]) for path in (*self.paths, *self.also))

    def written_ns(self, listing: Listing) -> int:
        """Return when its newest file was written, in nanoseconds since 1970."""
        return max((listing[path].mtime_ns for path in self.paths), default=0)


def folder_of(path: str) -> str:
    """Return the folder of a path, empty for the directory itself."""
    return path.rpartition("/")[0]


def above(path: str) -> tuple[str, ...]:
    """Return the folders on the way to a path, the directory itself left out."""
    parts = path.split("/")
    return tuple("/".join(parts[:depth]) for depth in range(1, len(parts)))


def below(folder: str, listing: Listing) -> tuple[str, ...]:
    """Return the paths of all files in a folder and below it, sorted."""
    return tuple(sorted(path for path in listing if not folder or path.startswith(f"{folder}/")))


def family(name: str) -> str:
    """Return the name without its numbers: `ckpt_500.pt` and `ckpt_600.pt` are of one family."""
    return _NUMBER.sub("#", name)


def last_number(name: str) -> int | None:
    """Return the step that a name ends with, before its suffix: 500 of `global_step500` and of `ckpt_500.pt`."""
    m = re.search(r"(\d+)(?:\.[A-Za-z]\w*)?$", name)
    return int(m[1]) if m else None
