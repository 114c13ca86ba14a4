"""Small text files that name a checkpoint beside them: Megatron-LM's `latest_checkpointed_iteration.txt` and its like.

A script that has one looks there alone, and begins at step 0 without it. Pure: listings and texts in, sets out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpucloud.domain.checkpoint.directory.listing import FileSet, Listing, Pointer, above, folder_of, last_number

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
