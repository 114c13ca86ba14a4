"""A job's checkpoints from outside the job: listed, read through, and pruned while nobody trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Counts,
    Manifest,
    OtherFormat,
    Piece,
    called_best,
    commit_key,
    commits,
    data_of,
    generations,
    read_manifest,
)
from gpucloud.domain.checkpoint.objects import (
    LENGTH_BYTES,
    PART_BYTES,
    Header,
    count_of,
    covering,
    read_header,
    start_of,
)
from gpucloud.domain.checkpoint.standing import (
    CheckpointMark,
    Found,
    Standing,
    Superfluous,
    nearest,
    standings,
    superfluous,
)
from gpucloud.domain.errors import CheckpointUnreadable, StoreError, UsageError
from gpucloud.domain.money.ledger import GIB, Terms
from gpucloud.domain.state.order import is_finished
from gpucloud.domain.state.state import JobState
from gpucloud.domain.untrusted import RECORD_BYTES
from gpucloud.ports import Clock
from gpucloud.store import ObjectStore, get_small
from gpucloud.store.checkpoints import base_of, metric_of, under
from gpucloud.store.parts import all_done, crc32_of
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of an object of a checkpoint, counted from 0, and where its bytes are."""

    piece: Piece
    number: int
    at: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An object that is not as it was written, and where: `part` counts from 1 to `of`, 0 for the whole object."""

    key: str
    what: str
    part: int = 0
    of: int = 0
    missing: bool = False

    def __str__(self) -> str:
        where = f"part {self.part} of {self.of} of {self.key}" if self.part else self.key
        return f"{where} {self.what}"


Use = Callable[[Part, memoryview], None]
"""What is done with a part's bytes, which are as they were written."""

Moved = Callable[[int], None]
"""Hears of so many bytes more."""


def _unused(_part: Part, _data: memoryview) -> None:
    """Their being whole is all that is wanted."""


def unheard(_size: int) -> None:
    """Nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoints:
    """All checkpoints of one job, of which `keep` stay. Every method may raise StoreError."""

    store: ObjectStore
    prefix: str
    keep: int

    def listed(self) -> tuple[str, ...]:
        """Return the keys of everything, without the prefix."""
        cut = len(under(self.prefix, ""))
        return tuple(key[cut:] for key in self.store.list(under(self.prefix, "")))

    def standing(self, keys: Sequence[str] | None = None) -> tuple[Standing, ...]:
        """Return every checkpoint, in the order of restoring; one that is collected meanwhile is left out."""
        names = self.listed() if keys is None else keys
        recorded = generations(names)
        based = all_done(lambda number: base_of(self.store, self.prefix, number), recorded)
        bases = dict(zip(recorded, based, strict=True))
        called = called_best(names)
        there = all_done(lambda commit: self._found(commit, is_called=commit in called), commits(names))
        pairs = zip(commits(names), there, strict=True)
        found = {commit: one for commit, one in pairs if one is not None}
        return standings(names, bases, found, keep=self.keep)

    def held(self) -> tuple[int, int]:
        """Return how many checkpoints there are, and how many bytes they take together."""
        manifests = [one.found.manifest for one in self.standing()]
        pieces = {piece.key: piece.size for manifest in manifests if manifest is not None for piece in manifest.pieces}
        return len(manifests), sum(pieces.values())

    def header(self, piece: Piece) -> Header:
        """Return what an object in the safetensors layout says of itself, verified; ValueError when it is damaged."""
        data = self._beginning(piece, min(LENGTH_BYTES, piece.size))
        start = start_of(data, piece.size, largest=RECORD_BYTES)
        return read_header(data if len(data) >= start else self._beginning(piece, start), piece.size)

    def verify(self, pieces: Sequence[Piece], moved: Moved = unheard) -> tuple[Damage, ...]:
        """Read every byte of the objects and return what is not as it was written."""
        tails = self.tails(pieces)
        missing = {damage.key for damage in tails if damage.missing}
        there = (piece for piece in pieces if piece.key not in missing)
        return (*tails, *self.read(parts_of(there), _unused, moved))

    def collected(self, keys: Iterable[str]) -> frozenset[Commit]:
        """Return the checkpoints that objects were of, and that were deleted: a manifest goes before its data."""
        owners = tuple({owner for _, owner in data_of(keys)})
        there = all_done(lambda one: get_small(self.store, under(self.prefix, commit_key(one))) is not None, owners)
        return frozenset(owner for owner, is_there in zip(owners, there, strict=True) if not is_there)

    def read(
        self,
        parts: Iterable[Part],
        use: Use,
        moved: Moved = unheard,
    ) -> tuple[Damage, ...]:
        """Have every part read, several at a time, and `use` called with those that are as written; return the others.

        `moved` hears of each part's size. Both are called by several threads; the memory is used again afterwards.
        """
        own = threading.local()

        def work(part: Part) -> Damage | None:
            room: memoryview | None = getattr(own, "room", None)
            if room is None or len(room) < part.length:
                own.room = room = memoryview(bytearray(min(PART_BYTES, max(part.length, 1))))
            data = room[: part.length]
            damage = self._damage(part, data)
            if damage is None:
                use(part, data)
            moved(part.length)
            return damage

        return tuple(damage for damage in all_done(work, parts) if damage is not None)

    def tails(self, pieces: Iterable[Piece]) -> tuple[Damage, ...]:
        """Return the objects that are missing, or longer than they were written."""

        def work(piece: Piece) -> Damage | None:
            key = under(self.prefix, piece.key)
            byte = memoryview(bytearray(1))
            if self.store.read_into(key, piece.size, byte):
                return Damage(key=piece.key, what="is longer than it was written")
            there = self.store.read_into(key, 0, byte) if piece.size else get_small(self.store, key) is not None
            return None if there else Damage(key=piece.key, what="is missing", missing=True)

        return tuple(damage for damage in all_done(work, pieces) if damage is not None)

    def _found(self, commit: Commit, *, is_called: bool) -> Found | None:
        stored = get_small(self.store, under(self.prefix, commit_key(commit)))
        if stored is None:
            return None
        manifest, other_format = None, False
        try:
            manifest = read_manifest(stored.data)
        except OtherFormat:
            other_format = True
        except ValueError:
            pass
        fits = manifest is not None and manifest.commit == commit
        return Found(
            manifest=manifest if fits else None,
            committed_at=stored.modified,
            metric=metric_of(self.store, self.prefix, commit) if is_called else None,
            other_format=other_format,
        )

    def _damage(self, part: Part, data: memoryview) -> Damage | None:
        piece = part.piece
        if not self.store.read_into(under(self.prefix, piece.key), part.at, data):
            what = "is missing, or shorter than it was written"
        elif crc32_of((data,)) != piece.crc32[part.number]:
            what = "is not as it was written"
        else:
            return None
        return Damage(key=piece.key, what=what, part=part.number + 1, of=len(piece.crc32))

    def _beginning(self, piece: Piece, length: int) -> memoryview:
        """Return the object's first bytes, at least so many, out of verified parts."""
        wanted = covering(0, length)
        found = memoryview(bytearray(min(piece.size, len(wanted) * PART_BYTES)))
        for part in parts_of((piece,)):
            if part.number in wanted and (damage := self._damage(part, found[part.at : part.at + part.length])):
                raise ValueError(str(damage))
        return found


def of_step(step: int, standing: Sequence[Standing]) -> tuple[Standing, ...]:
    """Return all checkpoints of that step; UsageError, with the nearest that there is, when there is none."""
    there = tuple(one for one in standing if one.commit.step == step)
    if not there:
        near = nearest(step, standing)
        named = _counts(standing).named(step)
        raise UsageError(f"there is no checkpoint of {named}: the nearest is {near}", hint=f"--step {near}")
    return there


def of_other_format(commit: Commit) -> str:
    """Return why nothing is said of what such a checkpoint holds."""
    return f"checkpoint {commit.step} (generation {commit.generation}) is of another gpucloud's format"


def _counts(standing: Sequence[Standing]) -> Counts:
    """Return what the numbers of these checkpoints count, as far as one that can be read tells."""
    found = (one.found.manifest for one in standing)
    return next((manifest.counts for manifest in found if manifest is not None), Counts.STEPS)


def restorable(step: int | None, standing: Sequence[Standing], *, best: bool = False) -> Manifest:
    """Return the checkpoint of that step, or of any, that a restore tries first; or the best by the script's metric.

    UsageError when there is no such one, StoreError when none is whole, CheckpointUnreadable where another gpucloud's
    comes first: nobody is given an older one in its place unasked.
    """
    if best:
        found = [one for one in standing if CheckpointMark.BEST in one.marks]
        if not found:
            raise UsageError("no checkpoint was called the best", hint="run.save(best=metric) in the script does that")
        standing, step = found, found[0].commit.step
    sound = [one for one in standing if one.sound is not None]
    wanted = standing if step is None else of_step(step, standing)
    for one in wanted:
        if one.sound is not None:
            return one.sound
        if CheckpointMark.OTHER_FORMAT in one.marks:
            older = f", or --step {nearest(one.commit.step, sound)}" if sound else ""
            raise CheckpointUnreadable(of_other_format(one.commit), hint=f"the gpucloud that saved it{older}")
    if step is None or not sound:
        raise StoreError("no checkpoint is whole", hint="gpucloud checkpoints --verify says what is wrong with each")
    named = _counts(standing).named(step)
    raise StoreError(f"the checkpoint of {named} is not whole", hint=f"--step {nearest(step, sound)}")


def parts_of(pieces: Iterable[Piece]) -> Iterator[Part]:
    """Yield all parts of the objects, in order."""
    for piece in pieces:
        for number in range(count_of(piece.size)):
            at = number * PART_BYTES
            yield Part(piece=piece, number=number, at=at, length=min(PART_BYTES, piece.size - at))


# Deleting checkpoints that no restore needs, while nobody trains.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruner:
    """Deletes what retention does not keep, manifests before data, under the job's lease."""

    jobs: JobStore
    stored_checkpoints: StoredCheckpoints
    clock: Clock

    def look(self) -> tuple[tuple[Standing, ...], Superfluous]:
        """Return what may go, among all that is there; UsageError while the job trains or may train."""
        loaded = self.jobs.load()
        if loaded is not None:
            self._require_idle(loaded[0])
        return self._look()

    def prune(self) -> tuple[tuple[Standing, ...], Superfluous]:
        """Delete what may go as it is now, and return that.

        Raises UsageError while the job trains, LeaseHeld while somebody supervises it.
        """
        with take(self.jobs, self.clock) as lease:  # so that nobody starts the job meanwhile
            self._require_idle(lease.state)
            standing, gone = self._look()
            newest = self._newest()
            for number, key in enumerate(gone.keys):
                lease.confirm()
                if number <= len(gone.commits):  # before each manifest, and before all data
                    self._require_idle(lease.state, saves=self._newest() != newest)
                self.stored_checkpoints.store.delete(under(self.stored_checkpoints.prefix, key))
        return standing, gone

    def _look(self) -> tuple[tuple[Standing, ...], Superfluous]:
        keys = self.stored_checkpoints.listed()
        standing = self.stored_checkpoints.standing(keys)
        return standing, superfluous(keys, standing)

    def _newest(self) -> tuple[int, ...]:
        """Return the newest generation: where one appears, somebody trains who does not know of the lease."""
        cut = len(under(self.stored_checkpoints.prefix, ""))
        return generations(
            key[cut:] for key in self.stored_checkpoints.store.list(under(self.stored_checkpoints.prefix, "gen/"))
        )[:1]

    def _require_idle(self, state: JobState, *, saves: bool = False) -> None:
        """Raise UsageError where the job trains, or has machines that might; `saves`: somebody does all the same."""
        name = self.jobs.job
        if state.attempt is not None or saves:
            raise UsageError(
                f"{name} is not at its end: it trains, or has trained and its results are not home yet",
                hint=f"gpucloud train {name} brings it to its end, gpucloud down {name} ends it now;"
                " while it trains, it deletes by itself what it needs no longer",
            )
        if state.alive:
            stands, what = (f"has {state.status.value}", "them") if state.status.ended else ("is not at its end", "it")
            raise UsageError(
                f"{name} {stands}, and its machines are not known to have ended",
                hint=f"gpucloud down {name} ends {what}; then the same command again",
            )


# What stays of a job that has ended, until somebody deletes it.


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsOn:
    """Checkpoints that stay in a store when their job is over, until somebody deletes them.

    `goes_on`: the next `train` goes on from the newest, as one does after a script that failed.
    """

    checkpoints: int
    size: int
    usd_per_month: Decimal
    goes_on: bool


def costs_on(jobs: JobStore, state: JobState, terms: Terms) -> CostsOn | None:
    """Return what stays of a job that is over and costs on; None where that is nothing. Raises StoreError.

    While machines are held, kept or about to end, nothing can be deleted, and what is held goes on from there.
    They are listed, with one request and one for each checkpoint; a store that costs nothing is not asked.
    """
    usd = terms.rates_in(state.pool.region).storage_usd_per_gib_month
    if not (state.status.ended and state.torn_down) or not usd:
        return None
    count, size = StoredCheckpoints(store=jobs.store, prefix=jobs.checkpoints, keep=2).held()
    if not size:
        return None
    return CostsOn(checkpoints=count, size=size, usd_per_month=usd * size / GIB, goes_on=not is_finished(state))
