"""A script's directory at one moment: its files, whether a set has come to rest, and files that name the newest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from posixpath import normpath
from urllib.parse import quote, unquote_to_bytes

from gpucloud.domain.checkpoint.manifest import Level, Manifest, Piece, Promise, data_key
from gpucloud.domain.job.code import fits_pattern

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
    m = re.search(r"(\d+)(?:\.pth\.tar|\.[A-Za-z]\w*)?$", name)
    return int(m[1]) if m else None


# Paths of a script's files as names of objects, and back.


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


# When a set of files has come to rest: pure, over one listing after the other.


Content = tuple[tuple[str, Signature], ...]


_State = tuple[Content, tuple[tuple[str, tuple[str, ...]], ...]]
"""Of a set: its files, and what the pointers beside it name."""


@dataclass(slots=True)
class _Read:
    state: _State
    since_s: float


class Settling:
    """Remembers what each set was and since when; times are seconds of any clock that never goes back."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, _Read] = {}
        self._taken: dict[str, _State] = {}
        self._newest_ns = 0

    def look(self, sets: tuple[FileSet, ...], listing: Listing, now_s: float) -> tuple[FileSet, ...]:
        """Return the complete sets that are new and at rest, the newest first."""
        present = {one.name: (one.content(listing), one.named) for one in sets}
        self._seen = {
            name: seen if (seen := self._seen.get(name)) and seen.state == state else _Read(state, now_s)
            for name, state in present.items()
        }
        ready = [one for one in sets if self._is_ready(one, listing, now_s)]
        return tuple(sorted(ready, key=lambda one: (one.written_ns(listing), one.step or 0), reverse=True))

    def unsettled(self, sets: tuple[FileSet, ...], listing: Listing) -> bool:
        """Whether something is being written, or was, and is not taken: worth waiting for at the end."""
        return any(self._is_new(one, listing) for one in sets)

    def take(self, one: FileSet, content: Content) -> None:
        """This content is not to be offered again, nor is any that was written before it."""
        self._taken[one.name] = content, one.named
        self._newest_ns = max((self._newest_ns, *(about.mtime_ns for path, about in content if path in one.paths)))

    def take_all(self, sets: tuple[FileSet, ...], listing: Listing) -> None:
        """What is there now is nothing new."""
        for one in sets:
            self._taken[one.name] = one.content(listing), one.named

    def has_newest(self, listing: Listing) -> bool:
        """Whether of the files that are named as those that were taken none is there which is newer, or was changed.

        An export beside them, or a last evaluation's numbers, is no checkpoint.
        """
        taken = dict(row for content, _ in self._taken.values() for row in content)
        families = set(map(family, taken))
        return all(
            taken.get(path) == about or about.mtime_ns < self._newest_ns
            for path, about in listing.items()
            if family(path) in families
        )

    def _is_ready(self, one: FileSet, listing: Listing, now_s: float) -> bool:
        at_rest = now_s - self._seen[one.name].since_s >= self._settle_s
        return one.complete and at_rest and self._is_new(one, listing)

    def _is_new(self, one: FileSet, listing: Listing) -> bool:
        known = self._taken.get(one.name) == (one.content(listing), one.named)
        return bool(one.paths) and not known and one.written_ns(listing) >= self._newest_ns


# What becomes of an attempt whose script is over, by its last checkpoint.


_MOST_TOLD = 300  # characters of a reason: a node's status has little room


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """Why the last checkpoint is not saved. `lasts`: that will be so until somebody mends it.

    `paths` are its files, from the directory on; none where it is not whole, and never will be.
    """

    why: str
    lasts: bool = False
    paths: tuple[str, ...] = ()

    def as_left(self, listing: Listing) -> Unsaved:
        """Return it as it stands with these files in the directory: what its script has deleted cannot be saved."""
        return self if all(path in listing for path in self.paths) else replace(self, paths=())

    def told(self, after: AfterScript) -> str:
        """Return why, as far as there is room for it, and what becomes of its files."""
        why = self.why if len(self.why) <= _MOST_TOLD else f"{self.why[:_MOST_TOLD]}…"
        return f"{why}; its files come home" if self.paths and after is AfterScript.OVER else why


class AfterScript(Enum):
    """What follows a script that has ended well."""

    OVER = "over"
    AGAIN = "again"
    """Another attempt goes on from the newest checkpoint, and may save its last one."""
    FAILED = "failed"
    """Another would be refused the same: somebody has to mend that first."""


def after_script(unsaved: Unsaved | None, folder: str, outputs: tuple[str, ...]) -> AfterScript:
    """Return what follows; `folder` is the directory's path, as those of `outputs` from the code folder on.

    What comes home as an output is not lost, and what was never whole another attempt would not have either.
    """
    if unsaved is None or not unsaved.paths or all(_comes_home(f"{folder}/{path}", outputs) for path in unsaved.paths):
        return AfterScript.OVER
    return AfterScript.FAILED if unsaved.lasts else AfterScript.AGAIN


def _comes_home(path: str, outputs: tuple[str, ...]) -> bool:
    """Whether a file is an output or lies below one, each with all that is in it."""
    path = normpath(path)
    folders = above(path)
    named, tops = (".", *folders, path), (*(f"{folder}/" for folder in folders), path)
    return any(normpath(output) in named or any(fits_pattern(output, top) for top in tops) for output in outputs)


# Small text files that name a checkpoint beside them: Megatron-LM's `latest_checkpointed_iteration.txt` and its like.
#
# A script that has one looks there alone, and begins at step 0 without it. Pure: listings and texts in, sets out.


MOST_BYTES = 4096
"""No longer text beside a set is looked into."""

_STATE = "trainer_state.json"  # Hugging Face's Trainer names the best checkpoint in each one's state
_STATE_BYTES = 16 << 20
_BEST = re.compile(r'"best_model_checkpoint"\s*:\s*("(?:[^"\\]|\\.)*")')

_MOST_FILES = 64  # of those beside one set, the newest: a folder of samples is none of pointers
_MOST_LINES = 16  # detectron2, mmengine and Megatron-LM write one
_NAMED = re.compile(r"(?:[\w.-]+\s*[:=]\s*)?(.+)")

Checkpoints = Mapping[str, tuple[str, ...]]
"""What can be named: whole folders and single files, by their paths, with the paths of what is in them."""


def beside(sets: Iterable[FileSet], listing: Listing, checkpoints: Checkpoints) -> tuple[str, ...]:
    """Return the paths of the small files where the sets lie, or above their files: they may name one."""
    folders, taken = set[str](), set(checkpoints)
    for one in sets:
        folders |= _folders(one)
        taken |= set(one.paths)
    found: dict[str, list[str]] = {}
    for path, signature in sorted(listing.items(), key=lambda row: (row[1].mtime_ns, row[0])):
        if 0 < signature.size <= MOST_BYTES and folder_of(path) in folders and path not in taken:
            found.setdefault(folder_of(path), []).append(path)
    return tuple(sorted(path for paths in found.values() for path in paths[-_MOST_FILES:]))


def inside(sets: Iterable[FileSet], listing: Listing) -> tuple[str, ...]:
    """Return the paths of those files of the sets themselves that may name another: Trainer's, the best one."""
    paths = (path for one in sets for path in one.paths if path.rpartition("/")[2] == _STATE)
    return tuple(path for path in paths if listing[path].size <= _STATE_BYTES)


def best_of(text: str, folder: str, checkpoints: Checkpoints) -> str | None:
    """Return the best checkpoint as the state of Trainer in a checkpoint of that folder names it; None: none there."""
    found = _BEST.search(text)
    try:
        return at_path(json.loads(found[1]), folder, checkpoints) if found else None
    except ValueError:
        return None


def with_pointers(one: FileSet, texts: Mapping[str, str], listing: Listing, checkpoints: Checkpoints) -> FileSet:
    """Return the set with the files beside it that name a checkpoint, and with the others that it or they name.

    One that a script has not moved on yet names the checkpoint before: that is kept too, as the script would go on from
    it, and so is the best one.
    """
    pointers, also = [], set(one.also)
    for path, text in sorted(texts.items()):
        if folder_of(path) in _folders(one) and (names := named_by(text, folder_of(path), checkpoints)):
            pointers.append(Pointer(path=path, text=text, mtime_ns=listing[path].mtime_ns, names=names))
            also |= {inner for top in names for inner in checkpoints[top]}
        elif path in one.paths and (best := best_of(text, folder_of(one.name), checkpoints)) is not None:
            also |= set(checkpoints[best])
    return replace(one, also=tuple(sorted(also - set(one.paths))), pointers=tuple(pointers))


def named_by(text: str, folder: str, checkpoints: Checkpoints) -> tuple[str, ...]:
    """Return which of the checkpoints a text in that folder names: by a path, a name, or the number of its step."""
    if text.strip().isdecimal():
        step = int(text.strip()[:18])
        return tuple(sorted(top for top in checkpoints if folder_of(top) == folder and last_number(top) == step))
    found = (top for value in _values(text) if (top := at_path(value, folder, checkpoints)) is not None)
    return tuple(sorted(set(found)))


def at_path(value: str, folder: str, checkpoints: Checkpoints) -> str | None:
    """Return the checkpoint that a path ends with, seen from that folder or from the directory.

    What is before it may be where the directory lay on another machine. None for one that goes up.
    """
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if ".." in parts:
        return None
    for cut in range(len(parts)):
        tail = "/".join(parts[cut:])
        for path in (f"{folder}/{tail}".lstrip("/"), tail):
            if path in checkpoints:
                return path
    return None


def readdressed(text: str, folder: str, directory: str, checkpoints: Checkpoints) -> str:
    """Return the text with absolute paths of checkpoints leading into this directory, wherever they led before."""
    for value in _values(text):
        top = at_path(value, folder, checkpoints) if value.startswith("/") else None
        if top is not None:
            text = text.replace(value, f"{directory}/{top}")
    return text


def _folders(one: FileSet) -> set[str]:
    return {folder_of(one.name)} if one.name else {"", *(top for path in one.paths for top in above(path))}


def _values(text: str) -> tuple[str, ...]:
    """Return what a text may name: JSON's strings, or what each line says alone or after `key:`."""
    try:
        return tuple(_strings(json.loads(text)))
    except (ValueError, RecursionError):
        pass
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_LINES:
        return ()
    return tuple(m[1].strip("\"'") for line in lines if (m := _NAMED.fullmatch(line)))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inner: Iterable[object] = value.values() if isinstance(value, dict) else value
        for one in inner:
            yield from _strings(one)
