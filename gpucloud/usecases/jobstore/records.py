"""What a job's attempts leave in its store: output, how nodes were launched, how they were used.

Pieces are written once, under the offset at which they begin: whoever writes one again changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.output import DatedPiece, read_piece, with_times
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.domain.untrusted import HISTORY_BYTES, unpacked
from gpucloud.domain.variables import GPUCLOUD_RANKS
from gpucloud.store import ObjectStore, get_small, put_once

_HISTORY_KEY = re.compile(r"/metrics/(\d{4})/([^/]+)-(\d{12})\.jsonl\.gz$")
_LAUNCH_KEY = re.compile(r"/launches/(\d{4})/(\d{5})\.json$")
BEFORE = 0
"""The attempt that a failed setup's output is kept under: it came before the first."""

_LOG_KEY = re.compile(r"/logs/(\d{4})/rank-(\d{5})/(\d{12})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A piece of one rank's output: `offset` is where it starts in that rank's file."""

    attempt: int
    rank: int
    offset: int
    key: str


def fetched_until(state: JobState, written_at: datetime) -> datetime:
    """Return until when all machines of the open attempt were heard: a supervisor that hears none fetches nothing."""
    members = {member.node_id for member in state.attempt.members} if state.attempt is not None else set()
    words = [one.last_word_at for one in state.nodes if one.node_id in members and one.last_word_at is not None]
    return min([written_at, *words])


def unheard_from(state: JobState, attempt: Attempt, nodes: Container[str | None], silent: timedelta) -> datetime | None:
    """Return from when an ended attempt's rented machines, of these nodes, were not heard to their end; None for none.

    One that tells nothing for less than `silent` is heard: who supervised then fetched what there was.
    """
    told = {one.node_id: one for one in state.nodes if one.pool.market is not Market.OWNED}
    lives = [told[one.node_id] for one in attempt.members if one.outcome is None and one.node_id in told]
    heard = [(one.last_word_at, one.ended_at) for one in lives if one.node_id in nodes]
    over_at = attempt.ended_at
    lost = [at for at, end in heard if at and end and over_at and at < over_at and end - at > silent]
    return min(lost, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart:
    """A piece of one node's use: `offset` is where it starts in that node's file, before compression."""

    attempt: int
    node_id: str
    offset: int
    key: str


_MOST_RANKS = 1024  # a node wrote its launch, and may have written anything


def launched_ranks(data: bytes) -> int | None:
    """Return how many ranks a launch as JSON says that its node has; None where it does not."""
    try:
        env = dict(json.loads(data)["env"])
        ranks = env.get(GPUCLOUD_RANKS)
        count = len(str(ranks).split()) if ranks else int(env.get("LOCAL_WORLD_SIZE", 0))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    return count if 0 < count <= _MOST_RANKS else None


class DamagedPiece(StoreError):
    """A piece that nobody can read: machines that drive their job may put anything there."""


class AttemptRecords:
    """The records of one job's attempts. Methods raise StoreError."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._root = f"jobs/{job}"

    def keep_attempt_lock(self, attempt: int, lock: dict[str, object]) -> None:
        """Write what the attempt's nodes were made of (`attempt_lock`); one object for all of them."""
        data = json.dumps(lock, sort_keys=True).encode()
        self._store.put(f"{self._launches_of(attempt)}lock.json", data)

    def append_log(self, attempt: int, rank: int, offset: int, piece: DatedPiece) -> None:
        """Keep a piece of a rank's output; a piece that is there already is left as it is."""
        put_once(self._store, f"{self._root}/logs/{attempt:04d}/rank-{rank:05d}/{offset:012d}", with_times(piece))

    def keep_launch(self, attempt: int, node: int, data: bytes) -> None:
        """Keep how a node of an attempt was launched; what is kept already is left as it is."""
        put_once(self._store, f"{self._launches_of(attempt)}{node:05d}.json", data)

    def launches(self, attempt: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield attempt, node's rank and its launch as JSON, in their order."""
        for key in self._store.list(f"{self._root}/launches/" if attempt is None else self._launches_of(attempt)):
            found = _LAUNCH_KEY.search(key)
            if found and (stored := self._store.get(key)):
                yield int(found[1]), int(found[2]), stored.data

    def workers(self, attempt: int) -> int | None:
        """Return how many ranks each node of the attempt was launched with; None where its launch does not tell."""
        stored = self._store.get(f"{self._launches_of(attempt)}{0:05d}.json")  # listing costs more, and is slower
        found = (data for _, _, data in self.launches(attempt)) if stored is None else iter((stored.data,))
        return next(map(launched_ranks, found), None)

    def _launches_of(self, attempt: int) -> str:
        return f"{self._root}/launches/{attempt:04d}/"

    def log_parts(self, attempt: int | None = None) -> tuple[LogPart, ...]:
        """Return the kept pieces in order of attempt, rank and offset."""
        prefix = f"{self._root}/logs/" if attempt is None else f"{self._root}/logs/{attempt:04d}/"
        found = (_LOG_KEY.search(key) for key in self._store.list(prefix))
        return tuple(LogPart(attempt=int(m[1]), rank=int(m[2]), offset=int(m[3]), key=m.string) for m in found if m)

    def log_end(self, attempt: int, rank: int) -> tuple[int, int]:
        """Return how many bytes of a rank's output are kept, and where its node's file of times goes on."""
        keys = self._store.list(f"{self._root}/logs/{attempt:04d}/rank-{rank:05d}/")
        found = [match for key in keys if (match := _LOG_KEY.search(key))]
        if not found:
            return 0, 0
        last = LogPart(attempt=attempt, rank=rank, offset=int(found[-1][3]), key=found[-1].string)
        piece = self.read_dated(last)
        return last.offset + len(piece.data), piece.place

    def read_log(self, part: LogPart) -> bytes:
        """Return the bytes of a piece; none of one that is too large for any that was kept: a machine put it there."""
        return self.read_dated(part).data

    def read_dated(self, part: LogPart) -> DatedPiece:
        """Return the bytes of a piece and when they were written, as far as that is known."""
        stored = get_small(self._store, part.key)
        return read_piece(stored.data if stored else b"")

    def append_history(self, attempt: int, node_id: str, offset: int, data: bytes) -> None:
        """Keep a compressed piece of a node's use; a piece that is there already is left as it is."""
        put_once(self._store, f"{self._root}/metrics/{attempt:04d}/{node_id}-{offset:012d}.jsonl.gz", data)

    def history_parts(self, attempt: int | None = None) -> tuple[HistoryPart, ...]:
        """Return the kept pieces in order of attempt, node and offset."""
        return self._history_parts("" if attempt is None else f"{attempt:04d}/")

    def _history_parts(self, prefix: str) -> tuple[HistoryPart, ...]:
        found = (_HISTORY_KEY.search(key) for key in self._store.list(f"{self._root}/metrics/{prefix}"))
        return tuple(HistoryPart(attempt=int(m[1]), node_id=m[2], offset=int(m[3]), key=m.string) for m in found if m)

    def history_length(self, attempt: int, node_id: str) -> int:
        """Return how many bytes of a node's use are kept, before compression. DamagedPiece."""
        parts = [part for part in self._history_parts(f"{attempt:04d}/{node_id}-") if part.node_id == node_id]
        return parts[-1].offset + len(self.read_history(parts[-1])) if parts else 0

    def read_history(self, part: HistoryPart) -> bytes:
        """Return a piece's lines. DamagedPiece."""
        stored = self._store.get(part.key)
        try:
            return unpacked(stored.data, HISTORY_BYTES) if stored else b""
        except ValueError as error:
            raise DamagedPiece(f"{self._store.url}/{part.key} is damaged: {error}") from error
