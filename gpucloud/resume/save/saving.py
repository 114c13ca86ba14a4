"""Saves a checkpoint by all ranks beside the training: copied at one step, committed at a later one.

A save has three stages, which all ranks enter at the same step, as the numbers that they compare at every step say:
each rank's writer moves its object; when all have, rank 0's writer puts the manifest; when that is done it counts.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from gpucloud.domain.checkpoint.manifest import NO_NOTES, Commit, Manifest, Notes, Piece, Promise, Why, notes_entry
from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import HINT, NoMemory, Ranks
from gpucloud.resume.save.agreement import News
from gpucloud.resume.save.cadence import Cadence, Moment, is_better_anew, is_due
from gpucloud.resume.save.capture import Capture
from gpucloud.resume.save.writer import Answer, Lost, Writer
from gpucloud.resume.state.tree import Unplanned
from gpucloud.store.checkpoints import Checkpoints, Fenced
from gpucloud.store.writing import described

NOTICE_LEAVES_S = 90.0
"""Of the two minutes between a notice and the end of a spot machine, what is left for a save."""

_SLOWED = 0.03  # of an upload's time is what training loses beside it
_LEAST_COST_S = 0.05
_POLL_S = 0.02


class _Stage(Enum):
    IDLE = auto()
    WRITING = auto()
    COMMITTING = auto()


_ALL = ", and in the end all but what the script has exported or written into `outputs:`"


class Saver:
    """Saves, one at a time; one that fails is dropped on all ranks alike, and training goes on.

    `committed` is the newest step that counts; `longest_s` is how long a save took from its copy to its commit at most,
    None before the first; `no_memory` says what the newest save lacked, None where it had it; `failure` why it failed
    here, None where it did not; `is_refused`: by what the store will refuse until somebody mends it.
    """

    def __init__(
        self, checkpoints: Checkpoints, writer: Writer, capture: Capture, ranks: Ranks, committed: int
    ) -> None:
        self.committed = committed
        self.longest_s: float | None = None
        self.no_memory: str | None = None
        self.failure: str | None = None
        self.is_refused = False
        self._dispatch = Dispatch(checkpoints, writer, ranks)
        self._capture = capture
        self._ranks = ranks
        self._cost_s = _LEAST_COST_S
        self._upload_s = 0.0
        self._stage = _Stage.IDLE
        self._pending: PendingSave | None = None
        self._started_at = self._saved_at = time.monotonic()
        self._warned = False
        self._held = False

    @property
    def step(self) -> int | None:
        """The step that is being saved, None without one."""
        return self._pending.commit.step if self._pending is not None else None

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether to save after this step, by this rank's clock."""
        now = time.monotonic()
        moment = Moment(
            step=step,
            since_start_s=now - self._started_at,
            since_save_s=now - self._saved_at,
            cost_s=self._cost_s,
            upload_s=self._upload_s,
            anything_saved=self.committed > 0,
        )
        return is_due(cadence, moment)

    def prepare(self, extra: dict[str, Any]) -> None:
        """Make memory ready for a state like the present one."""
        try:
            self._capture.prepare(extra)
        except NoMemory as error:
            self._lacks_memory(error)

    def begin(self, pending: PendingSave, extra: dict[str, Any], *, steps_are_seen: bool = True) -> None:
        """Copy this rank's share and have it written. The save before must be over. Raises UsageError."""
        self._copy(pending, extra, steps_are_seen=steps_are_seen)
        if not pending.told and not self._capture.under_way():
            self._tell(pending)
        self._saved_at = time.monotonic()
        pending.stall_s = self._saved_at - pending.began

    def hold(self, pending: PendingSave, extra: dict[str, Any], *, steps_are_seen: bool = True) -> None:
        """Copy this rank's share, and wait until it is copied; nothing is written of it before `release`.

        Each rank does so by itself; nothing is held where they would have to agree first. The save before must be over.
        Raises UsageError.
        """
        self._held = True
        try:
            self._copy(pending, extra, steps_are_seen=steps_are_seen, alone=True)
        except Unplanned:
            self.drop()
            return
        if not pending.told:
            self._capture.wait()
        if pending.told or self._capture.spoilt():
            self.drop()

    def release(self, why: Why | None) -> None:
        """Have what is held written, because of that if it is told; all ranks do so, or none."""
        pending = self._pending
        if self._held and pending is not None:
            self._held = False
            pending.began, pending.why = time.monotonic(), why or pending.why
            self._tell(pending)

    def drop(self) -> None:
        """Forget what is held, if anything is."""
        if self._held:
            self._pending, self._stage, self._held = None, _Stage.IDLE, False

    def _copy(self, pending: PendingSave, extra: dict[str, Any], *, steps_are_seen: bool, alone: bool = False) -> None:
        self._pending, pending.began = pending, time.monotonic()
        self._stage = _Stage.WRITING
        try:
            self._capture.begin(extra, steps_are_seen=steps_are_seen, alone=alone)
        except UsageError:
            self._pending, self._stage, self._held = None, _Stage.IDLE, False
            raise
        except (NoMemory, torch.OutOfMemoryError) as error:
            self._lacks_memory(error)
            pending.told, pending.entry = True, FAILED

    def news(self, wait_s: float = 0.0) -> News:
        """Return what the other ranks must know; waits at most so long for the writer to say something."""
        pending = self._pending
        if pending is None:
            return News()
        if self._stage is _Stage.WRITING:
            if not pending.told and not self._capture.under_way():
                self._tell(pending)
            if pending.told and pending.entry is None:
                self._dispatch.look(pending, wait_s)
            if pending.torn:
                self._capture.mistrust()
            return News(busy=int(pending.entry is None))
        if self._ranks.rank > 0:
            time.sleep(min(wait_s, _POLL_S))
            return News()
        outcome, commit_s = self._dispatch.outcome(pending, wait_s)
        return News(outcome=outcome.value, commit_ms=round(1000 * commit_s))

    def advance(self, agreed: News) -> None:
        """Go on to the next stage when all ranks can. Raises Fenced, on every rank, when another attempt took over."""
        pending = self._pending
        if pending is None:
            return
        if self._stage is _Stage.WRITING and not agreed.busy:
            entries = [json.loads(entry) for entry in self._ranks.gathered(pending.entry or FAILED)]
            if not all(entries):
                self._over(Outcome.DROPPED)
                return
            pending.upload_s = max(entry["seconds"] for entry in entries)
            pending.size = sum(entry["piece"][1] for entry in entries)
            self._stage = _Stage.COMMITTING
            self._dispatch.put(pending, entries)
        elif self._stage is _Stage.COMMITTING and agreed.outcome:
            self._learn(pending, agreed.commit_ms / 1000)
            self._over(Outcome(agreed.outcome))

    def is_in_the_way(self, step: int, left_s: float) -> bool:
        """Whether the save under way, not one of this step, leaves no time for one that there is time for."""
        pending = self._pending
        if pending is None or pending.commit.step == step or self._stage is _Stage.COMMITTING:
            return False
        return is_better_anew(save_s=self._upload_s, gone_s=time.monotonic() - pending.began, left_s=left_s)

    def finish(self, limit_s: float = float("inf")) -> None:
        """Wait until nothing is under way; what is not committed after `limit_s` is dropped. Raises Fenced."""
        deadline = time.monotonic() + limit_s
        if self._pending is not None and not self._pending.told:
            self._capture.wait()
        while self._pending is not None:
            late = time.monotonic() > deadline
            if late:
                self._dispatch.give_up(self._pending)
            agreed = self._ranks.highest(*self.news(0.0 if late else _POLL_S).numbers())
            self.advance(News(*agreed))

    def call_best(self, step: int, generation: int, metric: float) -> None:
        """Have the checkpoint of that step, which counts, kept as the best by that metric; for rank 0."""
        self._dispatch.call_best(step, generation, metric)

    def close(self, limit_s: float) -> None:
        """End the writer, when it has deleted what is no longer needed."""
        self._dispatch.close(limit_s)
        self._capture.close()

    def _tell(self, pending: PendingSave) -> None:
        """Have the writer write what was captured."""
        pending.told = True
        if why := self._capture.spoilt():
            say(why)
            pending.entry = FAILED
        else:
            self.no_memory = None
            self._dispatch.write(pending, self._capture.size, self._capture.summed)

    def _learn(self, pending: PendingSave, commit_s: float) -> None:
        """Remember what the save took: what training lost, and how long it was until it counted."""
        self._upload_s = pending.upload_s + commit_s
        self._cost_s = max(pending.stall_s + _SLOWED * self._upload_s, _LEAST_COST_S)

    def _over(self, outcome: Outcome) -> None:
        pending, self._pending, self._stage = self._pending, None, _Stage.IDLE
        if pending is None:
            return
        self.failure, self.is_refused = pending.failure, pending.refused
        if outcome is Outcome.FENCED:
            raise Fenced(
                f"another attempt has taken over from generation {pending.commit.generation}",
                hint="this one stops; nothing is lost",
            )
        if outcome is Outcome.COMMITTED:
            self.longest_s = max(self._upload_s, self.longest_s or 0.0)
            self.committed = pending.commit.step
            self._warn(pending.size)

    def _lacks_memory(self, error: Exception) -> None:
        """Say once that nothing is saved; the next save looks again."""
        said, self.no_memory = self.no_memory, f"there is no memory for it: {error}"
        if said is None and (self._ranks.rank == 0 or not getattr(error, "of_all", False)):
            since = f"since step {self.committed}" if self.committed else "so far"
            say(
                f"nothing can be saved, {self.no_memory}; training goes on, and what was done {since} is lost when a "
                f"machine is interrupted{'' if self.committed else _ALL}: {HINT}"
            )

    def _warn(self, size: int) -> None:
        """Say once that a notice would come too late for a state of this size."""
        if self._upload_s > NOTICE_LEAVES_S and not self._warned and self._ranks.rank == 0:
            self._warned = True
            most = size * NOTICE_LEAVES_S / self._upload_s
            say(
                f"the state has {size / 1e9:.1f} GB, and a notice leaves {NOTICE_LEAVES_S:.0f} s, in which this store "
                f"takes {most / 1e9:.1f} GB: when a machine is interrupted, the steps since the last save are lost"
            )


# What a rank has its writer do for a save, and what comes of that.


FAILED = b"null"
"""The entry of a rank whose object was not written."""


class Outcome(Enum):
    """What became of a commit; the highest that a rank knows holds for all."""

    PENDING, COMMITTED, DROPPED, FENCED = range(4)


@dataclass(slots=True)
class PendingSave:
    """The save that is under way since `began`, by this process's monotonic clock.

    `entry` is what this rank has for the manifest, None until it is written; `given_up` has no time left; what is
    `torn` was found to be no copy of what the GPU had; `failure` is why it was dropped here; `refused`, by a store that
    will refuse the next one as well.
    """

    commit: Commit
    promise: Promise
    why: Why
    notes: Notes = NO_NOTES
    began: float = 0.0
    stall_s: float = 0.0
    told: bool = False
    entry: bytes | None = None
    upload_s: float = 0.0
    size: int = 0
    given_up: bool = False
    torn: bool = False
    failure: str | None = None
    refused: bool = False


class Dispatch:
    """Speaks with the writer; a writer that is lost fails the save that it was at, and the next starts another."""

    def __init__(self, checkpoints: Checkpoints, writer: Writer, ranks: Ranks) -> None:
        self._checkpoints = checkpoints
        self._writer = writer
        self._ranks = ranks

    def write(self, pending: PendingSave, size: int, summed: int) -> None:
        """Have this rank's object written, which lies ready in the buffer; a GPU has summed so many stretches of it."""
        rank, world = self._ranks.rank, self._ranks.world
        saving: Answer = {
            "commit": [pending.commit.generation, pending.commit.step],
            "name": f"rank-{rank:05d}-of-{world:05d}.safetensors",
            "size": size,
            "summed": summed,
        }
        if world == 1:
            level, reason = pending.promise.level.value, pending.promise.reason
            alone = {"level": level, "reason": reason, "why": pending.why.value, "base": self._base()}
            saving["alone"] = {**alone, **notes_entry(pending.notes)}
        try:
            self._writer.tell({"save": saving})
        except Lost as error:
            pending.entry = self._dropped(pending, str(error))

    def look(self, pending: PendingSave, wait_s: float) -> None:
        """Learn whether the object is written; waits at most so long."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            found = self._committed(pending) if self._ranks.world == 1 else None
            pending.entry = _entry(found.pieces[0], pending.stall_s) if found else self._dropped(pending, str(error))
            return
        if answer is None:
            return
        if "saved" in answer:
            key, size, crc32 = answer["saved"]
            piece = Piece(key=key, size=size, crc32=tuple(crc32))
            pending.entry = _entry(piece, pending.stall_s + answer["seconds"])
        else:
            pending.torn, pending.refused = "torn" in answer, answer.get("lasts", False)
            pending.entry = self._dropped(pending, answer["torn"] if pending.torn else answer["failed"])

    def put(self, pending: PendingSave, entries: list[Any]) -> None:
        """Have the manifest put, if this is rank 0; the writer of an only rank does that by itself."""
        if self._ranks.rank > 0 or self._ranks.world == 1:
            return
        pieces = tuple(
            Piece(key=key, size=size, crc32=tuple(crc32)) for key, size, crc32 in (entry["piece"] for entry in entries)
        )
        world, promise = self._ranks.world, pending.promise
        manifest = Manifest(
            commit=pending.commit, world=world, promise=promise, pieces=pieces, why=pending.why, notes=pending.notes
        )
        with contextlib.suppress(Lost):  # asked for its answer, it is lost still
            self._writer.tell({"commit": {"manifest": described(manifest), "base": self._base()}})

    def call_best(self, step: int, generation: int, metric: float) -> None:
        """Have the checkpoint of that step marked as the best; nobody waits for that."""
        base = self._base()
        commit = base if base is not None and base[1] == step else [generation, step]  # it was not saved once more
        with contextlib.suppress(Lost):
            self._writer.tell({"best": {"commit": commit, "metric": metric, "generation": generation, "base": base}})

    def outcome(self, pending: PendingSave, wait_s: float) -> tuple[Outcome, float]:
        """Return what became of the commit, and how long that took; for rank 0. Waits at most so long."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            if self._committed(pending):
                return Outcome.COMMITTED, 0.0
            self._dropped(pending, str(error))
            return Outcome.DROPPED, 0.0
        if answer is None:
            return Outcome.PENDING, 0.0
        if "committed" in answer:
            return Outcome.COMMITTED, answer["seconds"]
        if "fenced" in answer:
            say(answer["fenced"])
            return Outcome.FENCED, 0.0
        pending.refused = answer["lasts"]
        self._dropped(pending, answer["failed"])
        return Outcome.DROPPED, 0.0

    def give_up(self, pending: PendingSave) -> None:
        """End the writer at once: what it is at has failed."""
        pending.given_up = True
        self._writer.kill()

    def close(self, limit_s: float) -> None:
        """End the writer, when it has deleted what is no longer needed."""
        self._writer.close(limit_s)

    def _heard(self, wait_s: float) -> Answer | None:
        answer = self._writer.answer(wait_s)
        while answer is not None and "note" in answer:
            say(answer["note"])
            answer = self._writer.answer()
        return answer

    def _committed(self, pending: PendingSave) -> Manifest | None:
        """Return the manifest that a lost writer has put before it could say so; no commit may be made twice."""
        if pending.given_up:
            return None
        with contextlib.suppress(StoreError, CredentialsError):
            return self._checkpoints.manifest(pending.commit)
        return None

    def _dropped(self, pending: PendingSave, why: str) -> bytes:
        pending.failure = why
        say(f"rank {self._ranks.rank} could not save step {pending.commit.step}: {why}")
        return FAILED

    def _base(self) -> list[int] | None:
        base = self._checkpoints.base
        return [base.generation, base.step] if base else None


def _entry(piece: Piece, seconds: float) -> bytes:
    return json.dumps({"piece": [piece.key, piece.size, piece.crc32], "seconds": seconds}).encode()
