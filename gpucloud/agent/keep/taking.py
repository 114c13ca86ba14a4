"""Commits one set of a script's files: copied as it stands, judged, uploaded, the manifest last."""

from __future__ import annotations

import mmap
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from gpucloud.agent.keep.disk import copy, is_whole
from gpucloud.domain.keeping.keys import LEVEL, object_name
from gpucloud.domain.keeping.listing import FileSet, Signature
from gpucloud.domain.manifest import Commit, Manifest, Piece, Why
from gpucloud.store.checkpoints import Checkpoints

_WRITERS = 4
Content = tuple[tuple[str, Signature], ...]


class Taking:
    """This attempt's commits; `committed` is the newest step that is in the store, `longest_s` what one took."""

    def __init__(self, checkpoints: Checkpoints, copies: Path, *, base: Commit | None, world: int) -> None:
        self.committed = base.step if base else 0
        self.longest_s = 0.0
        self.count = 0
        self._checkpoints = checkpoints
        self._copies = copies
        self._world = world
        self._newest: int | None = None

    def take(self, directory: Path, one: FileSet, content: Content, *, proven: bool, why: Why = Why.DUE) -> bool:
        """Return whether the set is committed; False when it changed meanwhile, or one of its files is torn.

        With `proven`, every file must show by its form that it is whole: whoever wrote it may have died while writing.
        Raises StoreError, Fenced when another attempt took over, OSError for a full disk.
        """
        began = time.monotonic()
        shutil.rmtree(self._copies, ignore_errors=True)
        try:
            if not copy(directory, content, self._copies) or not self._is_whole(one, proven=proven):
                return False
            self._commit(one, why)
        finally:
            shutil.rmtree(self._copies, ignore_errors=True)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self._checkpoints.collect()
        return True

    def _is_whole(self, one: FileSet, *, proven: bool) -> bool:
        found = [is_whole(self._copies / path) for path in one.paths]
        return all(found) if proven and not one.marked else False not in found

    def _commit(self, one: FileSet, why: Why) -> None:
        commit = Commit(self._checkpoints.generation, self._step(one))
        with ThreadPoolExecutor(_WRITERS) as pool:
            pieces = tuple(pool.map(lambda path: self._upload(commit, path), one.paths))
        self._checkpoints.commit(Manifest(commit=commit, world=self._world, level=LEVEL, pieces=pieces, why=why))
        self.committed = self._newest = commit.step
        self.count += 1

    def _step(self, one: FileSet) -> int:
        """What the names say, unless that would not be the newest; else the next number."""
        if one.step is not None and (self._newest is None or one.step > self._newest):
            return one.step
        return self.committed + 1

    def _upload(self, commit: Commit, path: str) -> Piece:
        # The copy is ours alone: a file that its script cuts short while it is mapped would end this process.
        with (self._copies / path).open("rb") as file, ExitStack() as stack:
            view = memoryview(b"")
            if file.seek(0, 2):
                mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                view = stack.enter_context(memoryview(mapped))
            return self._checkpoints.upload(commit, object_name(path), view)
