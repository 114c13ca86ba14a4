"""A job's objects in the store: state, spec, ledger, logs and requests from other terminals (DESIGN §6)."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from gpucloud.domain import codec
from gpucloud.domain.billed import Billed
from gpucloud.domain.data import DataSet, pack, unpack
from gpucloud.domain.errors import StoreError
from gpucloud.domain.ledger import Charge
from gpucloud.domain.state import BudgetWish, ExitReason, JobState
from gpucloud.store import Conflict, ObjectStore, Stored

_TRIES = 50  # of a compare-and-swap that others come before
_HISTORY_KEY = re.compile(r"/metrics/(\d{4})/([^/]+)-(\d{12})\.jsonl\.gz$")
_LAUNCH_KEY = re.compile(r"/launches/(\d{4})/(\d{5})\.json$")
_PAGE_KEY = re.compile(r"/ledger/pages/\d{6}\.json$")
_LOG_KEY = re.compile(r"/logs/(\d{4})/rank-(\d{5})/(\d{12})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What other terminals asked of whoever supervises the job: its end (`by` whom, when), and other budgets."""

    end: ExitReason | None = None
    by: str = ""
    at: datetime | None = None
    budgets: tuple[BudgetWish, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What the bills of these nodes say, in one object: of thousands, each would be a request of its own."""

    nodes: tuple[str, ...]
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

    def spec(self) -> bytes | None:
        """Return the job file as it was kept last; None when there is none."""
        stored = self.store.get(f"{self._root}/spec.yaml")
        return stored.data if stored else None

    def data_set(self, source: str) -> DataSet | None:
        """Return the data set as it was when the job began; None when it was not listed yet."""
        stored = self.store.get(self._data_key(source))
        try:
            return unpack(stored.data) if stored else None
        except ValueError as error:
            raise StoreError(f"{self.store.url}/{self._data_key(source)} is damaged: {error}") from error

    def keep_data_set(self, found: DataSet) -> None:
        """Write down what a data set consists of, for as long as the job lives."""
        self.store.put(self._data_key(found.source), pack(found))

    def bill(self, node_id: str, charges: tuple[Charge, ...]) -> bool:
        """Write a node's final charges, once; False when they are there already, which then count."""
        return self._bill(node_id, charges)

    def bill_beside(self, what: str, charges: tuple[Charge, ...]) -> bool:
        """Write charges that are no node's, once; False when there are some of that name already."""
        return self._bill(f"beside/{what}", charges)

    def bill_of(self, node_id: str) -> tuple[Charge, ...]:
        """Return a node's charges; none when it has no bill yet."""
        stored = self.store.get(self._bill_key(node_id))
        return codec.from_json(_Bill, stored.data).charges if stored is not None else ()

    def copy_bills(self, page: int, bills: Mapping[str, tuple[Charge, ...]]) -> None:
        """Write a page of nodes' bills again, as one object; they stay, and are what counts."""
        charges = tuple(charge for bill in bills.values() for charge in bill)
        with suppress(Conflict):
            data = _bytes(_Page(nodes=tuple(bills), charges=charges))
            self.store.put(f"{self._root}/ledger/pages/{page:06d}.json", data, if_absent=True)

    def charges(self) -> tuple[Charge, ...]:
        """Return every charge in the ledger."""
        keys = self.store.list(f"{self._root}/ledger/")
        found: list[Charge] = []
        read: set[str] = set()
        for key in (key for key in keys if _PAGE_KEY.search(key)):
            if (stored := self.store.get(key)) is not None:
                page = codec.from_json(_Page, stored.data)
                fresh = {node for node in page.nodes if self._bill_key(node) not in read}
                found += (charge for charge in page.charges if charge.node_id in fresh)
                read.update(map(self._bill_key, page.nodes))
        for key in keys:
            if key not in read and not _PAGE_KEY.search(key) and (stored := self.store.get(key)) is not None:
                found += codec.from_json(_Bill, stored.data).charges
        return tuple(found)

    def billed(self) -> Billed | None:
        """Return the cloud's own figures as they were asked for last; None before that."""
        stored = self.store.get(f"{self._root}/billed.json")
        try:
            return codec.from_json(Billed, stored.data) if stored else None
        except ValueError as error:
            raise StoreError(f"{self.store.url}/{self._root}/billed.json is damaged: {error}") from error

    def keep_billed(self, billed: Billed) -> None:
        """Keep the cloud's own figures, in place of older ones."""
        self.store.put(f"{self._root}/billed.json", _bytes(billed))

    def ask_to_end(self, end: ExitReason, by: str, at: datetime) -> None:
        """Leave the wish that the job ends, for whoever supervises it."""
        self._change_request(lambda request: replace(request, end=end, by=by, at=at))

    def ask_for_budget(self, wish: BudgetWish) -> None:
        """Leave the wish for another budget, after those that wait already."""
        self._change_request(lambda request: replace(request, budgets=_with(request.budgets, wish)))

    def request(self) -> Request:
        """Return what is asked for now."""
        return self._request()[0]

    def withdraw_end(self) -> None:
        """Remove the wish that the job ends: a new start makes it void. Wishes for budgets stay."""
        self._change_request(lambda request: replace(request, end=None, by="", at=None))

    def take_up(self, wishes: Collection[str]) -> None:
        """Remove the wishes for budgets with these ids: they are in the state."""
        self._change_request(
            lambda request: replace(request, budgets=tuple(w for w in request.budgets if w.id not in wishes))
        )

    def keep_attempt_lock(self, attempt: int, lock: dict[str, object]) -> None:
        """Write what the attempt's nodes were made of (`attempt_lock`); one object for all of them."""
        data = json.dumps(lock, sort_keys=True).encode()
        self.store.put(f"{self._root}/attempts/{attempt:04d}/lock.json", data)

    def keep_lock(self, record: Mapping[str, object]) -> None:
        """Write what later nodes must have to be the same, once: the first node's record stays."""
        try:
            self.store.put(f"{self._root}/lock.json", json.dumps(record).encode(), if_absent=True)
        except Conflict:
            return

    def driver(self) -> str:
        """Return the driver's version in the record of the job's first node; empty when there is none."""
        stored = self.store.get(f"{self._root}/lock.json")
        try:
            machine = json.loads(stored.data)["machine"] if stored else None
            return str(machine.get("driver", "")) if machine else ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{self.store.url}/{self._root}/lock.json is damaged: {error}") from error

    def append_log(self, attempt: int, rank: int, offset: int, data: bytes) -> None:
        """Keep a piece of a rank's output; a piece that is there already is left as it is."""
        key = f"{self._root}/logs/{attempt:04d}/rank-{rank:05d}/{offset:012d}"
        try:
            self.store.put(key, data, if_absent=True)
        except Conflict:
            return

    def keep_launch(self, attempt: int, node: int, data: bytes) -> None:
        """Keep how a node of an attempt was launched; what is kept already is left as it is."""
        try:
            self.store.put(f"{self._root}/launches/{attempt:04d}/{node:05d}.json", data, if_absent=True)
        except Conflict:
            return

    def launches(self, attempt: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield attempt, node's rank and its launch as JSON, in their order."""
        for key in self.store.list(f"{self._root}/launches/"):
            found, stored = _LAUNCH_KEY.search(key), self.store.get(key)
            if found and stored and attempt in (None, int(found[1])):
                yield int(found[1]), int(found[2]), stored.data

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

    def _bill(self, name: str, charges: tuple[Charge, ...]) -> bool:
        try:
            self.store.put(self._bill_key(name), _bytes(_Bill(charges=charges)), if_absent=True)
        except Conflict:
            return False
        return True

    def _bill_key(self, name: str) -> str:
        return f"{self._root}/ledger/{name}.json"

    def _request(self) -> tuple[Request, str | None]:
        key = f"{self._root}/request.json"
        stored = self.store.get(key)
        try:
            return (codec.from_json(Request, stored.data), stored.version) if stored else (Request(), None)
        except ValueError as error:
            raise StoreError(f"{self.store.url}/{key} is damaged: {error}") from error

    def _change_request(self, change: Callable[[Request], Request]) -> None:
        """Everybody may ask at any time: what others asked meanwhile stays."""
        key = f"{self._root}/request.json"
        for _ in range(_TRIES):
            request, version = self._request()
            changed = change(request)
            if changed == request:
                return
            with suppress(Conflict):
                self.store.put(key, _bytes(changed), if_absent=version is None, if_version=version)
                return
        raise StoreError(f"{self.store.url}/{key} is being changed all the time", hint="the same again", may_pass=True)

    def _data_key(self, source: str) -> str:
        return f"{self._root}/data/{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def job_names(store: ObjectStore) -> tuple[str, ...]:
    """Return the names of all jobs in the store."""
    found = (re.fullmatch(r"jobs/([^/]+)/state\.json", key) for key in store.list("jobs/"))
    return tuple(m[1] for m in found if m)


def _with(wishes: tuple[BudgetWish, ...], wish: BudgetWish) -> tuple[BudgetWish, ...]:
    """A write whose reply was lost is done again: nobody wishes the same twice."""
    return wishes if any(one.id == wish.id for one in wishes) else (*wishes, wish)


def _bytes(value: object) -> bytes:
    return codec.to_json(value).encode()
