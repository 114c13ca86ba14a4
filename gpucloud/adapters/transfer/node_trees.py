"""Trees of code on a node, by the hash of what is in them: a chapter of the node's program (`node_program`).

A request has nothing more, or one line of JSON, `[MANIFEST BYTES, [[SHA256, BYTES], ...]]`, then the zlib-packed
manifest (a list of `[path, size, mtime_ns, mode, sha256]`), then the contents. Contents are verified and stored first.
The answer is `{"ready": true, "missing": []}`, or `"ready": false` with the contents that the tree still needs: none
named, it is the manifest.

    STORE/<sha256>/            a tree; appears by one rename, when every file in it was verified
    STORE/.manifests/<sha256>  what must be in it; written after it
    STORE/.incoming/<sha256>   contents on their way into a tree
    STORE/.building-*          a tree that is being built; only the holder of STORE/.lock has one

Killed anywhere, it leaves nothing that a later run takes for whole. Others sign trees that are made on a user's own
machine and on those that make themselves fit: a request is judged before anything is made of it, and nothing is written
through a link. Standard library only; it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Row = tuple[str, int, int, int, str | None]  # path, size, mtime_ns, mode, sha256

LINK, FOLDER = 0o120777, 0o040755
MODES = (0o100644, 0o100755, LINK, FOLDER)
MOST_ENTRIES = 500_000
MOST_DEPTH = 100
MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 4096
MOST_MANIFEST_BYTES = 64 << 20
MOST_DIGITS = 20
KEPT_TREES = 4
STALE_S = 86400.0
CHUNK_BYTES = 1 << 20
CUT_OFF = "the transfer was cut off"


def tree(store: Path, name: str, given: BinaryIO, most_bytes: int | None = None) -> dict[str, Any]:
    """Answer one request for the tree `name`, whose files may have `most_bytes` together.

    SystemExit for what can be no tree of that name.
    """
    if not _is_sha256(name):
        raise SystemExit(f"{name!a:.80} names no tree")
    os.umask(0o022)  # trees are alike wherever they lie; the folder around them is what keeps others out
    _close(store)
    for folder in (store / ".incoming", store / ".manifests"):
        folder.mkdir(parents=True, exist_ok=True)
    packed_bytes, contents = _asked(given.readline(MOST_MANIFEST_BYTES + 1))
    _refuse_more([size for _, size in contents], most_bytes)
    packed = given.read(packed_bytes)
    manifest = _parsed(_unpacked(packed), name) if packed else None
    _refuse_more([row[1] for row in manifest or ()], most_bytes)
    for sha256, size in contents:
        _receive(store / ".incoming", sha256, size, given)
    if manifest is None:
        manifest = _known(store, name)
    if manifest is None:
        return {"ready": False, "missing": []}
    # Held only here, where nothing waits for the network: a client that went silent blocks nobody.
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = _build(store, name, manifest)
    return {"ready": not missing, "missing": missing}


def chunks_of(given: BinaryIO, size: int, short: str) -> Iterator[bytes]:
    """Yield that many bytes from there. SystemExit, saying that it is `short`, where there are fewer."""
    while size:
        chunk = given.read(min(size, CHUNK_BYTES))
        if not chunk:
            raise SystemExit(short)
        yield chunk
        size -= len(chunk)


def stays(path: str, target: str) -> bool:
    """Return whether a link leads inside the tree by its text alone: first up, no farther than the top, then down."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    depth, went_down = path.count("/"), False
    for part in target.split("/"):
        if part == "..":
            if went_down or not depth:
                return False
            depth -= 1
        elif part not in ("", "."):
            went_down = True
    return True


def _close(store: Path) -> None:
    """Have the agent's folder, in which the trees lie, be its user's only: hosts may be shared."""
    for folder in store.parents:
        if folder.name == ".gpucloud":
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)


def _asked(line: bytes) -> tuple[int, list[tuple[str, int]]]:
    """Return how long the packed manifest is, and which contents follow it."""
    head = _json(line) if line else [0, []]
    if not isinstance(head, list) or len(head) != 2 or not _is_size(head[0]) or not isinstance(head[1], list):
        raise SystemExit("the request arrived damaged")
    if head[0] > MOST_MANIFEST_BYTES:
        raise SystemExit("the manifest is too large")
    for blob in head[1]:
        if not isinstance(blob, list) or len(blob) != 2 or not _is_sha256(blob[0]) or not _is_size(blob[1]):
            raise SystemExit("the request arrived damaged")
    return head[0], [(sha256, size) for sha256, size in head[1]]


def _refuse_more(sizes: list[int], most: int | None) -> None:
    if most is not None and sum(sizes) > most:
        raise SystemExit(f"it would have {sum(sizes)} bytes, and {most} may be")


def _unpacked(packed: bytes) -> bytes:
    """Return the manifest's text, never more than it may have: a few bytes can unpack to any number."""
    try:
        text = zlib.decompressobj().decompress(packed, MOST_MANIFEST_BYTES + 1)
    except zlib.error:
        raise SystemExit("the manifest arrived damaged") from None
    if len(text) > MOST_MANIFEST_BYTES:
        raise SystemExit("the manifest is too large")
    return text


def _json(text: bytes) -> object:
    """Return what the JSON says, if reading it takes no more memory or time than a tree's would."""
    if len(text) > MOST_MANIFEST_BYTES or text.count(b"[") + text.count(b"{") > 2 * MOST_ENTRIES:
        raise SystemExit("the manifest is too large")
    try:
        return json.loads(text, parse_int=_number)
    except (ValueError, RecursionError):
        raise SystemExit("the manifest arrived damaged") from None


def _number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(digits[:MOST_DIGITS])
    return int(digits)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _receive(incoming: Path, sha256: str, size: int, given: BinaryIO) -> None:
    part = incoming / f".part-{os.getpid()}"
    digest = hashlib.sha256()
    with part.open("wb", buffering=0) as file:
        for chunk in chunks_of(given, size, CUT_OFF):
            digest.update(chunk)
            _write_all(file, chunk)
    if digest.hexdigest() != sha256:
        raise SystemExit(f"{sha256} arrived damaged")
    part.replace(incoming / sha256)


def _parsed(text: bytes, name: str) -> list[Row]:
    """Return the rows of the tree of that name, which can all lie beside each other, and nowhere else."""
    found = _json(text)
    if not isinstance(found, list) or len(found) > MOST_ENTRIES:
        raise SystemExit("the manifest is too large, or none")
    manifest = [_row(row) for row in found]
    _judge_together(manifest)
    digest = hashlib.sha256()
    for path, _, _, mode, sha256 in manifest:
        digest.update(f"{mode:o} {sha256 or '-'} {path}\0".encode("utf-8", "surrogateescape"))
    if digest.hexdigest() != name:
        raise SystemExit("the manifest arrived damaged")
    return manifest


def _row(row: object) -> Row:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[0], str):
        raise SystemExit("the manifest arrived damaged")
    path, size, mtime_ns, mode, sha256 = row
    has_content = sha256 is None if mode == FOLDER else _is_sha256(sha256)
    in_time = type(mtime_ns) is int and abs(mtime_ns) < 1 << 63
    if type(mode) is not int or mode not in MODES or not (has_content and in_time and _is_size(size)):
        raise SystemExit(f"{_shown(path)} is neither file, link nor folder")
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise SystemExit(f"{_shown(path)} leaves the tree")
    try:
        sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        raise SystemExit(f"{_shown(path)} is no name") from None
    if len(parts) > MOST_DEPTH or max(sizes) > MOST_NAME_BYTES or sum(sizes) + len(sizes) > MOST_PATH_BYTES:
        raise SystemExit(f"{_shown(path)} is too long")
    return path, size, mtime_ns, mode, sha256


def _judge_together(manifest: list[Row]) -> None:
    modes = {row[0]: row[3] for row in manifest}
    if len(modes) < len(manifest):
        raise SystemExit("a name comes twice")
    seen: set[str] = set()
    for path in modes:
        above = path.rpartition("/")[0]
        while above and above not in seen:
            if modes.get(above, FOLDER) != FOLDER:
                raise SystemExit(f"{_shown(above)} is no folder, and {_shown(path)} is to lie in it")
            seen.add(above)
            above = above.rpartition("/")[0]


def _shown(path: str) -> str:
    return f"{path!a:.200}"


def _known(store: Path, name: str) -> list[Row] | None:
    try:
        return _parsed((store / ".manifests" / name).read_bytes(), name)
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
            target = os.fsencode((tree / path).readlink())
            return hashlib.sha256(target).hexdigest() == sha256 and stays(path, os.fsdecode(target))
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

    def copy(self, entry: Row, destination: Path) -> bool:
        """Put the verified content at `destination`; an older tree may have been written to, so it is hashed again."""
        path, size, _, mode, sha256 = entry
        for place in (self.incoming / str(sha256), *self.places.get(str(sha256), ())):
            with contextlib.suppress(OSError):
                destination.unlink(missing_ok=True)
                if mode != LINK:
                    if _copied(place, destination, size) == sha256:
                        return True
                    continue
                with _opened(place) as file:
                    content = file.read(MOST_PATH_BYTES + 1) or b""
                if len(content) == size and hashlib.sha256(content).hexdigest() == sha256:
                    if size > MOST_PATH_BYTES or not stays(path, os.fsdecode(content)):
                        raise SystemExit(f"{_shown(path)} is a link to {_shown(os.fsdecode(content))}, which leads out")
                    destination.symlink_to(os.fsdecode(content))
                    return True
        return False


def _opened(place: Path) -> BinaryIO:
    """Open what holds a content: a file, or a link in an older tree, whose text it is. Waits for no pipe's writer."""
    if place.is_symlink():
        return io.BytesIO(os.fsencode(place.readlink()))
    return os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)


def _copied(place: Path, destination: Path, size: int) -> str | None:
    """Return the hash of what is at `destination` now, which was not there; None where it is not of that size."""
    digest = hashlib.sha256()
    with _opened(place) as file, destination.open("xb", buffering=0) as out:
        while chunk := file.read(min(size + 1, CHUNK_BYTES)):
            digest.update(chunk)
            size -= len(chunk)
            if size < 0:
                return None
            _write_all(out, chunk)
    return None if size else digest.hexdigest()


def _assemble(store: Path, tree: Path, entries: list[Row], sources: _Sources) -> list[str]:
    building = store / f".building-{os.getpid()}"
    building.mkdir()
    folders: set[str] = set()
    missing = [sha256 for entry in entries if (sha256 := _make(building, entry, sources, folders))]
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


def _make(building: Path, entry: Row, sources: _Sources, folders: set[str]) -> str | None:
    """Return None, or the content that is not to be had. `folders`: those that are made."""
    path, _, mtime_ns, mode, sha256 = entry
    place = building / path
    if sha256 is None:
        _make_folder(building, path, folders)
        return None
    _make_folder(building, path.rpartition("/")[0], folders)
    if not sources.copy(entry, place):
        return sha256
    if mode != LINK:
        place.chmod(mode & 0o777)
        os.utime(place, ns=(mtime_ns, mtime_ns))
    return None


def _make_folder(building: Path, path: str, folders: set[str]) -> None:
    if not path or path in folders:
        return
    _make_folder(building, path.rpartition("/")[0], folders)
    with contextlib.suppress(FileExistsError):
        (building / path).mkdir()
    # A disk may take two names for one: what is there by another name may be a link.
    if not stat.S_ISDIR((building / path).lstat().st_mode):
        raise SystemExit(f"{_shown(path)} is no folder on this disk")
    folders.add(path)


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
    in_use = _of_the_attempt(store)
    for old in (tree for tree in _newest_trees(store)[KEPT_TREES:] if tree.name not in in_use):
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


def _of_the_attempt(store: Path) -> str:
    """What the agent beside the trees was told last: it names the tree whose ranks run, and whose outputs are there."""
    try:
        return (store.parent / "agent" / "desired.json").read_text()
    except OSError:
        return ""


def _newest_trees(store: Path) -> list[Path]:
    trees = [tree for tree in store.iterdir() if not tree.name.startswith(".") and tree.is_dir()]
    return sorted(trees, key=lambda tree: tree.stat().st_mtime_ns, reverse=True)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
