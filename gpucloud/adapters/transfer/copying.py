"""Copies files between this machine and a node: in pieces, proven by their SHA-256, going on where it was cut off.

Pieces of many files are one stream through a program on the node, and not SFTP, which waits for an answer a file: with
50 ms a round trip, eight channels of SFTP took 10 s for 200 small files (back: 23 s), and this 3.7 s for 2,000, either
way. One large file goes to a node as fast by either, and came back a fifth faster by SFTP, which has no hashes and
which a server's configuration may leave out. The same program takes code (`sync`), results and staged data.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from gpucloud.adapters.hosts.onhost import WRITES_FOR
from gpucloud.adapters.transfer import node_program, node_trees
from gpucloud.adapters.transfer.localfiles import Sent, sha256_of
from gpucloud.domain import codec
from gpucloud.domain.errors import LandingRefused, RemoteCommandFailed, UsageError
from gpucloud.domain.job.code import fits_pattern, is_pattern
from gpucloud.domain.untrusted import Arriving, Tree, shown
from gpucloud.ports import Host
from gpucloud.store.landing import Landing
from gpucloud.system.processes import last_line
from gpucloud.system.wholefile import HASHED_BYTES, content_name

T = TypeVar("T")
_Stat = tuple[int | None, bool, int | None]  # the size of a file, whether it is a folder, the size of its part

CODE = "@code"
"""The folder on a node that the job's script runs in."""

BATCH_BYTES = 16 << 20
"""What one request moves: one that is killed has moved all before it for good."""

_PIECE_BYTES = 16 << 20
_BATCH_FILES = 500
_LIMIT_S = 600.0  # of one request: a node that went silent ends the call long before
_HASHED_BYTES_PER_CALL = 4 << 30
_HASHED_BYTES_PER_S = 20e6
"""At the least, on a disk that others use too; one large file is hashed whole where it is sent."""
_ROUNDS = 3
_WRITING = ("write", "finish", "tree")
_WHY = 500  # characters of what a node says of its failure

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A file on a node: `inner` is its path below what was asked for, `top`; empty when it is that itself.

    `top` is as it was written, or fits the pattern that was; it is never the node's own word.
    """

    path: str
    top: str
    inner: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLink:
    """A link on a node, and what it says."""

    top: str
    inner: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFolder:
    """A folder on a node; `inner` is empty for one that was asked for."""

    top: str
    inner: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What paths on a node name; `missing` holds each that names nothing, with the nearest name that is there.

    `outside` are links to folders elsewhere, and what is neither file nor folder, each after the path by which it was
    asked for; they are not copied.
    """

    base: str
    files: tuple[Remote, ...]
    links: tuple[RemoteLink, ...]
    folders: tuple[RemoteFolder, ...]
    missing: tuple[tuple[str, str | None], ...]
    outside: tuple[tuple[str, str], ...]

    @property
    def asked_folders(self) -> tuple[str, ...]:
        """What was asked for and is a folder."""
        return tuple(folder.top for folder in self.folders if not folder.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The node's answer: rows begin with the place in `found` of what they lie below, its own in what was asked for."""

    base: str
    found: tuple[tuple[int, str], ...]
    files: tuple[tuple[int, str, int, int, int], ...]
    links: tuple[tuple[int, str, str], ...]
    folders: tuple[tuple[int, str, int], ...]
    outside: tuple[tuple[int, str], ...]
    missing: tuple[tuple[str, str | None], ...]


def program_text() -> str:
    """Return the program of nodes: its two chapters as one text, less what they import from each other."""
    chapters = "".join(inspect.getsource(chapter) for chapter in (node_trees, node_program))
    return "from __future__ import annotations\n" + re.sub(r"(?m)^from (gpucloud|__future__)\b.*\n", "", chapters)


@functools.cache
def packed_program() -> bytes:
    """Return what a request begins with: as a word it were longer than the 8 kB that Debian's csh takes."""
    return zlib.compress(program_text().encode(), 9)


def program_argv(python: str) -> tuple[str, ...]:
    """Return how what `request` makes is run: nothing in the node's home shadows a module (-I), no site is needed."""
    unpack = f"import sys, zlib; exec(zlib.decompress(sys.stdin.buffer.read({len(packed_program())})))"
    return (python, "-I", "-S", "-c", unpack)


def request(base: str, root: str, op: str, **arguments: Any) -> bytes:
    """Return the program, and the line that asks it for an operation; bytes may follow."""
    return packed_program() + json.dumps({"op": op, "base": base, "root": root, **arguments}).encode() + b"\n"


class NodeProgram:
    """The program of nodes as one node runs it; paths are relative to `base`. Raises RemoteCommandFailed for both."""

    def __init__(self, host: Host, base: str, *, python: str = "python3") -> None:
        self._host = host
        self._base = base
        self._argv = program_argv(python)

    def run(self, op: str, data: bytes = b"", *, hashed: int = 0, **arguments: Any) -> bytes:
        """Return what it answers, as it is; `hashed` bytes are to be read there for that."""
        head = request(self._base, self._host.node.root, op, **arguments)
        limit_s = _LIMIT_S + hashed / _HASHED_BYTES_PER_S
        named = (WRITES_FOR, self._host.node.root) if op in _WRITING else ()  # who frees a host ends it by that
        done = self._host.run((*self._argv, *named), stdin=head + data, timeout_s=limit_s)
        if done.exit_code != 0:
            why = last_line(done.stderr)
            hint = "the same command again goes on; the node needs python3 (3.10 or newer), and room where it writes"
            if why == node_program.NO_CODE:
                hint = "gpucloud status says which machines the job has: nothing of it ran on this one"
            said = why[:_WHY] or f"exit code {done.exit_code}"
            raise RemoteCommandFailed(f"{self._host.node.id}: {said}", hint=hint)
        return done.stdout

    def ask(self, kind: type[T], op: str, data: bytes = b"", *, hashed: int = 0, **arguments: Any) -> T:
        """Return its answer as a value of that kind; as `run` otherwise."""
        try:
            return codec.from_json(kind, self.run(op, data, hashed=hashed, **arguments))
        except codec.Malformed as error:
            raise self.untrue(f"this is no answer to {op}: {error}") from error

    def untrue(self, what: str) -> RemoteCommandFailed:
        """Return the error for what it cannot have answered."""
        return RemoteCommandFailed(
            f"{self._host.node.id} does not answer as gpucloud's program for copies does: {what}",
            hint="is its python3 what it should be?",
        )


class Copier:
    """Copies to and from one node; its paths are relative to `base`.

    `progress` hears bytes done and bytes in all; `heard` is called while files are hashed, there or here.
    """

    def __init__(
        self,
        host: Host,
        base: str = CODE,
        *,
        python: str = "python3",
        progress: Progress = lambda *_: None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._program = NodeProgram(host, base, python=python)
        self._progress = progress
        self._heard = heard

    def listing(self, paths: Sequence[str]) -> Listing:
        """Return what these paths and patterns name on the node. LandingRefused for what none of them does."""
        said = self._program.ask(_Listed, "list", paths=list(paths))
        try:
            found = [(name, _top(paths[asked], name)) for asked, name in said.found]
            named, near = {paths[asked] for asked, _ in said.found}, dict(said.missing)
            return Listing(
                base=said.base,
                files=tuple(
                    Remote(path=_joined(found[at][0], inner), top=found[at][1], inner=inner, size=s, mode=m, mtime_ns=t)
                    for at, inner, s, m, t in said.files
                ),
                links=tuple(RemoteLink(top=found[at][1], inner=i, target=target) for at, i, target in said.links),
                folders=tuple(RemoteFolder(top=found[at][1], inner=inner, mode=m) for at, inner, m in said.folders),
                missing=tuple((path, near.get(path)) for path in paths if path not in named),
                outside=tuple((paths[said.found[at][0]], _joined(found[at][1], inner)) for at, inner in said.outside),
            )
        except IndexError:
            raise self._program.untrue("a listing of what was not asked for") from None

    def is_folder(self, path: str) -> bool:
        """Whether the node has a folder there."""
        return self._stats([(path, "")])[0][1]

    def fetch(
        self,
        found: Listing,
        root: Path,
        place_of: Callable[[str], str],
        aside: str | None = None,
        adapted: Callable[[Landing], None] | None = None,
    ) -> tuple[int, tuple[Path, ...], tuple[str, ...]]:
        """Make what lies below `root` equal to what was found.

        Returns the bytes that moved, what was set aside, and the node's paths of what was deleted there meanwhile.
        `place_of` says where each `top` goes: a path below `root`, empty for it. Nothing is changed before all is here
        and whole. With `aside`, what lies there and differs is kept, by that ending of its name. With
        `adapted`, which hears of the landing then, what this disk alone cannot have keeps nothing else back.
        LandingRefused for what would leave `root`, StoreError for what is in its way, RemoteCommandFailed for what does
        not hold still.
        """
        files, tree = _placed(found, place_of)
        if not (found.files or found.links or found.folders):
            return 0, (), ()
        with Landing(root, resumes=True, aside=aside, adapts=adapted is not None, heard=self._heard) as landing:
            landing.expect(tree)
            moved, gone = self._fetch_rounds(landing, files)
            landing.settle()
        if adapted is not None:
            adapted(landing)
        return moved, tuple(landing.set_aside), gone

    def send(self, files: Sequence[Sent], links: Sequence[tuple[str, str]] = ()) -> int:
        """Make each remote path equal to its local file; return the bytes that moved. UsageError if one changes."""
        moved = 0
        for _ in range(_ROUNDS):
            lacking, parts = self._lacking(files)
            total = sum(file.size for file, _ in lacking)
            pieces = [piece for file, name in lacking for piece in _pieces(file, parts.get(file.path, 0), name)]
            there = total - sum(length for *_, length in pieces)
            for batch in batches(pieces, lambda piece: piece[3]):
                requested = [[file.path, name[:16], offset, length] for file, name, offset, length in batch]
                self._program.run("write", b"".join(_local_bytes(*piece) for piece in batch), pieces=requested)
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
        stats: list[_Stat] = []
        for batch in batches(named, lambda _: 0):
            stats += self._stats([(file.path, name[:16]) for file, name in batch])
        same = [file for (file, _), status in zip(named, stats, strict=True) if status[0] == file.size]
        whole = self._hashes([(f.path, 0, None, f.size) for f in same])
        hashes = dict(zip((f.path for f in same), whole, strict=True))
        lacking = [(file, name) for file, name in named if hashes.get(file.path) != name]
        return lacking, {file.path: max(status[2] or 0, 0) for (file, _), status in zip(named, stats, strict=True)}

    def _finish(self, files: Sequence[tuple[Sent, str]], links: Sequence[tuple[str, str]]) -> list[str]:
        wrong: list[str] = []
        rows: list[list[Any]] = [[f.path, name[:16], f.size, name, f.mode, f.mtime_ns] for f, name in files]
        for batch in batches(rows, lambda row: row[2] // (_HASHED_BYTES_PER_CALL // BATCH_BYTES)):
            hashed = sum(row[2] for row in batch)
            wrong += self._program.ask(tuple[str, ...], "finish", hashed=hashed, files=batch, links=[])
        if links:
            self._program.run("finish", files=[], links=list(links))
        return wrong

    def _fetch_rounds(self, landing: Landing, files: dict[str, Remote]) -> tuple[int, tuple[str, ...]]:
        moved, gone = 0, list[str]()
        for _ in range(_ROUNDS):
            files, brought = self._fetch_once(landing, files)
            moved += brought
            paths = [file.path for file in files.values()]
            listed = {file.path: file for file in self.listing(paths).files} if paths else {}
            gone += (path for path in paths if path not in listed)
            files = {name: listed[file.path] for name, file in files.items() if file.path in listed}
            if not files:
                return moved, tuple(gone)
            landing.require_room(tuple(_arriving(name, file) for name, file in files.items()))
        path = next(iter(files.values())).path
        why = f"{self._host.node.id}: {path} changes while it is copied"
        raise RemoteCommandFailed(
            why, hint="the same command again; what a script goes on writing comes home by `outputs:`"
        )

    def _fetch_once(self, landing: Landing, files: dict[str, Remote]) -> tuple[dict[str, Remote], int]:
        """Return those that did not arrive as they were hashed, and the bytes that moved."""
        named = zip(files.items(), self._contents(list(files.values())), strict=True)
        found = [(_arriving(name, file), file, content) for (name, file), content in named]
        wanted = [one for one in found if not landing.has(one[0], one[2])]
        pieces: list[Any] = []
        for arriving, file, content in wanted:
            with landing.part(arriving, content) as part:
                pieces += _pieces(file, part.length(), (arriving, content))
        total = sum(file.size for _, file, _ in wanted)
        there, moved = total - sum(length for *_, length in pieces), 0
        for batch in batches(pieces, lambda piece: piece[3]):
            if moved:
                self._progress(there + moved, total)
            moved += self._fetch_batch(landing, batch)
        wrong = [one for one in wanted if not landing.prove(one[0], one[2])]
        if wanted:
            self._progress(total, total)  # the last word before anything is moved to its place
        return {arriving.name: file for arriving, file, _ in wrong}, moved

    def _fetch_batch(self, landing: Landing, batch: list[Any]) -> int:
        """Bring pieces of files, less those that are gone by now; what lacks one is listed again."""
        size: int = sum(length for *_, length in batch)
        try:
            data = self._program.run("read", pieces=[[f.path, offset, length] for f, _, offset, length in batch])
        except RemoteCommandFailed:
            sizes = self._stats([(file.path, "") for file, *_ in batch])
            there = [piece for piece, (length, *_) in zip(batch, sizes, strict=True) if length is not None]
            if len(there) == len(batch):
                raise
            return self._fetch_batch(landing, there) if there else 0
        if len(data) != size:
            raise self._program.untrue(f"{len(data)} bytes where {size} were asked for")
        at = 0
        for _, (arriving, content), offset, length in batch:
            with landing.part(arriving, content) as part:
                part.write(offset, memoryview(data)[at : at + length])
            at += length
        return size

    def _contents(self, files: Sequence[Remote]) -> list[str]:
        """Return the name of each one's content there (`content_of`), empty for what is no file any more."""
        starts = [range(0, max(file.size, 1), HASHED_BYTES) for file in files]
        pieces = [
            # The last one is to its end: what grows meanwhile is not what was listed.
            (file.path, at, HASHED_BYTES if at != there[-1] else None, min(HASHED_BYTES, file.size - at))
            for file, there in zip(files, starts, strict=True)
            for at in there
        ]
        hashes = iter(self._hashes(pieces))
        found = [list(islice(hashes, len(there))) for there in starts]
        return ["" if None in said else content_name([sha256 or "" for sha256 in said]) for said in found]

    def _hashes(self, pieces: Sequence[tuple[str, int, int | None, int]]) -> list[str | None]:
        """Return the SHA-256 of each path, offset and length; with how many bytes these are about."""
        found: list[str | None] = []
        for batch in batches(pieces, lambda piece: piece[3] // (_HASHED_BYTES_PER_CALL // BATCH_BYTES)):
            hashed, asked = sum(piece[3] for piece in batch), [piece[:3] for piece in batch]
            said = self._program.ask(tuple[str | None, ...], "hash", hashed=hashed, pieces=asked)
            if len(said) != len(batch):
                raise self._program.untrue(f"{len(said)} hashes of {len(batch)} pieces")
            found += said
            self._heard()
        return found

    def _stats(self, files: list[tuple[str, str]]) -> tuple[_Stat, ...]:
        said = self._program.ask(tuple[_Stat, ...], "stat", files=files)
        if len(said) != len(files):
            raise self._program.untrue(f"{len(said)} answers on {len(files)} files")
        return said


def _pieces(file: Any, there: int, other: Any) -> Iterator[tuple[Any, Any, int, int]]:
    for offset in range(min(there, file.size), file.size, _PIECE_BYTES):
        yield file, other, offset, min(_PIECE_BYTES, file.size - offset)


def batches(items: Iterable[T], size_of: Callable[[T], int], *, most: int = _BATCH_FILES) -> Iterator[list[T]]:
    """Yield them in order, as many together as one request takes; `size_of` in bytes."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and (size + size_of(item) > BATCH_BYTES or len(batch) >= most):
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


def _top(written: str, named: str) -> str:
    """Return what was asked for, as it was written, or as it fits the pattern that was."""
    asked = written.rstrip("/") or "/"
    if named == asked or (asked.startswith("~") and not is_pattern(asked)):
        return asked  # what `~` is, the node alone knows
    if not fits_pattern(asked, named):
        raise LandingRefused(f"the node names {shown(named)}, and {shown(written)} was asked for")
    return named


def _joined(path: str, inner: str) -> str:
    return f"{path.rstrip('/')}/{inner}" if path and inner else path or inner


def _placed(found: Listing, place_of: Callable[[str], str]) -> tuple[dict[str, Remote], Tree]:
    """Return files by where they arrive, and everything that does; what two patterns name arrives once."""
    named = {place_of(top) for top in found.asked_folders}
    links = {_joined(place_of(link.top), link.inner): link.target for link in found.links}
    links = {name: target for name, target in links.items() if name not in named}
    files: dict[str, Remote] = {}
    twice: list[Arriving] = []
    for file in found.files:
        name = _joined(place_of(file.top), file.inner)
        if files.setdefault(name, file).path != file.path:
            twice.append(_arriving(name, file))
    # A link that is named itself is listed as what it leads to, and as a link below a folder that is named too.
    files = {name: file for name, file in files.items() if name not in links or file.inner}
    folders = {_joined(place_of(folder.top), folder.inner): folder.mode for folder in found.folders}
    tree = Tree(
        files=(*(_arriving(name, file) for name, file in files.items()), *twice),
        links=tuple(links.items()),
        folders=tuple((name, mode) for name, mode in folders.items() if name),
    )
    return files, tree


def _arriving(name: str, file: Remote) -> Arriving:
    return Arriving(name=name, size=file.size, mode=file.mode, mtime_ns=file.mtime_ns)
