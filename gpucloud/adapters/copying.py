"""Copies files between this machine and a node: in pieces, proven by their SHA-256, going on where it was cut off."""

from __future__ import annotations

import inspect
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.adapters import carrier
from gpucloud.adapters.localfiles import Sent, sha256_of
from gpucloud.domain.errors import RemoteCommandFailed, StoreError, UsageError
from gpucloud.ports import Host

CODE = "@code"
"""The folder on a node that the job's script runs in."""

_PIECE_BYTES = 16 << 20
_BATCH_BYTES = 16 << 20
_BATCH_FILES = 500
_LIMIT_S = 600.0  # of one request: a node that went silent ends the call long before
_HASHED_BYTES_PER_CALL = 50 << 30
_ROUNDS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A file on a node."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What paths on a node name; `missing` holds each that names nothing, with the nearest name that is there.

    `outside` are links to folders elsewhere, and what is neither file nor folder; they are not copied.
    """

    base: str
    files: tuple[Remote, ...]
    links: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]
    missing: tuple[tuple[str, str | None], ...]
    outside: tuple[str, ...]


class Copier:
    """Copies to and from one node; its paths are relative to `base`. `progress` hears bytes done and bytes in all."""

    def __init__(
        self, host: Host, base: str = CODE, *, python: str = "python3", progress: Progress | None = None
    ) -> None:
        self._host = host
        self._base = base
        self._progress = progress or _say_nothing
        # -I: the node's home folder must not be able to shadow a module. -S: nothing of site is needed.
        self._argv = (python, "-I", "-S", "-c", inspect.getsource(carrier))

    def listing(self, paths: Sequence[str]) -> Listing:
        """Return what these paths and patterns name on the node."""
        answer = self._ask({"op": "list", "paths": list(paths)})
        return Listing(
            base=answer["base"],
            files=tuple(Remote(path=p, size=s, mode=m, mtime_ns=t) for p, s, m, t in answer["files"]),
            links=tuple((path, target) for path, target in answer["links"]),
            folders=tuple(answer["folders"]),
            missing=tuple((path, near) for path, near in answer["missing"]),
            outside=tuple(path for (path,) in answer["outside"]),
        )

    def is_folder(self, path: str) -> bool:
        """Whether the node has a folder there."""
        return bool(self._ask({"op": "stat", "files": [[path, ""]]})[0][1])

    def fetch(self, files: Sequence[tuple[Remote, Path]], links: Iterable[tuple[Path, str]] = ()) -> int:
        """Make each local path equal to its remote file; return the bytes that moved.

        StoreError for a full disk here, RemoteCommandFailed for a file that never holds still.
        """
        try:
            moved = self._fetch_rounds(list(files))
            for path, target in links:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.symlink_to(target)
        except OSError as error:
            raise StoreError(
                f"{error.filename}: {error.strerror}", hint="free some space, or name another folder"
            ) from error
        return moved

    def send(self, files: Sequence[Sent], links: Sequence[tuple[str, str]] = ()) -> int:
        """Make each remote path equal to its local file; return the bytes that moved. UsageError if one changes."""
        moved = 0
        for _ in range(_ROUNDS):
            lacking, parts = self._lacking(files)
            total = sum(file.size for file, _ in lacking)
            pieces = [piece for file, name in lacking for piece in _pieces(file, parts.get(file.path, 0), name)]
            there = total - sum(length for *_, length in pieces)
            for batch in _batches(pieces, lambda piece: piece[3]):
                requested = [[file.path, name[:16], offset, length] for file, name, offset, length in batch]
                self._ask({"op": "write", "pieces": requested}, b"".join(_local_bytes(*piece) for piece in batch))
                moved += sum(length for *_, length in batch)
                self._progress(there + moved, total)
            wrong = set(self._finish(lacking, links))
            if not wrong:
                return moved
            files = [file for file, _ in lacking if file.path in wrong]
        raise UsageError(f"{files[0].local} changes while it is sent", hint="copy it when nothing writes to it")

    def _lacking(self, files: Sequence[Sent]) -> tuple[list[tuple[Sent, str]], dict[str, int]]:
        """Return files that the node has not, each with its hash, and how much it has of their parts."""
        named = [(file, file.sha256 or sha256_of(file.local)) for file in files]
        stats: list[Any] = []
        for batch in _batches(named, lambda _: 0):
            stats += self._ask({"op": "stat", "files": [[file.path, name[:16]] for file, name in batch]})
        same = [file for (file, _), status in zip(named, stats, strict=True) if status[0] == file.size]
        hashes = dict(zip((f.path for f in same), self._hashes([(f.path, f.size) for f in same]), strict=True))
        lacking = [(file, name) for file, name in named if hashes.get(file.path) != name]
        return lacking, {file.path: status[2] or 0 for (file, _), status in zip(named, stats, strict=True)}

    def _finish(self, files: Sequence[tuple[Sent, str]], links: Sequence[tuple[str, str]]) -> list[str]:
        wrong: list[str] = []
        rows = [[f.path, name[:16], f.size, name, f.mode, f.mtime_ns] for f, name in files]
        for batch in _batches(rows, lambda row: row[2] // (_HASHED_BYTES_PER_CALL // _BATCH_BYTES)):
            wrong += self._ask({"op": "finish", "files": batch, "links": []})
        if links:
            self._ask({"op": "finish", "files": [], "links": list(links)})
        return wrong

    def _fetch_rounds(self, files: list[tuple[Remote, Path]]) -> int:
        moved = 0
        for _ in range(_ROUNDS):
            files, brought = self._fetch_once(files)
            moved += brought
            if not files:
                return moved
            listed = {file.path: file for file in self.listing([file.path for file, _ in files]).files}
            files = [(listed[file.path], place) for file, place in files if file.path in listed]
            if not files:
                return moved
        raise RemoteCommandFailed(
            f"{self._host.node.id}: {files[0][0].path} changes while it is copied",
            hint="copy it when the job has ended",
        )

    def _fetch_once(self, files: list[tuple[Remote, Path]]) -> tuple[list[tuple[Remote, Path]], int]:
        """Return those that did not arrive as they were hashed, and the bytes that moved."""
        hashes = self._hashes([(file.path, file.size) for file, _ in files])
        wanted = [
            (f, place, sha or "") for (f, place), sha in zip(files, hashes, strict=True) if not _is(place, f, sha)
        ]
        parts = {place: _part(place, sha256) for _, place, sha256 in wanted}
        pieces = [piece for file, place, _ in wanted for piece in _pieces(file, _length(parts[place]), place)]
        total = sum(file.size for file, _, _ in wanted)
        there, moved = total - sum(length for *_, length in pieces), 0
        for batch in _batches(pieces, lambda piece: piece[3]):
            data = self._run(
                {"op": "read", "pieces": [[f.path, offset, length] for f, _, offset, length in batch]}, b""
            )
            at = 0
            for _, place, offset, length in batch:
                _write(parts[place], offset, data[at : at + length])
                at += length
            moved += at
            self._progress(there + moved, total)
        return [(f, place) for f, place, sha256 in wanted if not _keep(parts[place], place, f, sha256)], moved

    def _hashes(self, files: Sequence[tuple[str, int]]) -> list[str | None]:
        found: list[str | None] = []
        for batch in _batches(files, lambda file: file[1] // (_HASHED_BYTES_PER_CALL // _BATCH_BYTES)):
            found += self._ask({"op": "hash", "paths": [path for path, _ in batch]})
        return found

    def _ask(self, request: dict[str, Any], data: bytes = b"") -> Any:
        return json.loads(self._run(request, data))

    def _run(self, request: dict[str, Any], data: bytes) -> bytes:
        head = json.dumps({**request, "base": self._base, "root": self._host.node.root}).encode() + b"\n"
        done = self._host.run(self._argv, stdin=head + data, timeout_s=_LIMIT_S)
        if done.exit_code != 0:
            why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RemoteCommandFailed(f"{self._host.node.id}: {why or done.exit_code}", hint="the same command again")
        return done.stdout


def _say_nothing(_done: int, _total: int) -> None:
    pass


def _pieces(file: Any, there: int, other: Any) -> Iterator[tuple[Any, Any, int, int]]:
    for offset in range(min(there, file.size), file.size, _PIECE_BYTES):
        yield file, other, offset, min(_PIECE_BYTES, file.size - offset)


def _batches(items: Iterable[Any], size_of: Callable[[Any], int]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for item in items:
        if batch and (size + size_of(item) > _BATCH_BYTES or len(batch) >= _BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def _local_bytes(file: Sent, _name: str, offset: int, length: int) -> bytes:
    with file.local.open("rb", buffering=0) as opened:
        opened.seek(offset)
        data = opened.read(length)
    return data.ljust(length, b"\0")  # a file that shrank is found by its hash


def _part(place: Path, sha256: str) -> Path:
    return place.with_name(f".{place.name[:200]}.{sha256[:16]}.part")


def _length(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _write(part: Path, offset: int, data: bytes) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)


def _keep(part: Path, place: Path, file: Remote, sha256: str) -> bool:
    """Make a proven part the file; whether it was proven."""
    part.parent.mkdir(parents=True, exist_ok=True)
    if not file.size:
        part.touch()
    if not part.is_file() or sha256_of(part) != sha256:
        part.unlink(missing_ok=True)
        return False
    part.chmod(file.mode | stat.S_IRUSR | stat.S_IWUSR)
    os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    part.replace(place)
    return True


def _is(place: Path, file: Remote, sha256: str | None) -> bool:
    return place.is_file() and place.stat().st_size == file.size and sha256_of(place) == sha256
