"""The node's end of everything that is moved: a program sent as text and run by the node's own python3 (3.10 or newer).

    python3 -I -S -c THIS (packed) < REQUEST

REQUEST is one line of JSON, an object with `op` and its arguments, then bytes where the operation takes some; the
answer is one line of JSON, then bytes where it gives some. Paths are relative to `base`, and `~` and absolute ones stay
what they are; the base `@code` is the folder that the job's script runs in, below the agent's folder `root`.

    list    paths (globs too)                  what each names: files, links that stay inside and folders below it, by
                                               their paths below it; what is not there
    hash    pieces [path, offset, length]      the SHA-256 of each (no length: to its end), null for no file
    read    pieces [path, offset, length]      their bytes, one after the other
    stat    files [path, id]                   size of the file, whether it is a folder, size of the part
    write   pieces [path, id, offset, length]  bytes into `.NAME.ID.part`
    finish  files [path, id, size, sha256, mode, mtime_ns], links [path, target]
                                               proven parts become files; the answer names the wrong ones
    tree    name, most_bytes                   the tree of code of that name below `base` (`node_trees`, sent with this)

`cp` and results use the first six, staged data those that send, code the last: a tree is to appear whole or not at all,
and of contents that most nodes have already. The line with `op` is always written by us; what others signed is at most
what follows it. Killed anywhere, it leaves nothing that a later run takes for whole. Standard library only.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gpucloud.adapters.transfer.node_trees import CHUNK_BYTES, CUT_OFF, chunks_of, stays, tree

NO_CODE = "there is no code folder on this node"
_LONG_NAME = 200  # bytes: a file system takes 255 with what a part adds
_SETUPS = ".gpucloud-setup"  # what the agent notes in a tree of code: `SETUPS` of the domain, which is not sent
PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.DOTALL)


def main(given: BinaryIO, out: BinaryIO) -> None:
    """Answer one request."""
    request = json.loads(given.readline())
    base = _base(request["base"], request["root"])
    match request["op"]:
        case "list":
            _say(out, _listed(base, request["paths"]))
        case "hash":
            _say(out, [_sha256(base / path, *place) for path, *place in request["pieces"]])
        case "read":
            _read(base, request["pieces"], out)
        case "stat":
            _say(out, [_stat(base / path, name) for path, name in request["files"]])
        case "write":
            _write(base, request["pieces"], given)
            _say(out, [])
        case "finish":
            _say(out, _finish(base, request["files"], request["links"]))
        case "tree":
            _say(out, tree(base, request["name"], given, request["most_bytes"]))
        case other:
            raise SystemExit(f"{other!a:.80} is no operation")


def _base(base: str, root: str) -> Path:
    if base != "@code":
        return Path(base).expanduser()
    agent = Path.home() / root
    try:
        launch = json.loads((agent / "agent" / "desired.json").read_text()).get("launch")
    except (OSError, ValueError, AttributeError):
        launch = None
    if launch and Path(launch["directory"]).is_dir():
        return Path(launch["directory"])
    trees = [tree for tree in (agent / "code").glob("[0-9a-f]*") if tree.is_dir()]
    if not trees:
        raise SystemExit(NO_CODE)
    return max(trees, key=lambda tree: tree.stat().st_mtime_ns)


def _listed(base: Path, paths: list[str]) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {kind: [] for kind in ("found", "files", "links", "folders", "outside", "missing")}
    for asked, written in enumerate(paths):
        path = _tidy(written)
        found = [path] if os.path.lexists(base / path) else _matching(base, path)
        if not found:
            rows["missing"].append([written, _nearest(base, path)])
        for name in found:
            number = len(rows["found"])
            rows["found"].append([asked, name])
            for kind, *about in _walk(base / name, "", os.path.realpath(base / name)):
                rows[kind].append([number, *about])
    return {"base": str(base), **rows}


def _tidy(written: str) -> str:
    return os.path.expanduser(written).rstrip("/") or "/"  # noqa: PTH111  a text that may be a pattern


def _matching(base: Path, pattern: str) -> list[str]:
    found = glob.glob(pattern, root_dir=base, recursive=True)  # noqa: PTH207  absolute ones too
    return sorted(path for path in found if Path(path).name != _SETUPS)


def _walk(start: Path, inner: str, top: str) -> Iterator[tuple[Any, ...]]:
    """Yield what is below a name, itself included. Links that stay below it stay links; one that leads out to a file is
    that file.
    """
    path = start / inner if inner else start
    if inner and path.is_symlink():
        real = os.path.realpath(path)
        if real == top or real.startswith(f"{top}/"):
            yield "links", inner, _link(path, inner, real)
            return
        if not Path(real).is_file():
            yield "outside", inner
            return
    try:
        status = path.stat()
    except OSError:
        yield "outside", inner
        return
    if stat.S_ISDIR(status.st_mode):
        yield "folders", inner, status.st_mode & 0o777
        for item in sorted(os.listdir(path)):
            if item != _SETUPS and not PART.fullmatch(item):
                yield from _walk(start, f"{inner}/{item}" if inner else item, top)
    elif stat.S_ISREG(status.st_mode):
        yield "files", inner, status.st_size, status.st_mode & 0o777, status.st_mtime_ns
    else:
        yield "outside", inner


def _link(path: Path, inner: str, real: str) -> str:
    """Return the link's text if that says by itself that it stays inside; else the shortest that does."""
    text = os.readlink(path)  # noqa: PTH115  a Path would tidy it
    return text if stays(inner, text) else os.path.relpath(real, os.path.realpath(path.parent))


def _nearest(base: Path, path: str) -> str | None:
    parts = path.strip("/").split("/")
    folder = Path("/") if path.startswith("/") else base
    for depth, part in enumerate(parts):
        if (folder / part).is_dir() and depth < len(parts) - 1:
            folder = folder / part
            continue
        names = os.listdir(folder) if folder.is_dir() else []
        near = difflib.get_close_matches(part, names, n=1)
        start = "/" if path.startswith("/") else ""
        return start + "/".join((*parts[:depth], near[0])) if near else None
    return None


def _sha256(path: Path, offset: int = 0, length: int | None = None) -> str | None:
    digest, left = hashlib.sha256(), sys.maxsize if length is None else length
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while chunk := file.read(min(CHUNK_BYTES, left)):
                digest.update(chunk)
                left -= len(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _read(base: Path, pieces: list[tuple[str, int, int]], out: BinaryIO) -> None:
    for path, offset, length in pieces:
        with (base / path).open("rb", buffering=0) as file:
            file.seek(offset)
            for chunk in chunks_of(file, length, f"{path} became shorter while it was read"):
                out.write(chunk)


def _stat(path: Path, name: str) -> list[Any]:
    path = path.expanduser()
    return [_size(path), path.is_dir(), _size(_part(path, name))]


def _size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _write(base: Path, pieces: list[tuple[str, str, int, int]], given: BinaryIO) -> None:
    for path, name, offset, length in pieces:
        part = _part((base / path).expanduser(), name)
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(offset)
            for chunk in chunks_of(given, length, CUT_OFF):
                file.write(chunk)


def _finish(base: Path, files: list[list[Any]], links: list[list[str]]) -> list[str]:
    wrong = []
    for path, name, size, sha256, mode, mtime_ns in files:
        place = (base / path).expanduser()
        part = _part(place, name)
        if not size:
            place.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
        if _sha256(part) != sha256:
            part.unlink(missing_ok=True)
            wrong.append(path)
            continue
        part.chmod(mode)
        os.utime(part, ns=(mtime_ns, mtime_ns))
        part.replace(place)
    for path, target in links:
        place = (base / path).expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
    return wrong


def _part(path: Path, name: str) -> Path:
    whole = os.fsencode(path.name)
    known = path.name if len(whole) <= _LONG_NAME else hashlib.sha256(whole).hexdigest()[:32]
    return path.with_name(f".{known}.{name}.part")


def _say(out: BinaryIO, answer: object) -> None:
    out.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    try:
        main(sys.stdin.buffer, sys.stdout.buffer)
    except OSError as error:
        raise SystemExit(": ".join(str(part) for part in (error.filename, error.strerror) if part)) from error
