"""Saves a checkpoint by all ranks, when it is due: each uploads its files, rank 0 commits."""

from __future__ import annotations

import json
import time
from typing import Any

from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.manifest import Commit, Manifest, Piece
from gpucloud.resume.cadence import Cadence, Moment, is_due
from gpucloud.resume.checkpoints import Checkpoints, Fenced
from gpucloud.resume.folder import say
from gpucloud.resume.promise import Level
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state import TrainingState

_COMMITTED, _DROPPED, _FENCED = range(3)


class Saver:
    """Saves; a save that fails is dropped on all ranks alike, and training goes on. `committed` is the newest step.

    `longest_s` is how long the longest save took until its commit, None before the first.
    """

    def __init__(
        self, checkpoints: Checkpoints, state: TrainingState, ranks: Ranks, *, committed: int, cost_s: float
    ) -> None:
        self.committed = committed
        self._checkpoints = checkpoints
        self._state = state
        self._ranks = ranks
        self._cost_s = cost_s
        self.longest_s: float | None = None
        self._started_at = self._saved_at = time.monotonic()

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether to save after this step, by this rank's clock."""
        now = time.monotonic()
        moment = Moment(
            step=step,
            since_start_s=now - self._started_at,
            since_save_s=now - self._saved_at,
            cost_s=self._cost_s,
            anything_saved=self.committed > 0,
        )
        return is_due(cadence, moment)

    def save(self, commit: Commit, level: Level, extra: dict[str, Any]) -> bool:
        """Return whether the step is committed. Raises Fenced, on every rank, when another attempt took over."""
        if self.committed == commit.step:
            return True
        began = time.monotonic()
        outcome = self._save(commit, level, extra)
        self._saved_at = time.monotonic()
        if outcome == _FENCED:
            raise Fenced(
                f"another attempt has taken over from generation {commit.generation}",
                hint="this one stops; nothing is lost",
            )
        if outcome == _COMMITTED:
            self._cost_s = self._saved_at - began
            self.longest_s = max(self._cost_s, self.longest_s or 0.0)
            self.committed = commit.step
        return outcome == _COMMITTED

    def _save(self, commit: Commit, level: Level, extra: dict[str, Any]) -> int:
        entries = self._ranks.gathered(self._upload(commit, extra))
        outcome = self._commit(commit, level, entries) if self._ranks.rank == 0 else _COMMITTED
        (outcome,) = self._ranks.highest(outcome)
        if outcome == _COMMITTED and self._ranks.rank == 0:
            self._collect()
        return outcome

    def _upload(self, commit: Commit, extra: dict[str, Any]) -> bytes:
        files = self._state.capture(self._ranks.rank, self._ranks.world, extra)
        try:
            pieces = [self._checkpoints.upload(commit, name, data) for name, data in files]
        except (StoreError, CredentialsError) as error:
            say(f"rank {self._ranks.rank} could not save step {commit.step}: {error} ({error.hint})")
            return b""
        return json.dumps([[piece.key, piece.size, piece.crc32] for piece in pieces]).encode()

    def _commit(self, commit: Commit, level: Level, entries: tuple[bytes, ...]) -> int:
        if not all(entries):
            return _DROPPED
        pieces = tuple(
            Piece(key=key, size=size, crc32=tuple(crc32)) for entry in entries for key, size, crc32 in json.loads(entry)
        )
        manifest = Manifest(commit=commit, world=self._ranks.world, level=level.value, pieces=pieces)
        try:
            self._checkpoints.commit(manifest)
        except Fenced as error:
            say(str(error))
            return _FENCED
        except (StoreError, CredentialsError) as error:
            say(f"step {commit.step} could not be committed: {error} ({error.hint})")
            return _DROPPED
        return _COMMITTED

    def _collect(self) -> None:
        try:
            self._checkpoints.collect()
        except (StoreError, CredentialsError) as error:
            say(f"older checkpoints could not be deleted, the next save tries again: {error}")
