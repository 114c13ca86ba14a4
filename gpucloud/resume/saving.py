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

from gpucloud.domain.errors import UsageError
from gpucloud.domain.manifest import Commit, Manifest, Piece
from gpucloud.resume.cadence import Cadence, Moment, is_due
from gpucloud.resume.capture import Capture
from gpucloud.resume.folder import say
from gpucloud.resume.promise import Level
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.writer import Answer, Lost, Writer
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


class _Outcome(Enum):
    PENDING, COMMITTED, DROPPED, FENCED = range(4)


@dataclass(frozen=True, slots=True)
class News:
    """What a rank tells the others at a step: its writer is not done yet; what became of the commit, and how soon."""

    busy: int = 0
    outcome: int = 0
    commit_ms: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """Return it as numbers of which the highest over all ranks counts."""
        return self.busy, self.outcome, self.commit_ms


@dataclass(slots=True)
class _Flight:
    """The save that is under way."""

    commit: Commit
    level: Level
    began: float
    stall_s: float = 0.0
    told: bool = False
    entry: bytes | None = None
    upload_s: float = 0.0
    size: int = 0


class Saver:
    """Saves, one at a time; one that fails is dropped on all ranks alike, and training goes on.

    `committed` is the newest step that counts; `longest_s` is how long a save took from its copy to its commit at most,
    None before the first.
    """

    def __init__(
        self, checkpoints: Checkpoints, writer: Writer, capture: Capture, ranks: Ranks, committed: int
    ) -> None:
        self.committed = committed
        self.longest_s: float | None = None
        self._checkpoints = checkpoints
        self._writer = writer
        self._capture = capture
        self._ranks = ranks
        self._cost_s = _LEAST_COST_S
        self._upload_s = 0.0
        self._stage = _Stage.IDLE
        self._flight: _Flight | None = None
        self._started_at = self._saved_at = time.monotonic()
        self._warned = False

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way."""
        return self._flight is not None

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

    def begin(self, commit: Commit, level: Level, extra: dict[str, Any]) -> None:
        """Copy this rank's share and have it written. The save before must be over. Raises UsageError."""
        began = time.monotonic()
        flight = self._flight = _Flight(commit, level, began)
        self._stage = _Stage.WRITING
        try:
            self._capture.begin(extra)
        except UsageError:
            self._flight, self._stage = None, _Stage.IDLE
            raise
        if not self._capture.under_way():
            self._tell(flight)
        self._saved_at = time.monotonic()
        flight.stall_s = self._saved_at - began

    def news(self, wait_s: float = 0.0) -> News:
        """Return what the other ranks must know; waits at most so long for the writer to say something."""
        flight = self._flight
        if flight is None:
            return News()
        if self._stage is _Stage.WRITING:
            if not flight.told and not self._capture.under_way():
                self._tell(flight)
            if flight.told and flight.entry is None:
                flight.entry = self._written(flight, wait_s)
            return News(busy=int(flight.entry is None))
        if self._ranks.rank > 0:
            time.sleep(min(wait_s, _POLL_S))
            return News()
        outcome, commit_s = self._outcome(wait_s)
        return News(outcome=outcome.value, commit_ms=round(1000 * commit_s))

    def advance(self, agreed: News) -> None:
        """Go on to the next stage when all ranks can. Raises Fenced, on every rank, when another attempt took over."""
        flight = self._flight
        if flight is None:
            return
        if self._stage is _Stage.WRITING and not agreed.busy:
            entries = [json.loads(entry) for entry in self._ranks.gathered(flight.entry or b"null")]
            if not all(entries):
                self._over(_Outcome.DROPPED)
                return
            flight.upload_s = max(entry["seconds"] for entry in entries)
            flight.size = sum(entry["piece"][1] for entry in entries)
            self._stage = _Stage.COMMITTING
            if self._ranks.rank == 0:
                self._put_manifest(flight, entries)
        elif self._stage is _Stage.COMMITTING and agreed.outcome:
            self._learn(flight, agreed.commit_ms / 1000)
            self._over(_Outcome(agreed.outcome))

    def finish(self, limit_s: float = float("inf")) -> None:
        """Wait until nothing is under way; what is not committed after `limit_s` is dropped. Raises Fenced."""
        deadline = time.monotonic() + limit_s
        if self._flight is not None and not self._flight.told:
            self._capture.wait()
        while self._flight is not None:
            late = time.monotonic() > deadline
            if late:
                self._writer.kill()  # the next answer is that it is lost
            agreed = self._ranks.highest(*self.news(0.0 if late else _POLL_S).numbers())
            self.advance(News(*agreed))

    def close(self, limit_s: float) -> None:
        """End the writer, when it has deleted what is no longer needed."""
        self._writer.close(limit_s)
        self._capture.close()

    def _tell(self, flight: _Flight) -> None:
        """Have the writer write what was captured."""
        flight.told = True
        if self._capture.torn():
            say("parameters were changed between run.step() and the optimizer's next step: from now on saves wait")
            flight.entry = b"null"
            return
        rank, world = self._ranks.rank, self._ranks.world
        saving: Answer = {
            "commit": [flight.commit.generation, flight.commit.step],
            "name": f"rank-{rank:05d}-of-{world:05d}.safetensors",
            "size": self._capture.size,
        }
        if world == 1:
            saving["alone"] = {"level": flight.level.value, "base": self._base()}
        try:
            self._writer.tell({"save": saving})
        except Lost as error:
            flight.entry = self._dropped(str(error))

    def _written(self, flight: _Flight, wait_s: float) -> bytes | None:
        """Return this rank's entry once its object is written, `null` when it could not be, None before."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            return self._dropped(str(error))
        if answer is None:
            return None
        if "saved" in answer:
            return json.dumps({"piece": answer["saved"], "seconds": flight.stall_s + answer["seconds"]}).encode()
        return self._dropped(answer["failed"])

    def _dropped(self, why: str) -> bytes:
        step = self._flight.commit.step if self._flight else 0
        say(f"rank {self._ranks.rank} could not save step {step}: {why}")
        return b"null"

    def _put_manifest(self, flight: _Flight, entries: list[Any]) -> None:
        if self._ranks.world == 1:
            return  # its writer does that by itself
        pieces = tuple(
            Piece(key=key, size=size, crc32=tuple(crc32)) for key, size, crc32 in (entry["piece"] for entry in entries)
        )
        manifest = Manifest(commit=flight.commit, world=self._ranks.world, level=flight.level.value, pieces=pieces)
        with contextlib.suppress(Lost):  # asked for its answer, it is lost still
            self._writer.tell({"commit": {"manifest": described(manifest), "base": self._base()}})

    def _outcome(self, wait_s: float) -> tuple[_Outcome, float]:
        """Return what became of the commit, by rank 0's writer."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            self._dropped(str(error))
            return _Outcome.DROPPED, 0.0
        if answer is None:
            return _Outcome.PENDING, 0.0
        if "committed" in answer:
            return _Outcome.COMMITTED, answer["seconds"]
        if "fenced" in answer:
            say(answer["fenced"])
            return _Outcome.FENCED, 0.0
        self._dropped(answer["failed"])
        return _Outcome.DROPPED, 0.0

    def _heard(self, wait_s: float) -> Answer | None:
        answer = self._writer.answer(wait_s)
        while answer is not None and "note" in answer:
            say(answer["note"])
            answer = self._writer.answer()
        return answer

    def _base(self) -> list[int] | None:
        base = self._checkpoints.base
        return [base.generation, base.step] if base else None

    def _learn(self, flight: _Flight, commit_s: float) -> None:
        """Remember what the save took: what training lost, and how long it was until it counted."""
        self._upload_s = flight.upload_s + commit_s
        self._cost_s = max(flight.stall_s + _SLOWED * self._upload_s, _LEAST_COST_S)

    def _over(self, outcome: _Outcome) -> None:
        flight, self._flight, self._stage = self._flight, None, _Stage.IDLE
        if flight is None:
            return
        if outcome is _Outcome.FENCED:
            raise Fenced(
                f"another attempt has taken over from generation {flight.commit.generation}",
                hint="this one stops; nothing is lost",
            )
        if outcome is _Outcome.COMMITTED:
            self.longest_s = max(self._upload_s, self.longest_s or 0.0)
            self.committed = flight.commit.step
            self._warn(flight.size)

    def _warn(self, size: int) -> None:
        """Say once that a notice would come too late for a state of this size."""
        if self._upload_s > NOTICE_LEAVES_S and not self._warned and self._ranks.rank == 0:
            self._warned = True
            most = size * NOTICE_LEAVES_S / self._upload_s
            say(
                f"the state has {size / 1e9:.1f} GB, and a notice leaves {NOTICE_LEAVES_S:.0f} s, in which this store "
                f"takes {most / 1e9:.1f} GB: when a machine is taken, the steps since the last save are lost"
            )
