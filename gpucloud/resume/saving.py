"""Saves a checkpoint by all ranks beside the training: copied at one step, committed at a later one.

A save has three stages, which all ranks enter at the same step, as the numbers that they compare at every step say:
each rank's writer moves its object; when all have, rank 0's writer puts the manifest; when that is done it counts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.domain.manifest import Commit, Promise, Why
from gpucloud.resume.cadence import Cadence, Moment, is_better_anew, is_due
from gpucloud.resume.capture import Capture
from gpucloud.resume.dispatch import FAILED, Dispatch, Flight, Outcome
from gpucloud.resume.folder import say
from gpucloud.resume.memory import HINT, NoMemory
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.sharded import Unplanned
from gpucloud.resume.writer import Writer
from gpucloud.store.checkpoints import Checkpoints, Fenced

NOTICE_LEAVES_S = 90.0
"""Of the two minutes between a notice and the end of a spot machine, what is left for a save."""

_SLOWED = 0.03  # of an upload's time is what training loses beside it
_LEAST_COST_S = 0.05
_POLL_S = 0.02


class _Stage(Enum):
    IDLE = auto()
    WRITING = auto()
    COMMITTING = auto()


@dataclass(frozen=True, slots=True)
class News:
    """What a rank tells the others at a step: its writer is not done yet; what became of the commit, and how soon."""

    busy: int = 0
    outcome: int = 0
    commit_ms: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """Return it as numbers of which the highest over all ranks counts."""
        return self.busy, self.outcome, self.commit_ms


class Saver:
    """Saves, one at a time; one that fails is dropped on all ranks alike, and training goes on.

    `committed` is the newest step that counts; `longest_s` is how long a save took from its copy to its commit at most,
    None before the first; `no_memory` says what the newest save lacked, None where it had it.
    """

    def __init__(
        self, checkpoints: Checkpoints, writer: Writer, capture: Capture, ranks: Ranks, committed: int
    ) -> None:
        self.committed = committed
        self.longest_s: float | None = None
        self.no_memory: str | None = None
        self._dispatch = Dispatch(checkpoints, writer, ranks)
        self._capture = capture
        self._ranks = ranks
        self._cost_s = _LEAST_COST_S
        self._upload_s = 0.0
        self._stage = _Stage.IDLE
        self._flight: Flight | None = None
        self._started_at = self._saved_at = time.monotonic()
        self._warned = False
        self._held = False

    @property
    def step(self) -> int | None:
        """The step that is being saved, None without one."""
        return self._flight.commit.step if self._flight is not None else None

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

    def prepare(self, extra: dict[str, Any]) -> None:
        """Make memory ready for a state like the present one."""
        try:
            self._capture.prepare(extra)
        except NoMemory as error:
            self._lacks_memory(error)

    def begin(
        self, commit: Commit, promise: Promise, extra: dict[str, Any], why: Why, *, steps_are_seen: bool = True
    ) -> None:
        """Copy this rank's share and have it written. The save before must be over. Raises UsageError."""
        flight = self._copy(commit, promise, extra, why, steps_are_seen=steps_are_seen)
        if not flight.told and not self._capture.under_way():
            self._tell(flight)
        self._saved_at = time.monotonic()
        flight.stall_s = self._saved_at - flight.began

    def hold(
        self, commit: Commit, promise: Promise, extra: dict[str, Any], why: Why, *, steps_are_seen: bool = True
    ) -> None:
        """Copy this rank's share, and wait until it is copied; nothing is written of it before `release`.

        Each rank does so by itself; nothing is held where they would have to agree first. The save before must be over.
        Raises UsageError.
        """
        self._held = True
        try:
            flight = self._copy(commit, promise, extra, why, steps_are_seen=steps_are_seen, alone=True)
        except Unplanned:
            self.drop()
            return
        if not flight.told:
            self._capture.wait()
        if flight.told or self._capture.spoilt():
            self.drop()

    def release(self, why: Why | None) -> None:
        """Have what is held written, because of that if it is told; all ranks do so, or none."""
        flight = self._flight
        if self._held and flight is not None:
            self._held = False
            flight.began, flight.why = time.monotonic(), why or flight.why
            self._tell(flight)

    def drop(self) -> None:
        """Forget what is held, if anything is."""
        if self._held:
            self._flight, self._stage, self._held = None, _Stage.IDLE, False

    def _copy(
        self,
        commit: Commit,
        promise: Promise,
        extra: dict[str, Any],
        why: Why,
        *,
        steps_are_seen: bool,
        alone: bool = False,
    ) -> Flight:
        began = time.monotonic()
        flight = self._flight = Flight(commit, promise, why, began)
        self._stage = _Stage.WRITING
        try:
            self._capture.begin(extra, steps_are_seen=steps_are_seen, alone=alone)
        except UsageError:
            self._flight, self._stage, self._held = None, _Stage.IDLE, False
            raise
        except (NoMemory, torch.OutOfMemoryError) as error:
            self._lacks_memory(error)
            flight.told, flight.entry = True, FAILED
        return flight

    def news(self, wait_s: float = 0.0) -> News:
        """Return what the other ranks must know; waits at most so long for the writer to say something."""
        flight = self._flight
        if flight is None:
            return News()
        if self._stage is _Stage.WRITING:
            if not flight.told and not self._capture.under_way():
                self._tell(flight)
            if flight.told and flight.entry is None:
                self._dispatch.look(flight, wait_s)
            if flight.torn:
                self._capture.mistrust()
            return News(busy=int(flight.entry is None))
        if self._ranks.rank > 0:
            time.sleep(min(wait_s, _POLL_S))
            return News()
        outcome, commit_s = self._dispatch.outcome(flight, wait_s)
        return News(outcome=outcome.value, commit_ms=round(1000 * commit_s))

    def advance(self, agreed: News) -> None:
        """Go on to the next stage when all ranks can. Raises Fenced, on every rank, when another attempt took over."""
        flight = self._flight
        if flight is None:
            return
        if self._stage is _Stage.WRITING and not agreed.busy:
            entries = [json.loads(entry) for entry in self._ranks.gathered(flight.entry or FAILED)]
            if not all(entries):
                self._over(Outcome.DROPPED)
                return
            flight.upload_s = max(entry["seconds"] for entry in entries)
            flight.size = sum(entry["piece"][1] for entry in entries)
            self._stage = _Stage.COMMITTING
            self._dispatch.put(flight, entries)
        elif self._stage is _Stage.COMMITTING and agreed.outcome:
            self._learn(flight, agreed.commit_ms / 1000)
            self._over(Outcome(agreed.outcome))

    def is_in_the_way(self, step: int, left_s: float) -> bool:
        """Whether the save under way, not one of this step, leaves no time for one that there is time for."""
        flight = self._flight
        if flight is None or flight.commit.step == step or self._stage is _Stage.COMMITTING:
            return False
        return is_better_anew(save_s=self._upload_s, gone_s=time.monotonic() - flight.began, left_s=left_s)

    def finish(self, limit_s: float = float("inf")) -> None:
        """Wait until nothing is under way; what is not committed after `limit_s` is dropped. Raises Fenced."""
        deadline = time.monotonic() + limit_s
        if self._flight is not None and not self._flight.told:
            self._capture.wait()
        while self._flight is not None:
            late = time.monotonic() > deadline
            if late:
                self._dispatch.give_up(self._flight)
            agreed = self._ranks.highest(*self.news(0.0 if late else _POLL_S).numbers())
            self.advance(News(*agreed))

    def close(self, limit_s: float) -> None:
        """End the writer, when it has deleted what is no longer needed."""
        self._dispatch.close(limit_s)
        self._capture.close()

    def _tell(self, flight: Flight) -> None:
        """Have the writer write what was captured."""
        flight.told = True
        if why := self._capture.spoilt():
            say(why)
            flight.entry = FAILED
        else:
            self._dispatch.write(flight, self._capture.size, self._capture.summed)

    def _learn(self, flight: Flight, commit_s: float) -> None:
        """Remember what the save took: what training lost, and how long it was until it counted."""
        self._upload_s = flight.upload_s + commit_s
        self._cost_s = max(flight.stall_s + _SLOWED * self._upload_s, _LEAST_COST_S)

    def _over(self, outcome: Outcome) -> None:
        flight, self._flight, self._stage = self._flight, None, _Stage.IDLE
        if flight is None:
            return
        if outcome is Outcome.FENCED:
            raise Fenced(
                f"another attempt has taken over from generation {flight.commit.generation}",
                hint="this one stops; nothing is lost",
            )
        if outcome is Outcome.COMMITTED:
            self.no_memory = None
            self.longest_s = max(self._upload_s, self.longest_s or 0.0)
            self.committed = flight.commit.step
            self._warn(flight.size)

    def _lacks_memory(self, error: Exception) -> None:
        """Say once that nothing is saved; the next save looks again."""
        said, self.no_memory = self.no_memory, f"there is no memory for it: {error}"
        if said is None and (self._ranks.rank == 0 or not getattr(error, "of_all", False)):
            since = f"since step {self.committed}" if self.committed else "so far"
            say(
                f"nothing can be saved, {self.no_memory}; training goes on, and what was done {since} is lost when a "
                f"machine is taken: {HINT}"
            )

    def _warn(self, size: int) -> None:
        """Say once that a notice would come too late for a state of this size."""
        if self._upload_s > NOTICE_LEAVES_S and not self._warned and self._ranks.rank == 0:
            self._warned = True
            most = size * NOTICE_LEAVES_S / self._upload_s
            say(
                f"the state has {size / 1e9:.1f} GB, and a notice leaves {NOTICE_LEAVES_S:.0f} s, in which this store "
                f"takes {most / 1e9:.1f} GB: when a machine is taken, the steps since the last save are lost"
            )
