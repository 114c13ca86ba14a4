"""What arrives from another machine, judged before a byte of it is written: names, links, sizes, what fits beside what.

Every name comes from where the job's own code runs, and may have been made to lead elsewhere.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpucloud.domain.errors import LandingRefused

STAGING = ".gpucloud-landing-"
"""Folder names that begin so belong to the landing itself."""

_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a tree may have of what costs memory, or what no file system takes."""

    entries: int = 500_000
    depth: int = 100
    name_bytes: int = 255
    path_bytes: int = 4000
    file_bytes: int = 1 << 53


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A file on its way; `name` is its path below the folder that it arrives in."""

    name: str
    size: int
    mode: int = 0o644
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What arrives together. `links` are names with what they say; `folders` names with their modes."""

    files: tuple[Arriving, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    folders: tuple[tuple[str, int], ...] = ()

    def names(self) -> Iterator[str]:
        """Yield the name of everything."""
        yield from (name for name, _ in self.folders)
        yield from (file.name for file in self.files)
        yield from (name for name, _ in self.links)


def judge(tree: Tree, limits: Limits = LIMITS) -> None:
    """Raise LandingRefused for a tree that could lie outside of its folder, or not beside itself.

    A link must name something inside by its text alone, whatever lies there now or later: it goes up first, no farther
    than the top, and then down. What goes up after a name could turn elsewhere once that name is a link.
    """
    count = len(tree.files) + len(tree.links) + len(tree.folders)
    if count > limits.entries:
        raise LandingRefused(f"{count} files, links and folders are to come, and {limits.entries} may")
    for name in tree.names():
        _judge_name(name, limits)
    for file in tree.files:
        if not 0 <= file.size <= limits.file_bytes:
            raise _refused(file.name, "is said to have more bytes than a disk has, or less than none")
    for name, target in tree.links:
        if landing_of(name, target) is None:
            raise _refused(name, f"is a link to {shown(target)}, which leads out, or could")
        if len(os.fsencode(target)) > limits.path_bytes:
            raise _refused(name, "is a link whose text is too long")
    judge_together(tree)


def judge_together(tree: Tree, *, folded: bool = False) -> None:
    """Raise LandingRefused for names of which one would take another's place.

    `folded`: the disk takes names for the same that differ in case or in how their letters are composed.
    """
    alike = fold if folded else str
    taken = {alike(name): name for name, _ in tree.folders}
    if len(taken) < len(tree.folders):
        raise _refused(_twice([alike(name) for name, _ in tree.folders]), "comes twice")
    leaves: dict[str, str] = {}
    for name in (*(file.name for file in tree.files), *(name for name, _ in tree.links)):
        other = taken.get(alike(name), leaves.get(alike(name)))
        if other is not None:
            raise _refused(name, f"comes twice, here as {shown(other)}")
        leaves[alike(name)] = name
    for name in tree.names():
        above = parent_of(name)
        while above and taken.get(alike(above)) != above:
            if alike(above) in leaves:
                raise _refused(above, f"is no folder, and {shown(name)} is to lie in it")
            if alike(above) in taken:
                raise _refused(above, f"comes twice, here as {shown(taken[alike(above)])}")
            taken[alike(above)] = above
            above = parent_of(above)


def fitting(places: Mapping[str, str]) -> tuple[dict[str, Arriving], tuple[str, ...]]:
    """Return files, by their keys, for the places that files may have beside each other, and why the others may not.

    A bucket may have an object where another one would need a folder.
    """
    files: dict[str, Arriving] = {}
    refused: list[str] = []
    taken: set[str] = set()
    for key, name in sorted(places.items(), key=lambda one: one[1]):
        try:
            _judge_name(name, LIMITS)
            above, other = parent_of(name), ""
            while above and not other:
                above, other = parent_of(above), above if above in taken else ""
            if other:
                raise _refused(other, f"is no folder, and {shown(name)} is to lie in it")
        except LandingRefused as error:
            refused.append(error.message)
        else:
            taken.add(name)
            files[key] = Arriving(name=name, size=0)
    return files, tuple(refused)


def landing_of(name: str, target: str) -> list[str] | None:
    """Return the parts of the path below the top that a link names; None when it leads out, or could."""
    if not target or target.startswith("/") or "\0" in target:
        return None
    at, went_down = name.split("/")[:-1], False
    for part in target.split("/"):
        if part == "..":
            if went_down or not at:
                return None
            at.pop()
        elif part not in ("", "."):
            went_down = True
            at.append(part)
    return at


def fold(name: str) -> str:
    """Return what all names have in common that a disk may take for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def parent_of(name: str) -> str:
    """Return the name of the folder that it lies in; empty at the top."""
    return name.rpartition("/")[0]


def shown(name: str) -> str:
    """Return a name as an error shows it: escaped, and not longer than a line or two."""
    text = ascii(name) if any(not char.isprintable() for char in name) else repr(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _judge_name(name: str, limits: Limits) -> None:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _refused(name, "is no name below the folder that it arrives in")
    if len(parts) > limits.depth:
        raise _refused(name, f"lies more than {limits.depth} folders deep")
    if any(fold(part).startswith(STAGING) for part in parts):
        raise _refused(name, "is a name of gpucloud's own")
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        raise _refused(name, "is no text that could be a name") from None
    if max(sizes) > limits.name_bytes or sum(sizes) + len(sizes) > limits.path_bytes:
        raise _refused(name, "is too long")


def _twice(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _refused(name: str, why: str) -> LandingRefused:
    return LandingRefused(f"{shown(name)} {why}")
