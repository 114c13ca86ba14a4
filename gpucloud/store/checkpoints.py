"""The commit protocol over an object store: generations, objects, the manifest last, and what goes afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Counts,
    Manifest,
    OtherFormat,
    Piece,
    Why,
    best_bytes,
    best_key,
    best_of,
    called_best,
    collectable,
    commit_key,
    commit_of,
    data_key,
    data_of,
    generation_bytes,
    generation_key,
    generations,
    manifest_bytes,
    read_attempt,
    read_base,
    read_best,
    read_manifest,
    restore_order,
    starting,
    starting_key,
)
from gpucloud.domain.checkpoint.objects import PART_BYTES, cut
from gpucloud.domain.errors import CheckpointUnreadable, GpucloudError, StoreError, UsageError
from gpucloud.domain.untrusted import COUNTED
from gpucloud.store.contract import ObjectStore, get_small, put_once
from gpucloud.store.parts import all_done, crc32_of

HURRIED_S = 1.0
"""So long old checkpoints are deleted although a save waits: without that there would be more and more of them."""

_START = timedelta(hours=1)
"""So long what an attempt that starts may begin from stays; one that began no generation by then has died."""
_END: tuple[int, tuple[None]] = (0, (None,))


class Fenced(GpucloudError):
    """A newer attempt has taken over; this one must not go on."""

    code = "fenced"


def all_damaged(count: int) -> UsageError:
    """Return what ends a run that would begin at step 0 although so many checkpoints are there: not in silence."""
    return UsageError(
        f"none of the {count} checkpoints that are there can be used, and this run does not begin at step 0 over them",
        hint="gpucloud checkpoints --verify says what is damaged; a new run, or another folder, begins at step 0",
    )


class Checkpoints:
    """All checkpoints of one job under `prefix`. Every call may raise StoreError; damage never raises."""

    def __init__(self, store: ObjectStore, prefix: str, *, keep: int) -> None:
        self._store = store
        self._prefix = prefix
        self._keep = keep
        self.base: Commit | None = None
        self.generation = 0

    def candidates(self, damaged: Callable[[Commit], None] = lambda _: None) -> Iterator[Manifest]:
        """Yield the manifests that are whole, the one to restore first; `damaged` hears of each other one.

        CheckpointUnreadable at one that is whole and that this version does not read.
        """
        keys = listed(self._store, self._prefix)
        for commit in restore_order(keys, self._base_of):
            manifest = self.manifest(commit)
            if manifest is not None:
                yield manifest
            elif commit_key(commit) in keys:  # a base may have been collected
                damaged(commit)

    def fetch(self, manifest: Manifest) -> tuple[bytes, ...] | None:
        """Return the checkpoint's objects in the manifest's order; None when one is missing or not as written."""
        room = [bytearray(piece.size) for piece in manifest.pieces]
        whole = self.read([(piece, memoryview(data)) for piece, data in zip(manifest.pieces, room, strict=True)])
        return tuple(map(bytes, room)) if whole else None

    def read(self, wanted: Iterable[tuple[Piece, memoryview]]) -> bool:
        """Fill each object's memory with its bytes, several parts at a time; False when one is not as written.

        Then, or after an error, what the memory holds means nothing.
        """
        return self.read_parts(
            (piece, number, part) for piece, into in wanted for number, (part,) in (*enumerate(cut((into,))), _END)
        )

    def read_parts(self, wanted: Iterable[tuple[Piece, int, memoryview | None]]) -> bool:
        """Fill memory with single parts of objects, by their numbers; False when one is not as written.

        Without memory, see that there is nothing behind the object's end.
        """
        return all(all_done(self._read_part, wanted))

    def announce(self, attempt: int) -> None:
        """Have older attempts delete nothing from now on: this one looks for where to begin, and reads that.

        One of them may still be saving: what it is to begin from would be gone before its generation says so.
        """
        known = generations(listed(self._store, self._prefix))
        self._store.put(self._key(starting_key(max(attempt, known[0] + 1 if known else 1))), b"{}")

    def begin(self, *, base: Commit | None, attempt: int) -> bool:
        """Allocate this attempt's generation, at least `attempt`; False when the store ignores conditions.

        Then the number comes from the clock instead, and two writers at once are no longer told apart for certain.
        StoreError where something else took the last number that there is.
        """
        self.base = base
        owner = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        record = generation_bytes(base=base, owner=owner, attempt=attempt)
        known = generations(listed(self._store, self._prefix))
        self.generation = max(attempt, known[0] + 1 if known else 1)
        while self.generation < COUNTED and not self._claimed(record):
            self.generation += 1
        if self.generation >= COUNTED:  # no name holds it: nobody could tell it from a later attempt's
            last = self._key(generation_key(COUNTED - 1))
            raise StoreError(f"{last} counts further than any job does", hint="delete it: no gpucloud wrote it")
        # The same write again must be refused. White space makes it another content, so that a store
        # cannot take it for a repeated request; one that ignores conditions now holds a useless record, no more.
        if not self._put_absent(generation_key(self.generation), record + b"\n"):
            return True
        self.generation = time.time_ns() // 1_000_000
        self._store.put(self._key(generation_key(self.generation)), record)
        return False

    def go_on(self, generation: int, *, base: Commit | None) -> None:
        """Write for a generation that `begin` has allocated elsewhere."""
        self.generation, self.base = generation, base

    def join(self, attempt: int) -> bool:
        """Go on for the generation that another node began for this attempt; False while none did.

        `base` is then where that node begins. What cannot be read is passed over.
        """
        for generation in generations(listed(self._store, self._prefix)):
            stored = get_small(self._store, self._key(generation_key(generation))) if generation >= attempt else None
            with contextlib.suppress(ValueError):
                if stored is not None and read_attempt(stored.data) == attempt:
                    self.go_on(generation, base=read_base(stored.data))
                    return True
        return False

    def manifest(self, commit: Commit) -> Manifest | None:
        """Return the manifest of a commit; None when it is gone or damaged, CheckpointUnreadable for another format."""
        stored = get_small(self._store, self._key(commit_key(commit)))
        if stored is None:
            return None
        try:
            found = read_manifest(stored.data)
        except OtherFormat as error:
            raise CheckpointUnreadable(
                f"checkpoint {commit.step} cannot be read: {error}",
                hint="go on with the gpucloud that saved it, or a newer one; nothing of it was deleted",
            ) from error
        except ValueError:
            return None
        return found if found.commit == commit else None

    def upload(self, commit: Commit, name: str, data: memoryview) -> Piece:
        """Write one object of a checkpoint, durably."""
        key = data_key(commit, name)
        sums = self._store.write(self._key(key), (data,))
        return Piece(key=key, size=sums.size, crc32=sums.crc32)

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint count. Raises Fenced when a newer generation exists: it need not count then.

        It may be committed again: the answer to the first time may have been lost.
        """
        self._see_that_none_is_newer()
        if not self._put_absent(commit_key(manifest.commit), manifest_bytes(manifest)) and not self._is_there(manifest):
            raise self._fenced(self.generation)
        self._see_that_none_is_newer()  # one that came in between may have begun without this commit

    def collect(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Delete what is no longer needed, and what was never committed; nothing once a newer attempt starts.

        What cannot be read stays, with its data. Hundreds of ranks have as many objects: once `hurried`, and after
        `HURRIED_S`, the rest is left to the next call.
        """
        began = time.monotonic()
        keys = self._store.list(self._key(""))
        names = tuple(key[len(self._key("")) :] for key in keys)
        if any(newer > self.generation and self._still_starts(newer) for newer in starting(names)):
            return
        unread: set[Commit] = set()
        doomed = collectable(names, generation=self.generation, base=self.base, keep=self._keep, best=self._best(names))
        owners = dict(data_of(doomed))
        for name in doomed:  # manifests come before data
            if time.monotonic() - began > HURRIED_S and hurried():
                return
            if (commit := commit_of(name)) is not None and not self._is_read(commit):
                unread.add(commit)
            elif owners.get(name) not in unread:
                self._store.delete(self._key(name))

    def best(self) -> tuple[Commit, float] | None:
        """Return the best checkpoint of those that led to this generation, and its metric; None without one."""
        keys = listed(self._store, self._prefix, "gen/", "commit/", "best/")
        commit = self._best(keys)
        metric = metric_of(self._store, self._prefix, commit) if commit is not None else None
        return (commit, metric) if commit is not None and metric is not None else None

    def call_best(self, commit: Commit, metric: float) -> None:
        """Have a checkpoint that counts kept, until another is called the best. Raises Fenced."""
        self._see_that_none_is_newer()
        self._store.put(self._key(best_key(commit)), best_bytes(metric))

    def _best(self, names: tuple[str, ...]) -> Commit | None:
        return best_of(names, Commit(self.generation, COUNTED), self._base_of) if called_best(names) else None

    def _is_read(self, commit: Commit) -> bool:
        """Whether it is gone, or can be read: what cannot be may be worth more than what can."""
        try:
            return self.manifest(commit) is not None or get_small(self._store, self._key(commit_key(commit))) is None
        except CheckpointUnreadable:
            return False

    def _still_starts(self, generation: int) -> bool:
        said = get_small(self._store, self._key(starting_key(generation)))
        return said is not None and said.store_time - said.modified < _START

    def _claimed(self, record: bytes) -> bool:
        """Whether the generation is ours. The first answer may have been lost: others must not find two of ours."""
        key = generation_key(self.generation)
        if self._put_absent(key, record):
            return True
        there = get_small(self._store, self._key(key))
        return there is not None and there.data == record

    def _base_of(self, generation: int) -> Commit | None:
        return base_of(self._store, self._prefix, generation)

    def _read_part(self, wanted: tuple[Piece, int, memoryview | None]) -> bool:
        """Read one part of an object, or see that there is nothing behind its end."""
        piece, number, into = wanted
        if into is None:
            return not self._store.read_into(self._key(piece.key), piece.size, memoryview(bytearray(1)))
        found = self._store.read_into(self._key(piece.key), number * PART_BYTES, into)
        return found and crc32_of((into,)) == piece.crc32[number]

    def _see_that_none_is_newer(self) -> None:
        newest = generations(listed(self._store, self._prefix))[:1]
        if newest and newest[0] > self.generation:
            raise self._fenced(newest[0])

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether it has been committed; what it was saved for may be another: the same step is saved again at the end.

        Nobody else commits in this generation.
        """
        there = self.manifest(manifest.commit)
        return there is not None and replace(there, why=manifest.why) == manifest

    def _put_absent(self, key: str, data: bytes) -> bool:
        return put_once(self._store, self._key(key), data)

    def _fenced(self, generation: int) -> Fenced:
        return Fenced(
            f"generation {generation} has taken over from generation {self.generation}",
            hint="another attempt of this job runs: end one of the two",
        )

    def _key(self, key: str) -> str:
        return under(self._prefix, key)


# The newest committed checkpoint under a prefix, as a supervisor sees it.


class Newest(NamedTuple):
    """A committed checkpoint: its number, its manifest's SHA-256 (hex), what the number counts, and what it was for.

    `saved_at` is when it was committed, by the store's clock.
    """

    step: int
    sha256: str
    counts: Counts = Counts.STEPS
    why: Why = Why.DUE
    saved_at: datetime | None = None


def newest_commit(store: ObjectStore, prefix: str) -> Newest | None:
    """Return the checkpoint that a restore would try first; None without one.

    The manifest is verified, its objects are not. One of another gpucloud's format is no damage: a restore comes to it
    and ends there. Raises StoreError.
    """
    for commit in restore_order(listed(store, prefix), lambda generation: base_of(store, prefix, generation)):
        stored = get_small(store, under(prefix, commit_key(commit)))
        if stored is None:
            continue
        newest = Newest(commit.step, hashlib.sha256(stored.data).hexdigest(), saved_at=stored.modified)
        try:
            found = read_manifest(stored.data)
        except OtherFormat:
            return newest
        except ValueError:
            continue
        if found.commit == commit:
            return newest._replace(counts=found.counts, why=found.why)
    return None


def listed(store: ObjectStore, prefix: str, *kinds: str) -> tuple[str, ...]:
    """Return the keys of all generations and manifests, or of those kinds, without the prefix."""
    cut = len(under(prefix, ""))
    return tuple(key[cut:] for kind in kinds or ("gen/", "commit/") for key in store.list(under(prefix, kind)))


def metric_of(store: ObjectStore, prefix: str, commit: Commit) -> float | None:
    """Return how good a checkpoint is that was called the best; None for another, or where that is damaged."""
    stored = get_small(store, under(prefix, best_key(commit)))
    if stored is not None:
        with contextlib.suppress(ValueError):
            return read_best(stored.data)
    return None


def base_of(store: ObjectStore, prefix: str, generation: int) -> Commit | None:
    """Return the commit that a generation began from; None when it had none or its record is damaged."""
    stored = get_small(store, under(prefix, generation_key(generation)))
    if stored is not None:
        with contextlib.suppress(ValueError):
            return read_base(stored.data)
    return None


def under(prefix: str, key: str) -> str:
    """Return the key below the prefix; an empty prefix adds nothing."""
    return f"{prefix.strip('/')}/{key}" if prefix.strip("/") else key
