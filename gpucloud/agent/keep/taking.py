"""Commits one set of a script's files: copied as it stands, judged, uploaded, the manifest last."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path

from gpucloud.agent.keep.depot import Depot
from gpucloud.agent.keep.disk import Texts, copy, is_whole, put_time
from gpucloud.domain.keeping.keys import PROMISE, object_name
from gpucloud.domain.keeping.layouts import Found, Rule, checkpoints_of, find_sets
from gpucloud.domain.keeping.listing import FileSet, Listing, Signature, folder_of
from gpucloud.domain.keeping.pointers import beside, inside, with_pointers
from gpucloud.domain.keeping.rounds import metadata_among, shards_missing
from gpucloud.domain.manifest import Commit, Manifest, Piece, Why

_WRITERS = 4
Content = tuple[tuple[str, Signature], ...]
Say = Callable[[str], None]


class Took(Enum):
    """What became of a set."""

    SAVED = "saved"
    CHANGED = "changed"  # or torn: it is looked at again
    VOID = "void"  # it will never be whole


class Taking:
    """This attempt's commits; `committed` is the newest step that is in the store, `longest_s` what one took."""

    def __init__(self, depot: Depot, copies: Path, rule: Rule, say: Say, *, base: Commit | None = None) -> None:
        self.committed = base.step if base else 0
        self.longest_s = 0.0
        self.count = 0
        self.over: bool | None = None
        """Whether another node wants nothing more of this one; None where that is no other node's matter."""
        self._depot = depot
        self._checkpoints = depot.checkpoints
        self._copies = copies
        self._rule = rule
        self._say = say
        self._newest: int | None = None
        self._texts = Texts()

    def sets(self, directory: Path, listing: Listing) -> Found:
        """Return what may be taken, once it is complete and at rest. May raise StoreError."""
        return self.there(directory, listing)

    def there(self, directory: Path, listing: Listing) -> Found:
        """Return the checkpoints in the directory, with what beside them names them and what they name."""
        found = find_sets(self._rule, listing)
        checkpoints = checkpoints_of(found.sets, listing)
        near = (*beside(found.sets, listing, checkpoints), *inside(found.sets, listing))
        texts = self._texts.of(directory, near, listing)
        return replace(found, sets=tuple(with_pointers(one, texts, listing, checkpoints) for one in found.sets))

    def take(self, directory: Path, one: FileSet, content: Content, *, proven: bool, why: Why = Why.DUE) -> Took:
        """Return SAVED when the set is in the store; CHANGED when it changed meanwhile, or one of its files is torn.

        With `proven`, every file must show by its form that it is whole: whoever wrote it may have died while writing.
        Raises StoreError, Fenced when another attempt took over, OSError for a full disk.
        """
        began = time.monotonic()
        shutil.rmtree(self._copies, ignore_errors=True)
        try:
            if not copy(directory, content, self._copies) or not self._is_whole(one, proven=proven):
                return Took.CHANGED
            took = self._save(one, why)
        finally:
            shutil.rmtree(self._copies, ignore_errors=True)
        if took is Took.SAVED:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1
        return took

    def close_by(self, limit_s: float) -> None:
        """Wait for no other node beyond this moment of the monotonic clock."""

    def close(self) -> None:
        """Nothing more will be taken."""

    @property
    def _generation(self) -> int:
        return self._checkpoints.generation

    def _is_whole(self, one: FileSet, *, proven: bool) -> bool:
        found = [is_whole(self._copies / path) for path in one.paths]
        return all(found) if proven and not one.marked else False not in found

    def _save(self, one: FileSet, why: Why) -> Took:
        if self._lacking(one, one.paths):
            return Took.CHANGED
        commit = Commit(self._generation, self._step(one))
        self._commit(commit, self._uploaded(commit, (*one.paths, *self._beside(one))), why)
        return Took.SAVED

    def _beside(self, one: FileSet) -> tuple[str, ...]:
        """Return the paths of what is kept with the set, without what is torn: no part of it, that bars no save."""
        for pointer in one.pointers:  # as it was when the set was found: some are written again and again
            (self._copies / pointer.path).parent.mkdir(parents=True, exist_ok=True)
            (self._copies / pointer.path).write_bytes(pointer.text.encode())
            put_time(self._copies / pointer.path, pointer.mtime_ns)
        whole = [path for path in one.also if is_whole(self._copies / path) is not False]
        return (*whole, *(pointer.path for pointer in one.pointers))

    def _lacking(self, one: FileSet, there: Iterable[str]) -> tuple[str, ...]:
        """Return the files that a torch.distributed.checkpoint among the copies names and that are not `there`."""
        names: dict[str, set[str]] = {}
        for path in there:
            names.setdefault(folder_of(path), set()).add(path.rpartition("/")[2])
        return tuple(
            name
            for path in metadata_among(one.paths)
            for name in shards_missing((self._copies / path).read_bytes(), names.get(folder_of(path), ()))
        )

    def _commit(self, commit: Commit, pieces: tuple[Piece, ...], why: Why) -> None:
        world = self._rule.nodes * self._rule.ranks
        self._checkpoints.commit(Manifest(commit=commit, world=world, promise=PROMISE, pieces=pieces, why=why))
        self.committed = self._newest = commit.step
        self._checkpoints.collect()

    def _step(self, one: FileSet) -> int:
        """What the names say, unless that would not be the newest; else the next number."""
        if one.step is not None and (self._newest is None or one.step > self._newest):
            return one.step
        return self.committed + 1

    def _uploaded(self, commit: Commit, paths: tuple[str, ...], node: int | None = None) -> tuple[Piece, ...]:
        with ThreadPoolExecutor(_WRITERS) as pool:
            return tuple(pool.map(lambda path: self._upload(commit, path, node), paths))

    def _upload(self, commit: Commit, path: str, node: int | None) -> Piece:
        # The copy is ours alone: a file that its script cuts short while it is mapped would end this process.
        with (self._copies / path).open("rb") as file, ExitStack() as stack:
            view = memoryview(b"")
            if file.seek(0, 2):
                mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                view = stack.enter_context(memoryview(mapped))
            piece = self._checkpoints.upload(commit, object_name(path, node), view)
            # Before 1970 is what an archive without times unpacks to.
            return replace(piece, mtime_ns=max(0, os.fstat(file.fileno()).st_mtime_ns))
