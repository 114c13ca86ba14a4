"""One checkpoint into a folder that scripts resume from, or as one plain safetensors file; each byte verified."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.checkpoint.chunks import Chunk, Exported, export, rank_of, stretches
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Piece,
    commit_key,
    generation_bytes,
    generation_key,
    read_base,
)
from gpucloud.domain.checkpoint.objects import LENGTH_BYTES, PART_BYTES, read_header, start_of
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.untrusted import RECORD_BYTES, Arriving, Tree
from gpucloud.store.checkpoints import under
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.filling import Filling
from gpucloud.store.filling import Part as Arrived
from gpucloud.store.landing import Landing
from gpucloud.store.parts import all_done, crc32_of, take_room
from gpucloud.usecases.checkpoint.checkpoints import Damage, Moved, Part, StoredCheckpoints, parts_of, unheard


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a pull brought: `fetched` bytes of `size`, the rest was there. `first` is what the folder resumes from."""

    commit: Commit
    size: int
    fetched: int
    first: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Puller:
    """Brings checkpoints of one job into a folder, whose checkpoints have no prefix there."""

    stored_checkpoints: StoredCheckpoints
    target: DirectoryStore

    def pull(self, manifest: Manifest, moved: Moved) -> Pulled:
        """Bring a checkpoint; what is left of an earlier pull that was ended is not fetched again.

        `moved` hears of bytes, those that were there too. UsageError when the folder has another run's checkpoints,
        StoreError when the disk is too small or the checkpoint damaged.
        """
        data, record = self._read(commit_key(manifest.commit)), self._record(manifest.commit)
        self._require_same(commit_key(manifest.commit), data)
        self._require_same(generation_key(manifest.commit.generation), record)
        here = StoredCheckpoints(store=self.target, prefix="", keep=self.stored_checkpoints.keep)
        damaged = {damage.key for damage in here.verify([piece for piece in manifest.pieces if self._has(piece)])}
        missing = [piece for piece in manifest.pieces if piece.key in damaged or not self._has(piece)]
        size = sum(piece.size for piece in manifest.pieces)
        moved(size - sum(piece.size for piece in missing))
        fetched = fill(self.stored_checkpoints, [(piece, piece.key) for piece in missing], self.target.root, moved)
        self._put(generation_key(manifest.commit.generation), record)
        self._put(commit_key(manifest.commit), data)
        first = next(one.commit for one in here.standing() if one.sound)
        return Pulled(commit=manifest.commit, size=size, fetched=fetched, first=first)

    def _has(self, piece: Piece) -> bool:
        return (self.target.root / piece.key).is_file()

    def _read(self, key: str) -> bytes:
        stored = self.stored_checkpoints.store.get(under(self.stored_checkpoints.prefix, key))
        if stored is None:
            raise StoreError(f"{key} was deleted just now: the job collects it", hint="the same command again")
        return stored.data

    def _record(self, commit: Commit) -> bytes:
        """Return the generation's record, or one like it where it is damaged or gone: a restore begins with it."""
        try:
            data = self._read(generation_key(commit.generation))
            read_base(data)
        except (ValueError, StoreError):
            return generation_bytes(base=None, owner="pulled")
        return data

    def _require_same(self, key: str, data: bytes) -> None:
        there = self.target.get(key)
        if there is not None and there.data != data:
            raise UsageError(
                f"{self.target.root} has checkpoints of another run: its {key} differs", hint="name another folder"
            )

    def _put(self, key: str, data: bytes) -> None:
        if self.target.get(key) is not None:
            return self._require_same(key, data)
        with Landing(self.target.root) as landing:
            file = Arriving(name=key, size=len(data), mode=0o600)
            landing.expect(Tree(files=(file,)))
            with landing.part(file, key) as part:
                part.write(0, data)
            landing.keep(file, key, durable=True)
            landing.settle()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacker:
    """Brings the files of a script's own directory into a folder, as the script wrote them."""

    stored_checkpoints: StoredCheckpoints
    root: Path

    def unpack(self, files: Sequence[tuple[str, Piece]], moved: Moved) -> int:
        """Return how many bytes came over; what is there already, or is left of an earlier pull, is not fetched again.

        `files` are paths below the folder, each with its object. UsageError when the folder has other files of these
        names, StoreError when the disk is too small or the checkpoint damaged.
        """
        missing = []
        for path, piece in files:
            if not self._is_there(self.root / path, piece):
                missing.append((piece, path))
        moved(sum(piece.size for _, piece in files) - sum(piece.size for piece, _ in missing))
        return fill(self.stored_checkpoints, missing, self.root, moved)

    def _is_there(self, path: Path, piece: Piece) -> bool:
        try:
            if path.stat().st_size == piece.size:
                with path.open("rb") as file:
                    crc32 = tuple(crc32_of((memoryview(data),)) for data in iter(lambda: file.read(PART_BYTES), b""))
                if crc32 == piece.crc32:
                    return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}", hint="name another folder") from error
        raise UsageError(f"{path} is there already, with other content", hint="name another folder")


def fill(stored_checkpoints: StoredCheckpoints, wanted: Sequence[tuple[Piece, str]], root: Path, moved: Moved) -> int:
    """Bring objects into files below `root` and return how many bytes came over; all appear once all are whole."""
    pieces = [piece for piece, _ in wanted]
    damages = stored_checkpoints.tails(pieces)
    if damages:
        raise _damaged(stored_checkpoints, damages[0])
    with Landing(root, resumes=True) as landing, ExitStack() as stack:
        arriving = {
            piece.key: Arriving(name=name, size=piece.size, mode=0o600, mtime_ns=piece.mtime_ns)
            for piece, name in wanted
        }
        landing.expect(Tree(files=tuple(arriving.values())))
        with landing.explained():
            files = {
                piece.key: stack.enter_context(landing.part(arriving[piece.key], _content(piece))) for piece in pieces
            }
            began = {key for key, file in files.items() if file.length()}
            _take_room(files, pieces, began)
            parts = list(parts_of(pieces))
            there = all_done(lambda part: part.piece.key in began and _is_there(files[part.piece.key], part), parts)
            left = [part for part, known in zip(parts, there, strict=True) if not known]
            moved(sum(piece.size for piece in pieces) - sum(part.length for part in left))
            damages = stored_checkpoints.read(
                left, lambda part, data: files[part.piece.key].write(part.at, data), moved
            )
        if damages:
            raise _damaged(stored_checkpoints, damages[0])
        for piece in pieces:
            landing.keep(arriving[piece.key], _content(piece), durable=True)
        landing.settle()
    return sum(part.length for part in left)


def _take_room(files: Mapping[str, Arrived], pieces: Sequence[Piece], began: set[str]) -> None:
    """Take the room of all files; where there is too little, give back what was taken, and raise OSError."""
    try:
        for piece in pieces:
            files[piece.key].cut(piece.size)
            take_room(files[piece.key].descriptor, piece.size)
    except OSError:
        for piece in pieces:
            if piece.key not in began:
                files[piece.key].cut(0)
        raise


def _content(piece: Piece) -> str:
    return f"{piece.key} {piece.size} {piece.crc32}"


def _is_there(file: Arrived, part: Part) -> bool:
    data = memoryview(bytearray(part.length))
    return file.read_into(part.at, data) and crc32_of((data,)) == part.piece.crc32[part.number]


def _damaged(stored_checkpoints: StoredCheckpoints, damage: Damage) -> StoreError:
    """Return what is said of an object that is not as it was written, or not any more: nothing is wrong then."""
    if stored_checkpoints.collected((damage.key,)):
        return _collected()
    return StoreError(f"the checkpoint is damaged: {damage}", hint="--step with an older one")


def _collected() -> StoreError:
    return StoreError(
        "the checkpoint was deleted while it was read: the job needs it no longer",
        hint="the same command again, without --step; a larger `checkpoint: {keep: …}` leaves more time",
    )


# One checkpoint as one plain safetensors file: a few parts of objects in memory at a time, however large it is.


Moves = dict[str, list[tuple[Chunk, int]]]
"""By an object's key, in the order of its bytes: the chunks that are wanted, each with the place of its tensor."""


def planned(
    stored_checkpoints: StoredCheckpoints, manifest: Manifest, *, everything: bool, about: Mapping[str, str]
) -> Exported:
    """Return the file that will be written.

    UsageError when it is no state that can be exported, or damaged, StoreError when it was deleted meanwhile.
    """
    try:
        ranks = [rank_of(piece.key) for piece in manifest.pieces]
        headers = all_done(stored_checkpoints.header, manifest.pieces)
        return export(headers, ranks, everything=everything, about=about)
    except ValueError as error:
        if stored_checkpoints.collected(piece.key for piece in manifest.pieces):
            raise _collected() from error
        raise UsageError(
            f"the checkpoint of {manifest} cannot be exported: {error}",
            hint="--pull DIR brings it as it is; --verify says what is damaged",
        ) from error


def write(
    stored_checkpoints: StoredCheckpoints, manifest: Manifest, exported: Exported, path: Path, moved: Moved = unheard
) -> int:
    """Write the file whole, or nothing, and return how many bytes were read for it.

    StoreError when the disk is full or the checkpoint damaged.
    """
    moves = _moves(manifest, exported)
    parts = [part for part in parts_of(manifest.pieces) if _needed(part, moves)]
    with closing(Filling(path, exported.size)) as file:
        file.put(0, memoryview(exported.head))

        def scatter(part: Part, data: memoryview) -> None:
            for chunk, place in _within(part, moves):
                for one in stretches(chunk, part.at, part.at + part.length):
                    at = one.source - part.at
                    file.put(place + one.target, data[at : at + one.length])

        damages = stored_checkpoints.read(parts, scatter, moved)
        if damages:
            raise _damaged(stored_checkpoints, damages[0])
        file.finish()
    return sum(part.length for part in parts)


def about_export(path: Path) -> Mapping[str, str]:
    """Return what an earlier export wrote of itself into that file, the job among it; nothing where none wrote it."""
    try:
        with path.open("rb") as file:
            start = start_of(begun := file.read(LENGTH_BYTES), size := path.stat().st_size, largest=RECORD_BYTES)
            return dict(read_header(begun + file.read(start - LENGTH_BYTES), size).metadata)
    except (OSError, ValueError):
        return {}


def bytes_to_read(manifest: Manifest, exported: Exported) -> int:
    """Return how many bytes `write` will read."""
    moves = _moves(manifest, exported)
    return sum(part.length for part in parts_of(manifest.pieces) if _needed(part, moves))


def _moves(manifest: Manifest, exported: Exported) -> Moves:
    moves: Moves = {piece.key: [] for piece in manifest.pieces}
    for chunk, place in sorted(exported.moves, key=lambda move: move[0].begin):
        moves[manifest.pieces[chunk.number].key].append((chunk, place))
    return moves


def _needed(part: Part, moves: Moves) -> bool:
    return bool(_within(part, moves))


def _within(part: Part, moves: Moves) -> list[tuple[Chunk, int]]:
    """Return the moves that take bytes of the part. Those of an object do not overlap: their ends are sorted too."""
    wanted = moves[part.piece.key]
    first = bisect_right([chunk.end for chunk, _ in wanted], part.at)
    last = part.at + part.length
    return [move for move in wanted[first:] if move[0].begin < last]
