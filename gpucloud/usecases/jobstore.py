"""A job's objects in the store: state, spec, ledger, logs and requests from other terminals (DESIGN §6)."""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain import codec
from gpucloud.domain.errors import StoreError
from gpucloud.domain.ledger import Charge
from gpucloud.domain.state import ExitReason, JobState
from gpucloud.store import Conflict, ObjectStore, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What another terminal asked of whoever supervises the job."""

    end: ExitReason
    by: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A piece of one rank's output: `offset` is where it starts in that rank's file."""

    attempt: int
    rank: int
    offset: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart:
    """A piece of one node's use: `offset` is where it starts in that node's file, before compression."""

    attempt: int
    node_id: str
    offset: int
    key: str


class JobStore:
    """One job's objects. Methods raise StoreError; conditional writes raise Conflict."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self.store = store
        self.job = job
        self._root = f"jobs/{job}"

    @property
    def checkpoints(self) -> str:
        """The key prefix of the job's checkpoints."""
        return f"{self._root}/checkpoints"

    def load(self) -> tuple[JobState, Stored] | None:
        """Return the state as stored, with its version and times; None when there is no such job."""
        stored = self.store.get(f"{self._root}/state.json")
        if stored is None:
            return None
        try:
            return codec.from_json(JobState, stored.data), stored
        except ValueError as error:
            raise StoreError(f"{self.store.url}/{self._root}/state.json is damaged: {error}") from error

    def create(self, state: JobState, spec: bytes) -> str:
        """Write the first state and the job file as it was; Conflict when the job exists."""
        version = self.store.put(f"{self._root}/state.json", _bytes(state), if_absent=True)
        self.store.put(f"{self._root}/spec.yaml", spec)
        return version

    def replace(self, state: JobState, version: str) -> str:
        """Write the state over that version and return the new one; Conflict when another was written."""
        return self.store.put(f"{self._root}/state.json", _bytes(state), if_version=version)

    def keep_spec(self, spec: bytes) -> None:
        """Write the job file as it is now."""
        self.store.put(f"{self._root}/spec.yaml", spec)

    def bill(self, node_id: str, charges: tuple[Charge, ...]) -> None:
        """Write a node's final charges, once: a second writer finds them there."""
        try:
            self.store.put(f"{self._root}/ledger/{node_id}.json", _bytes(_Bill(charges=charges)), if_absent=True)
        except Conflict:
            return

    def charges(self) -> tuple[Charge, ...]:
        """Return every charge in the ledger."""
        found: list[Charge] = []
        for key in self.store.list(f"{self._root}/ledger/"):
            stored = self.store.get(key)
            if stored is not None:
                found += codec.from_json(_Bill, stored.data).charges
        return tuple(found)

    def ask(self, request: Request) -> None:
        """Leave a request for the supervisor."""
        self.store.put(f"{self._root}/request.json", _bytes(request))

    def request(self) -> Request | None:
        """Return the request that stands, if any."""
        stored = self.store.get(f"{self._root}/request.json")
        return codec.from_json(Request, stored.data) if stored else None

    def withdraw_request(self) -> None:
        """Remove the request: it was carried out, or a new start makes it void."""
        self.store.delete(f"{self._root}/request.json")

    def append_log(self, attempt: int, rank: int, offset: int, data: bytes) -> None:
        """Keep a piece of a rank's output; a piece that is there already is left as it is."""
        key = f"{self._root}/logs/{attempt:04d}/rank-{rank:05d}/{offset:012d}"
        try:
            self.store.put(key, data, if_absent=True)
        except Conflict:
            return

    def log_parts(self, attempt: int | None = None) -> tuple[LogPart, ...]:
        """Return the kept pieces in order of attempt, rank and offset."""
        prefix = f"{self._root}/logs/" if attempt is None else f"{self._root}/logs/{attempt:04d}/"
        found = (_LOG_KEY.search(key) for key in self.store.list(prefix))
        return tuple(LogPart(attempt=int(m[1]), rank=int(m[2]), offset=int(m[3]), key=m.string) for m in found if m)

    def log_length(self, attempt: int, rank: int) -> int:
        """Return how many bytes of a rank's output are kept."""
        parts = [part for part in self.log_parts(attempt) if part.rank == rank]
        return parts[-1].offset + len(self.read_log(parts[-1])) if parts else 0

    def read_log(self, part: LogPart) -> bytes:
        """Return the bytes of a piece."""
        stored = self.store.get(part.key)
        return stored.data if stored else b""

    def append_history(self, attempt: int, node_id: str, offset: int, data: bytes) -> None:
        """Keep a compressed piece of a node's use; a piece that is there already is left as it is."""
        key = f"{self._root}/metrics/{attempt:04d}/{node_id}-{offset:012d}.jsonl.gz"
        try:
            self.store.put(key, data, if_absent=True)
        except Conflict:
            return

    def history_parts(self, attempt: int | None = None) -> tuple[HistoryPart, ...]:
        """Return the kept pieces in order of attempt, node and offset."""
        prefix = f"{self._root}/metrics/" if attempt is None else f"{self._root}/metrics/{attempt:04d}/"
        found = (_HISTORY_KEY.search(key) for key in self.store.list(prefix))
        return tuple(HistoryPart(attempt=int(m[1]), node_id=m[2], offset=int(m[3]), key=m.string) for m in found if m)

    def history_length(self, attempt: int, node_id: str) -> int:
        """Return how many bytes of a node's use are kept, before compression. StoreError when a piece is damaged."""
        parts = [part for part in self.history_parts(attempt) if part.node_id == node_id]
        return parts[-1].offset + len(self.read_history(parts[-1])) if parts else 0

    def read_history(self, part: HistoryPart) -> bytes:
        """Return a piece's lines. StoreError when it is damaged."""
        stored = self.store.get(part.key)
        try:
            return gzip.decompress(stored.data) if stored else b""
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"{self.store.url}/{part.key} is damaged: {error}") from error


_HISTORY_KEY = re.compile(r"/metrics/(\d{4})/([^/]+)-(\d{12})\.jsonl\.gz$")
_LOG_KEY = re.compile(r"/logs/(\d{4})/rank-(\d{5})/(\d{12})$")


def job_names(store: ObjectStore) -> tuple[str, ...]:
    """Return the names of all jobs in the store."""
    found = (re.fullmatch(r"jobs/([^/]+)/state\.json", key) for key in store.list("jobs/"))
    return tuple(m[1] for m in found if m)


def _bytes(value: object) -> bytes:
    return codec.to_json(value).encode()
