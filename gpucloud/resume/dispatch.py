"""What a rank has its writer do for a save, and what comes of that."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.manifest import Commit, Manifest, Piece, Promise, Why
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.writer import Answer, Lost, Writer
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.store.writing import described

FAILED = b"null"
"""The entry of a rank whose object was not written."""


class Outcome(Enum):
    """What became of a commit; the highest that a rank knows holds for all."""

    PENDING, COMMITTED, DROPPED, FENCED = range(4)


@dataclass(slots=True)
class Flight:
    """The save that is under way since `began`, by this process's monotonic clock.

    `entry` is what this rank has for the manifest, None until it is written; `given_up` has no time left; what is
    `torn` was found to be no copy of what the GPU had.
    """

    commit: Commit
    promise: Promise
    why: Why
    began: float
    stall_s: float = 0.0
    told: bool = False
    entry: bytes | None = None
    upload_s: float = 0.0
    size: int = 0
    given_up: bool = False
    torn: bool = False


class Dispatch:
    """Speaks with the writer; a writer that is lost fails the save that it was at, and the next starts another."""

    def __init__(self, checkpoints: Checkpoints, writer: Writer, ranks: Ranks) -> None:
        self._checkpoints = checkpoints
        self._writer = writer
        self._ranks = ranks

    def write(self, flight: Flight, size: int, summed: int) -> None:
        """Have this rank's object written, which lies ready in the arena; a GPU has summed so many stretches of it."""
        rank, world = self._ranks.rank, self._ranks.world
        saving: Answer = {
            "commit": [flight.commit.generation, flight.commit.step],
            "name": f"rank-{rank:05d}-of-{world:05d}.safetensors",
            "size": size,
            "summed": summed,
        }
        if world == 1:
            level, reason = flight.promise.level.value, flight.promise.reason
            saving["alone"] = {"level": level, "reason": reason, "why": flight.why.value, "base": self._base()}
        try:
            self._writer.tell({"save": saving})
        except Lost as error:
            flight.entry = self._dropped(flight, str(error))

    def look(self, flight: Flight, wait_s: float) -> None:
        """Learn whether the object is written; waits at most so long."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            found = self._committed(flight) if self._ranks.world == 1 else None
            flight.entry = _entry(found.pieces[0], flight.stall_s) if found else self._dropped(flight, str(error))
            return
        if answer is None:
            return
        if "saved" in answer:
            key, size, crc32 = answer["saved"]
            piece = Piece(key=key, size=size, crc32=tuple(crc32))
            flight.entry = _entry(piece, flight.stall_s + answer["seconds"])
        else:
            flight.torn = "torn" in answer
            flight.entry = self._dropped(flight, answer["torn"] if flight.torn else answer["failed"])

    def put(self, flight: Flight, entries: list[Any]) -> None:
        """Have the manifest put, if this is rank 0; the writer of an only rank does that by itself."""
        if self._ranks.rank > 0 or self._ranks.world == 1:
            return
        pieces = tuple(
            Piece(key=key, size=size, crc32=tuple(crc32)) for key, size, crc32 in (entry["piece"] for entry in entries)
        )
        world, promise = self._ranks.world, flight.promise
        manifest = Manifest(commit=flight.commit, world=world, promise=promise, pieces=pieces, why=flight.why)
        with contextlib.suppress(Lost):  # asked for its answer, it is lost still
            self._writer.tell({"commit": {"manifest": described(manifest), "base": self._base()}})

    def outcome(self, flight: Flight, wait_s: float) -> tuple[Outcome, float]:
        """Return what became of the commit, and how long that took; for rank 0. Waits at most so long."""
        try:
            answer = self._heard(wait_s)
        except Lost as error:
            if self._committed(flight):
                return Outcome.COMMITTED, 0.0
            self._dropped(flight, str(error))
            return Outcome.DROPPED, 0.0
        if answer is None:
            return Outcome.PENDING, 0.0
        if "committed" in answer:
            return Outcome.COMMITTED, answer["seconds"]
        if "fenced" in answer:
            say(answer["fenced"])
            return Outcome.FENCED, 0.0
        self._dropped(flight, answer["failed"])
        return Outcome.DROPPED, 0.0

    def give_up(self, flight: Flight) -> None:
        """End the writer at once: what it is at has failed."""
        flight.given_up = True
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

    def _committed(self, flight: Flight) -> Manifest | None:
        """Return the manifest that a lost writer has put before it could say so; no commit may be made twice."""
        if flight.given_up:
            return None
        with contextlib.suppress(StoreError, CredentialsError):
            return self._checkpoints.manifest(flight.commit)
        return None

    def _dropped(self, flight: Flight, why: str) -> bytes:
        say(f"rank {self._ranks.rank} could not save step {flight.commit.step}: {why}")
        return FAILED

    def _base(self) -> list[int] | None:
        base = self._checkpoints.base
        return [base.generation, base.step] if base else None


def _entry(piece: Piece, seconds: float) -> bytes:
    return json.dumps({"piece": [piece.key, piece.size, piece.crc32], "seconds": seconds}).encode()
