"""A job's checkpoints as its user sees them: which one a restore takes first, which stay, which are of no use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from gpucloud.domain.checkpoint.manifest import (
    LEAST_KEPT,
    Commit,
    Manifest,
    best_key,
    best_of,
    commit_key,
    commits,
    data_of,
    generations,
    restore_order,
)
from gpucloud.domain.untrusted import COUNTED


class CheckpointMark(str, Enum):
    """What there is to say of a checkpoint."""

    NEXT = "next"  # a restore takes it first
    BASE = "base"  # the newest generation began from it
    BEST = "best"  # by the script's own metric
    KEPT = "kept"  # the next collection leaves it
    DAMAGED = "damaged"  # its manifest is not as it was written
    OTHER_FORMAT = "other_format"  # another gpucloud wrote it, and this one does not read it
    INCOMPLETE = "incomplete"  # an object of it is not there
    UNREACHABLE = "unreachable"  # its generation has no record, so that no restore comes to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A manifest as it lies in the store; None when it cannot be read. `committed_at` is by the store's clock.

    `metric` is the script's own, of what was once the best so far; more is better.
    """

    manifest: Manifest | None
    committed_at: datetime
    other_format: bool = False
    """Whether it is whole all the same, of another gpucloud's format."""
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One checkpoint: what was found of it, and what there is to say."""

    commit: Commit
    found: Found
    marks: frozenset[CheckpointMark]

    @property
    def size(self) -> int | None:
        """All its objects' bytes; None where the manifest cannot be read."""
        return sum(piece.size for piece in self.found.manifest.pieces) if self.found.manifest else None

    @property
    def sound(self) -> Manifest | None:
        """Its manifest, if everything that it names is there."""
        return None if CheckpointMark.INCOMPLETE in self.marks else self.found.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Superfluous:
    """What may go: the checkpoints, and all keys in the order to delete them.

    `unfinished` of those keys are objects of saves that were never committed.
    """

    commits: tuple[Commit, ...]
    keys: tuple[str, ...]
    unfinished: int


def ordered(keys: Iterable[str], bases: Mapping[int, Commit | None]) -> tuple[Commit, ...]:
    """Return all commits among the keys, the one that a restore tries first before all others."""
    names = tuple(keys)
    there = dict.fromkeys(commits(names))
    order = dict.fromkeys(commit for commit in restore_order(names, bases.get) if commit in there)
    order.update(there)
    return tuple(order)


def standings(
    keys: Collection[str], bases: Mapping[int, Commit | None], found: Mapping[Commit, Found], *, keep: int
) -> tuple[Standing, ...]:
    """Return every checkpoint that was found, in the order of restoring, with its marks."""
    names = frozenset(keys)
    newest = generations(names)[:1]
    base = bases.get(newest[0]) if newest else None
    order = [commit for commit in ordered(names, bases) if commit in found]
    recorded = frozenset(generations(names))
    faults = {commit: _fault(commit, found[commit], names, recorded) for commit in order}
    sound = [commit for commit in order if faults[commit] is None]
    unread = [commit for commit in order if found[commit].other_format]
    best = best_of(names, Commit(newest[0], COUNTED), bases.get) if newest else None
    kept = _kept(order, sound, base, best, keep).union(unread)
    first = next((commit for commit in order if faults[commit] in (None, CheckpointMark.OTHER_FORMAT)), None)
    marked: dict[CheckpointMark, Collection[Commit | None]] = {
        CheckpointMark.NEXT: [first] if first in sound else [],  # a restore ends at what it does not read
        CheckpointMark.BASE: [base],
        CheckpointMark.BEST: [best],
    }
    return tuple(
        Standing(
            commit=commit,
            found=found[commit],
            marks=_marks(commit, faults[commit], {**marked, CheckpointMark.KEPT: kept}),
        )
        for commit in order
    )


def superfluous(keys: Collection[str], standing: Sequence[Standing]) -> Superfluous:
    """Return what may be deleted while nobody trains: what is not kept, and what was never committed."""
    kept = {one.commit for one in standing if CheckpointMark.KEPT in one.marks}
    known = {one.commit for one in standing}
    doomed = tuple(one.commit for one in standing if one.commit not in kept)
    data = [(name, owner) for name, owner in data_of(keys) if owner not in kept]
    manifests = [commit_key(commit) for commit in doomed]
    names = frozenset(keys)
    called = [best_key(commit) for commit in doomed if best_key(commit) in names]
    unfinished = sum(owner not in known for _, owner in data)
    return Superfluous(commits=doomed, keys=(*manifests, *(name for name, _ in data), *called), unfinished=unfinished)


def nearest(step: int, standing: Sequence[Standing]) -> int | None:
    """Return the step of the checkpoint that is nearest to a step; None without any."""
    return min((one.commit.step for one in standing), key=lambda other: (abs(other - step), other), default=None)


def _kept(
    order: Sequence[Commit], sound: Sequence[Commit], base: Commit | None, best: Commit | None, keep: int
) -> set[Commit]:
    """The first that can be restored, the base and the best. Where none can be, nothing goes: somebody may mend one.

    What only another gpucloud reads is kept beside them: to that one it may be worth more than all others.
    """
    if not sound:
        return set(order)
    return {*sound[: max(keep, LEAST_KEPT)], *(one for one in (base, best) if one is not None)}


def _fault(commit: Commit, found: Found, names: frozenset[str], recorded: frozenset[int]) -> CheckpointMark | None:
    if found.manifest is None and not found.other_format:
        return CheckpointMark.DAMAGED
    if found.manifest is not None and not names.issuperset(piece.key for piece in found.manifest.pieces):
        return CheckpointMark.INCOMPLETE
    if commit.generation not in recorded:
        return CheckpointMark.UNREACHABLE
    return CheckpointMark.OTHER_FORMAT if found.other_format else None


def _marks(
    commit: Commit, fault: CheckpointMark | None, marked: Mapping[CheckpointMark, Collection[Commit | None]]
) -> frozenset[CheckpointMark]:
    found = {mark for mark, of in marked.items() if commit in of}
    return frozenset(found if fault is None else {fault, *found})
