"""A job's objects in the store: order, state, spec, code, data, armings, ledger."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from gpucloud.domain import codec
from gpucloud.domain.errors import OrderUnreadable, StateUnreadable, StoreError, UsageError
from gpucloud.domain.job.data import DataSet, pack, unpack
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.costs import Billed
from gpucloud.domain.money.ledger import ZERO, Charge, joined
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.order import Envelope, Order, is_own_group
from gpucloud.domain.state.state import JobState, JobStatus
from gpucloud.domain.supervision.self_driving import Arming, as_armed, newest_of, rebuilt
from gpucloud.domain.supervision.snapshot import DriveTrial
from gpucloud.domain.untrusted import COUNTED
from gpucloud.store import Conflict, ObjectStore, Stored, TooLarge, TooMany, get_small, put_once
from gpucloud.usecases.jobstore.events import EventLog
from gpucloud.usecases.jobstore.records import AttemptRecords

T = TypeVar("T")
_TRIES = 50  # of writing an object that others write too
UPGRADE = "pip install -U gpucloud, here or where the job was started"
_NO_VERSION = "0" * 32
_USERS, _MACHINES = "control/ledger", "ledger"
_PAGE_KEY = re.compile(r"/ledger/pages/\d{6}\.json$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    version: int = 1
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What the bills of these nodes say, in one object: of thousands, each would be a request of its own."""

    version: int = 1
    nodes: tuple[str, ...]
    charges: tuple[Charge, ...]


class JobStore:
    """One job's objects. Methods raise StoreError; conditional writes raise Conflict.

    `records` are what its attempts leave, `events` what happened to it. `on_machine`: it is a machine of the job that
    writes, which has a ledger of its own.
    """

    def __init__(self, store: ObjectStore, job: str, *, on_machine: bool = False) -> None:
        self.store = store
        self.job = job
        self.on_machine = on_machine
        self.records = AttemptRecords(store, job)
        self.events = EventLog(store, job)
        self._ledger = f"jobs/{job}/{_MACHINES if on_machine else _USERS}"
        self._root = f"jobs/{job}"

    @property
    def _spec(self) -> str:
        return f"{self._root}/control/spec.yaml"

    @property
    def checkpoints(self) -> str:
        """The key prefix of the job's checkpoints."""
        return f"{self._root}/checkpoints"

    def load(self) -> tuple[JobState, Stored] | None:
        """Return the state as stored, with its version and times; None when there is no such job.

        Raises StateUnreadable for one by which nothing can be decided, StoreError.
        """
        try:
            stored = self.store.get(f"{self._root}/state.json")
        except TooLarge as error:
            raise StateUnreadable(error.message, hint=error.hint) from error
        if stored is None:
            return None
        where = f"{self.store.url}/{self._root}/state.json"
        try:
            state = codec.from_json(JobState, stored.data)
        except codec.OtherVersion as error:
            raise StateUnreadable(f"{where} is of {error} of it: nothing is done", hint=UPGRADE) from error
        except ValueError as error:
            raise StateUnreadable(f"{where} is damaged: {error}", hint=self._way_on()) from error
        if (fault := _impossible(state)) is not None:
            raise StateUnreadable(f"{where} {fault}", hint=self._way_on())
        if state.job != self.job or not is_own_group(state.group, self.job):
            raise StateUnreadable(f"{where} is another job's: it names {state.job[:80]!r} and {state.group!r:.80}")
        return state, stored

    def exists(self) -> bool:
        """Whether the job has a state, readable or not."""
        return get_small(self.store, f"{self._root}/state.json") is not None

    def absent(self) -> UsageError:
        """Return what to say of a job without a state; where it has an order, that may be lost, and machines left."""
        if self.order_version() is None:
            return UsageError(f"there is no job {self.job!r} in {self.store.url}", hint="gpucloud status")
        return UsageError(
            f"{self.store.url} has an order of {self.job} and no state: it never began, or its state is lost",
            hint=f"gpucloud train with its job file goes on, gpucloud rm {self.job} deletes it;"
            " gpucloud gc lists machines that it may have",
        )

    def _way_on(self) -> str:
        """Return what helps where the state does not: by what was armed for them, its machines can be ended."""
        if self.last_armed() is None:
            return "put the last whole version of it back, where the store keeps versions"
        return f"gpucloud down {self.job} ends the job all the same"

    def believed(self) -> tuple[JobState, Stored] | None:
        """Return the state as whoever decides by it may believe it, with its stored version; None when there is none.

        Machines that drive their job may write all of it: for the user's side, what was armed counts (`as_armed`).
        """
        loaded = self.load()
        if loaded is None or self.on_machine:
            return loaded
        return as_armed(loaded[0], self.armings()), loaded[1]

    def last_armed(self) -> Arming | None:
        """Return what the user's side wrote last of machines that drive the job, or did; None where none ever could."""
        return newest_of(self.armings())

    def rescue(self, newest: Arming) -> None:
        """Put the state as it was armed in place of what the job's machines wrote, which stays beside it.

        Not so what is too large to be read. StoreError where somebody writes the state meanwhile.
        """
        stored = get_small(self.store, f"{self._root}/state.json")
        data = _bytes(rebuilt(self.job, newest))
        try:
            if stored is not None and stored.data:
                kept = f"{self._root}/control/put-aside/{hashlib.sha256(stored.data).hexdigest()[:16]}.json"
                self.store.put(kept, stored.data)
            version = stored.version if stored is not None else None
            self.store.put(f"{self._root}/state.json", data, if_absent=version is None, if_version=version)
        except Conflict:
            where = f"{self.store.url}/{self._root}/state.json"
            raise StoreError(f"{where} was written just now", hint="the same again", may_pass=True) from None

    def create(self, state: JobState) -> str:
        """Write the first state, by which the job exists; Conflict when it does already."""
        return self.store.put(f"{self._root}/state.json", _bytes(state), if_absent=True)

    def stand_in(self) -> None:
        """Write that the job was stopped, where it has no state: by that one nobody starts it while it is deleted."""
        nowhere = Pool(instance_type="", zone="", market=Market.ON_DEMAND)
        ended = JobState(job=self.job, pool=nowhere, cap_usd_per_hour=ZERO, status=JobStatus.STOPPED, torn_down=True)
        with suppress(Conflict):
            self.create(ended)

    @property
    def order_url(self) -> str:
        """Where the job's order is, for messages."""
        return f"{self.store.url}/{self._root}/control/order.json"

    def order(self) -> tuple[Envelope, str] | None:
        """Return the order as it is stored, whoever signed it, with its version; None when there is none."""
        try:
            stored = self.store.get(f"{self._root}/control/order.json")
            return (codec.from_json(Envelope, stored.data), stored.version) if stored is not None else None
        except TooLarge as error:
            raise OrderUnreadable(error.message, hint=error.hint) from error
        except ValueError as error:
            raise OrderUnreadable(f"{self.order_url} is damaged: {error}", hint=f"gpucloud down {self.job}") from error

    def order_version(self) -> str | None:
        """Return the version of what is stored in the order's place, readable or not; None for nothing."""
        stored = get_small(self.store, f"{self._root}/control/order.json")
        return stored.version if stored is not None else None

    def put_order(self, envelope: Envelope, over: str | None) -> str:
        """Write an order over that version, None for none, and return the new one; Conflict when another is there."""
        key = f"{self._root}/control/order.json"
        return self.store.put(key, _bytes(envelope), if_absent=over is None, if_version=over)

    def time(self) -> datetime | None:
        """Return the store's time; None where the job has nothing there to ask for."""
        stored = get_small(self.store, f"{self._root}/control/order.json") or get_small(self.store, self._spec)
        return stored.store_time if stored is not None else None

    def replace(self, state: JobState, version: str) -> str:
        """Write the state over that version and return the new one; Conflict when another was written."""
        return self.store.put(f"{self._root}/state.json", _bytes(state), if_version=version)

    def delete(self) -> None:
        """Delete the state, by which the job exists."""
        self.store.delete(f"{self._root}/state.json")

    def try_to_keep(self, state: JobState) -> None:
        """Try to write the state over a version that it never had: nothing changes, and who may not is refused.

        Where a store ignored conditions, this state would be written: the one that is read already, with a line more by
        which a refused write is told from one whose reply was lost.
        """
        with suppress(Conflict):
            self.store.put(f"{self._root}/state.json", _bytes(state) + b"\n", if_version=_NO_VERSION)

    def trial(self, node_id: str) -> DriveTrial | None:
        """Return what the machine wrote of its right to drive the job; None for nothing, and for what is none."""
        stored = get_small(self.store, self._trial_key(node_id))
        try:
            return codec.from_json(DriveTrial, stored.data) if stored is not None else None
        except ValueError:
            return None

    def keep_trial(self, node_id: str, trial: DriveTrial) -> None:
        """Write down what came of this machine's try, where every machine of the job may write."""
        self.store.put(self._trial_key(node_id), _bytes(trial))

    def keep_spec(self, spec: bytes) -> None:
        """Write the job file as it is now."""
        self.store.put(self._spec, spec)

    def spec(self) -> bytes | None:
        """Return the job file as it was kept last; None when there is none."""
        stored = self.store.get(self._spec)
        return stored.data if stored else None

    def keep_code(self, sha256: str, data: bytes | None) -> None:
        """Write a tree of code, once: it may be large, and is mostly there. None is one too large for a store."""
        key = f"{self._root}/control/code/{sha256}"
        if data is not None and key not in self.store.list(key):
            self.store.put(key, data)

    def keep_code_of(self, *orders: Order) -> None:
        """Remove the trees of code that none of these orders names, the newest and the one before it."""
        folder = f"{self._root}/control/code/"
        named = {f"{folder}{order.code_sha256}" for order in orders}
        for key in sorted(set(self.store.list(folder)) - named):
            self.store.delete(key)

    def code(self, sha256: str) -> bytes:
        """Return a tree of code as it was kept. Raises StoreError where it is not there."""
        key = f"{self._root}/control/code/{sha256}"
        stored = self.store.get(key)
        if stored is None:
            raise StoreError(f"{self.store.url}/{key} is not there", hint="`gpucloud train FILE` puts the code there")
        return stored.data

    def code_begin(self, sha256: str, size: int) -> bytes:
        """Return so many bytes of its beginning, where its files are listed; all of a smaller one. StoreError as above.

        The rest of it may be large.
        """
        begin = bytearray(size)
        is_longer = self.store.read_into(f"{self._root}/control/code/{sha256}", 0, memoryview(begin))
        return bytes(begin) if is_longer else self.code(sha256)

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

    def bill_outside_budget(self, what: str, charges: tuple[Charge, ...]) -> bool:
        """Write charges that are no node's, once; False when there are some of that name already."""
        return self._bill(f"outside_budget/{what}", charges)

    def withdraw_outside_budget(self, what: str) -> None:
        """Remove charges that were written before what they are for was asked, and refused."""
        self.store.delete(self._bill_key(f"outside_budget/{what}"))

    def bill_of(self, node_id: str) -> tuple[Charge, ...]:
        """Return a node's charges; none when it has no bill yet."""
        stored = self.store.get(self._bill_key(node_id))
        return self._charges(self._bill_key(node_id), stored.data) if stored is not None else ()

    def copy_bills(self, page: int, bills: Mapping[str, tuple[Charge, ...]]) -> None:
        """Write a page of nodes' bills again, as one object; they stay, and are what counts."""
        charges = tuple(charge for bill in bills.values() for charge in bill)
        put_once(
            self.store, f"{self._ledger}/pages/{page:06d}.json", _bytes(_Page(nodes=tuple(bills), charges=charges))
        )

    def charges(self) -> tuple[Charge, ...]:
        """Return every charge in both ledgers: the user's, and what machines wrote of their own."""
        try:
            theirs = self._charges_in(_MACHINES)
        except TooMany:  # as a bill of theirs that cannot be read
            if self.on_machine:
                raise
            theirs = ()
        return joined(self._charges_in(_USERS), theirs)

    def arm(self, arming: Arming) -> None:
        """Write down a shut-off that the user's side arms for machines that drive their job."""
        taken = len(self.store.list(f"{self._root}/control/armings/"))
        for number in range(taken, taken + _TRIES):
            if put_once(self.store, f"{self._root}/control/armings/{number:06d}.json", _bytes(arming)):
                return
        raise StoreError(f"{self.store.url}/{self._root}/control/armings is being written all the time", may_pass=True)

    def armings(self) -> tuple[Arming, ...]:
        """Return every shut-off that was armed for machines that drive their job."""
        found = ((key, self.store.get(key)) for key in self.store.list(f"{self._root}/control/armings/"))
        return tuple(self._read(Arming, key, stored.data) for key, stored in found if stored is not None)

    def _charges_in(self, ledger: str) -> tuple[Charge, ...]:
        root = f"{self._root}/{ledger}"
        keys = self.store.list(f"{root}/")
        found: list[Charge] = []
        read: set[str] = set()
        for key in (key for key in keys if _PAGE_KEY.search(key)):
            if (page := self._of_ledger(_Page, key)) is not None:
                fresh = {node for node in page.nodes if f"{root}/{node}.json" not in read}
                found += (charge for charge in _counting(page.charges) if charge.node_id in fresh)
                read.update(f"{root}/{node}.json" for node in page.nodes)
        for key in keys:
            if key not in read and not _PAGE_KEY.search(key):
                found += _counting(bill.charges) if (bill := self._of_ledger(_Bill, key)) is not None else ()
        return tuple(found)

    def _of_ledger(self, kind: type[T], key: str) -> T | None:
        """Return an object of a ledger; None where it is gone, or machines wrote what the user's side cannot read.

        That raises no sum then: what was armed counts, and nobody is kept from the job by it.
        """
        is_machines = not self.on_machine and key.startswith(f"{self._root}/{_MACHINES}/")
        stored = get_small(self.store, key) if is_machines else self.store.get(key)
        try:
            return self._read(kind, key, stored.data) if stored is not None else None
        except StoreError:
            if not is_machines:
                raise
            return None

    def billed(self) -> Billed | None:
        """Return the cloud's own figures as they were asked for last; None before that."""
        stored = self.store.get(f"{self._root}/control/billed.json")
        try:
            return codec.from_json(Billed, stored.data) if stored else None
        except ValueError as error:
            raise StoreError(f"{self.store.url}/{self._root}/control/billed.json is damaged: {error}") from error

    def keep_billed(self, billed: Billed) -> None:
        """Keep the cloud's own figures, in place of older ones."""
        self.store.put(f"{self._root}/control/billed.json", _bytes(billed))

    def keep_lock(self, record: Mapping[str, object]) -> None:
        """Write what later nodes must have to be the same, once: the first node's record stays."""
        put_once(self.store, f"{self._root}/launches/lock.json", json.dumps(record).encode())

    def driver(self) -> str:
        """Return the driver's version in the record of the job's first node; empty when there is none."""
        stored = self.store.get(f"{self._root}/launches/lock.json")
        try:
            machine = json.loads(stored.data)["machine"] if stored else None
            return str(machine.get("driver", "")) if machine else ""
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.store.url}/{self._root}/launches/lock.json is damaged: {error}") from error

    def _charges(self, key: str, data: bytes) -> tuple[Charge, ...]:
        return _counting(self._read(_Bill, key, data).charges)

    def _read(self, kind: type[T], key: str, data: bytes) -> T:
        try:
            return codec.from_json(kind, data)
        except codec.OtherVersion as error:
            raise StoreError(f"{self.store.url}/{key} is of {error} of it: nothing is done", hint=UPGRADE) from error
        except codec.Malformed as error:
            raise StoreError(f"{self.store.url}/{key} is damaged: {error}") from error

    def _bill(self, name: str, charges: tuple[Charge, ...]) -> bool:
        return put_once(self.store, self._bill_key(name), _bytes(_Bill(charges=charges)))

    def _bill_key(self, name: str) -> str:
        return f"{self._ledger}/{name}.json"

    def _trial_key(self, node_id: str) -> str:
        return f"{self._root}/status/driving/{node_id}.json"

    def _data_key(self, source: str) -> str:
        return f"{self._root}/control/data/{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def job_names(store: ObjectStore) -> tuple[str, ...]:
    """Return the names of all jobs in the store; what has a name that no job can have is none."""
    found = (re.fullmatch(r"jobs/([a-z0-9][a-z0-9-]{0,62})/state\.json", key) for key in store.list("jobs/"))
    return tuple(m[1] for m in found if m)


def _impossible(state: JobState) -> str | None:
    """Return what no supervisor has written of a state, None for a possible one: machines may write what they like."""
    counts = (state.epoch, state.seq, *(attempt.number for attempt in state.attempts))
    if not all(0 <= count < COUNTED for count in counts):  # nobody could count on from there
        return "counts further than any job does"
    ranks = [[member.rank for member in attempt.members] for attempt in state.attempts]
    if not all(found and found == list(range(len(found))) for found in ranks):
        return "has an attempt whose machines are not ranked from 0 on"
    return None


def _counting(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return the charges without those below nothing: a machine may write here, and must not lower the sum."""
    return tuple(charge for charge in charges if charge.usd >= 0 and charge.usd_per_hour >= 0)


def _bytes(value: object) -> bytes:
    try:
        return codec.to_json(value).encode()
    except ValueError as error:
        raise StoreError(
            f"nothing is written: {error}", hint="is the clock here right, and that of the store?"
        ) from error
