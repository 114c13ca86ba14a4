"""The node's end of a code sync: a program that is sent as text and run by the node's own python3 (3.10 or newer).

    python3 -I -S -c THIS TARGET SHA256 < REQUEST

REQUEST is empty, or one line of JSON, `[MANIFEST BYTES, [[SHA256, BYTES], ...]]`, then the zlib-packed manifest
(a list of `[path, size, mtime_ns, mode, sha256]`), then the blobs. Blobs are verified and stored first. The answer is
one line of JSON: `{"ready": true}`, or `{"ready": false, "missing": [SHA256, ...]}` with what the tree still needs.

    TARGET/<sha256>/            a tree; appears by one rename, when every file in it was verified
    TARGET/.manifests/<sha256>  what must be in it; written after it
    TARGET/.incoming/<sha256>   contents on their way into a tree
    TARGET/.building-*          a tree that is being built; only the holder of TARGET/.lock has one

Killed anywhere, it leaves nothing that a later run takes for whole. Standard library only; it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import zlib
from pathlib import Path
from typing import BinaryIO

Row = tuple[str, int, int, int, str | None]  # path, size, mtime_ns, mode, sha256

LINK, FOLDER = 0o120777, 0o040755
KEPT_TREES = 4
STALE_S = 86400.0
CHUNK_BYTES = 1 << 20


def main(target: str, name: str) -> None:
    """Answer one request for the tree `name` below `target`."""
    os.umask(0o022)
    store = Path(target)
    for folder in (store / ".incoming", store / ".manifests"):
        folder.mkdir(parents=True, exist_ok=True)
    line = sys.stdin.buffer.readline()
    packed_bytes, blobs = json.loads(line) if line else (0, [])
    packed = sys.stdin.buffer.read(packed_bytes)
    for sha256, size in blobs:
        _receive(store / ".incoming", sha256, size)
    manifest = _parsed(zlib.decompress(packed), name) if packed else _known(store, name)
    answer = {"ready": False, "missing": []}
    if manifest is not None:
        # Held only here, where nothing waits for the network: a client that went silent blocks nobody.
        with (store / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = _build(store, name, manifest)
        answer = {"ready": not missing, "missing": missing}
    sys.stdout.write(json.dumps(answer) + "\n")


def _receive(incoming: Path, sha256: str, size: int) -> None:
    part = incoming / f".part-{os.getpid()}"
    digest = hashlib.sha256()
    with part.open("wb", buffering=0) as file:
        while size:
            chunk = sys.stdin.buffer.read(min(size, CHUNK_BYTES))
            if not chunk:
                raise SystemExit("the transfer was cut off")
            digest.update(chunk)
            _write_all(file, chunk)
            size -= len(chunk)
    if digest.hexdigest() != sha256:
        raise SystemExit(f"{sha256} arrived damaged")
    part.replace(incoming / sha256)


def _parsed(text: str | bytes, name: str) -> list[Row]:
    manifest = [tuple(entry) for entry in json.loads(text)]
    digest = hashlib.sha256()
    for path, _, _, mode, sha256 in manifest:
        if path.startswith("/") or ".." in path.split("/"):
            raise SystemExit(f"{path!r} leaves the tree")
        digest.update(f"{mode:o} {sha256 or '-'} {path}\0".encode("utf-8", "surrogateescape"))
    if digest.hexdigest() != name:
        raise SystemExit("the manifest arrived damaged")
    return manifest


def _known(store: Path, name: str) -> list[Row] | None:
    try:
        return _parsed((store / ".manifests" / name).read_text(), name)
    except (OSError, ValueError, SystemExit):
        return None


def _build(store: Path, name: str, manifest: list[Row]) -> list[str]:
    """Make the tree and return []; or return the contents that are needed for it."""
    tree = store / name
    for dead in store.glob(".building-*"):
        shutil.rmtree(dead, ignore_errors=True)
    wrong = [entry for entry in manifest if not _intact(tree, entry)]
    if wrong or not tree.is_dir():
        sources = _Sources(store, name, manifest)
        missing = sources.missing(wrong)
        if not missing:
            missing = _assemble(store, tree, wrong, sources)
        if missing:
            return missing
    _record(store, name, manifest)
    _prune(store, manifest)
    return []


def _intact(tree: Path, entry: Row) -> bool:
    path, size, mtime_ns, mode, sha256 = entry
    try:
        status = (tree / path).lstat()
        if stat.S_IFMT(status.st_mode) != stat.S_IFMT(mode):
            return False
        if mode == FOLDER:
            return True
        if mode == LINK:
            return hashlib.sha256(os.fsencode((tree / path).readlink())).hexdigest() == sha256
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, mtime_ns) and status.st_mode & 0o777 == mode & 0o777


class _Sources:
    """Where on this node each content lies: on its way in, or in an older tree."""

    def __init__(self, store: Path, name: str, manifest: list[Row]) -> None:
        self.incoming = store / ".incoming"
        self.places: dict[str, list[Path]] = {}
        for tree in _newest_trees(store):
            entries = manifest if tree.name == name else _known(store, tree.name) or ()
            for path, _, _, _, sha256 in entries:
                if sha256:
                    self.places.setdefault(sha256, []).append(tree / path)

    def missing(self, entries: list[Row]) -> list[str]:
        found: dict[str, bool] = {}
        for _, _, _, _, sha256 in entries:
            if sha256 and sha256 not in found:
                found[sha256] = (self.incoming / sha256).exists() or any(
                    map(os.path.lexists, self.places.get(sha256, ()))
                )
        return [sha256 for sha256 in found if not found[sha256]]

    def copy(self, sha256: str, destination: Path, *, link: bool) -> bool:
        """Put the verified content at `destination`; an older tree may have been written to, so it is hashed again."""
        for place in (self.incoming / sha256, *self.places.get(sha256, ())):
            with contextlib.suppress(OSError):
                content = os.fsencode(place.readlink()) if place.is_symlink() else None
                if link:
                    content = place.read_bytes() if content is None else content
                    if hashlib.sha256(content).hexdigest() == sha256:
                        destination.symlink_to(os.fsdecode(content))
                        return True
                elif _copied(place, content, destination) == sha256:
                    return True
        return False


def _copied(place: Path, content: bytes | None, destination: Path) -> str:
    digest = hashlib.sha256()
    with destination.open("wb", buffering=0) as out:
        if content is not None:
            digest.update(content)
            _write_all(out, content)
            return digest.hexdigest()
        with place.open("rb", buffering=0) as file:
            while True:
                chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return digest.hexdigest()
                digest.update(chunk)
                _write_all(out, chunk)


def _assemble(store: Path, tree: Path, entries: list[Row], sources: _Sources) -> list[str]:
    building = store / f".building-{os.getpid()}"
    building.mkdir()
    missing = [sha256 for entry in entries if (sha256 := _make(building, entry, sources))]
    if missing:
        shutil.rmtree(building)
    elif tree.is_dir():
        # A job may work in the tree: what it added stays, what it changed of ours is put right.
        for path, _, _, _, _ in entries:
            _put_right(building, tree, path)
        shutil.rmtree(building)
    else:
        building.rename(tree)
    return missing


def _make(building: Path, entry: Row, sources: _Sources) -> str | None:
    """Return None, or the content that is not to be had."""
    path, _, mtime_ns, mode, sha256 = entry
    place = building / path
    if sha256 is None:
        place.mkdir(parents=True, exist_ok=True)
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    if not sources.copy(sha256, place, link=mode == LINK):
        return sha256
    if mode != LINK:
        place.chmod(mode & 0o777)
        os.utime(place, ns=(mtime_ns, mtime_ns))
    return None


def _put_right(building: Path, tree: Path, path: str) -> None:
    parts = path.split("/")
    for depth in range(1, len(parts)):
        above = tree.joinpath(*parts[:depth])
        # Never write through a link: it may lead out of the tree.
        if above.is_symlink() or not above.is_dir():
            with contextlib.suppress(FileNotFoundError):
                above.unlink()
            above.mkdir()
    place = tree / path
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif (building / path).is_dir():
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
    (building / path).replace(place)


def _record(store: Path, name: str, manifest: list[Row]) -> None:
    file = store / ".manifests" / name
    beside = file.with_name(f".{name}.part")
    beside.write_text(json.dumps(manifest))
    beside.replace(file)
    os.utime(store / name)


def _prune(store: Path, manifest: list[Row]) -> None:
    for old in _newest_trees(store)[KEPT_TREES:]:
        with contextlib.suppress(FileNotFoundError):
            (store / ".manifests" / old.name).unlink()
        # Renamed first: a removal that is cut short leaves nothing that looks like a tree.
        dead = old.rename(store / f".building-{old.name}")
        shutil.rmtree(dead, ignore_errors=True)
    done = {entry[4] for entry in manifest}
    for blob in (store / ".incoming").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if blob.name in done or time.time() - blob.lstat().st_mtime > STALE_S:
                blob.unlink()


def _newest_trees(store: Path) -> list[Path]:
    trees = [tree for tree in store.iterdir() if not tree.name.startswith(".") and tree.is_dir()]
    return sorted(trees, key=lambda tree: tree.stat().st_mtime_ns, reverse=True)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except OSError as error:
        raise SystemExit(f"{error.filename or sys.argv[1]}: {error.strerror}") from error
