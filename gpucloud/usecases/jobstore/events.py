"""A job's events in its store: how each comes there once, and how they are read, or followed until the job ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from gpucloud.domain import codec
from gpucloud.domain.state.event import Event, in_order, rank_of, within_bounds
from gpucloud.domain.state.state import JobState
from gpucloud.store import ObjectStore, Stored, get_small, put_once

_READ_AT_ONCE = 16
_TRIED_AGAIN_S, _MOST_FAILURES = 10.0, 3
MOST_READ, _MOST_BYTES = 20_000, 32 << 20
"""Of events that are read of a job: machines that drive it may write as many as they like."""


class EventLog:
    """One job's events. Methods raise StoreError."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._root = f"jobs/{job}/events/"
        self._refused: set[str] = set()  # names under which there is no event: they are fetched once

    def put(self, event: Event) -> None:
        """Write an event; one of that name that is there already stays as it is."""
        put_once(self._store, f"{self._root}{event.name}.json", codec.to_json(event).encode())

    def read(self, known: frozenset[str] = frozenset()) -> tuple[Event, ...]:
        """Return the events but those of `known` names, in their order; what is none of ours is passed over."""
        found = (key.removeprefix(self._root).removesuffix(".json") for key in self._store.list(self._root))
        fresh = (name for name in found if name not in known and name not in self._refused)
        names = sorted(fresh, key=lambda name: rank_of(name.partition(".")[0]))[:MOST_READ]
        if not names:
            return ()
        read: list[Event] = []
        size = 0
        with ThreadPoolExecutor(max_workers=_READ_AT_ONCE, thread_name_prefix="events") as pool:
            for first in range(0, len(names), _READ_AT_ONCE):
                some = names[first : first + _READ_AT_ONCE]
                for name, (data, event) in zip(some, pool.map(self._one, some), strict=True):
                    size += data
                    if event is not None:
                        read.append(event)
                    else:
                        self._refused.add(name)
                if size > _MOST_BYTES:
                    break
        return tuple(sorted(read, key=in_order))

    def _one(self, name: str) -> tuple[int, Event | None]:
        stored = get_small(self._store, f"{self._root}{name}.json")
        if stored is None:
            return 0, None
        try:
            event = codec.from_json(Event, stored.data, of_any_version=True)
        except ValueError:
            return len(stored.data), None
        return len(stored.data), event if event.name == name else None


@dataclass(slots=True)
class Outbox:
    """Events on their way: written with the state that tells them, then put into the `log`, if there is one.

    They are put beside, one after the other, by a thread that nothing waits for: a store that hangs holds no lease up.
    One that was put is left out of the state from its next write on. What fails is tried again in a while, after the
    others; whoever has the job next finds it in the state.
    """

    log: EventLog | None
    uptime: Callable[[], float]
    pending: tuple[Event, ...] = ()
    _put: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _failed_at: float | None = None
    _ready: list[Event] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _at_work: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, news: Iterable[Event]) -> tuple[Event, ...]:
        """Take what has happened, but what was put already, and return all that waits."""
        with self._lock:
            waiting = {one.name: one for one in self.pending}
            for one in news:
                if one.name not in self._put:
                    waiting.setdefault(one.name, one)
            self.pending = within_bounds(tuple(waiting.values()))
            return self.pending

    def store(self) -> None:
        """Have what waits put: a state that says so is written."""
        with self._lock:
            self._ready = sorted(self.pending, key=lambda one: one.name in self._failed)
            rests = self._failed_at is not None and self.uptime() - self._failed_at < _TRIED_AGAIN_S
            if self.log is None or rests or self._at_work or not self._ready:
                return
            self._at_work, self._failed_at = True, None
            self._thread = threading.Thread(target=partial(self._work, self.log), name="events", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait so long at the most until all is put, or has failed."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _work(self, log: EventLog) -> None:
        tried: set[str] = set()
        failures = 0
        while (event := self._next(tried, failures)) is not None:
            tried.add(event.name)
            try:
                log.put(event)
            except Exception:  # noqa: BLE001  whatever it is, the event waits in the state, and the next ones may do
                failures += 1
                with self._lock:
                    self._failed.add(event.name)
                continue
            with self._lock:
                self._put.add(event.name)
                self.pending = tuple(one for one in self.pending if one.name != event.name)

    def _next(self, tried: set[str], failures: int) -> Event | None:
        """Return what is to be put next; None ends the thread, and the next write begins another."""
        with self._lock:
            left = (one for one in self._ready if one.name not in tried | self._put)
            event = next(left, None) if failures < _MOST_FAILURES else None
            if event is None:
                self._at_work, self._failed_at = False, self.uptime() if failures else None
            return event


Loaded = tuple[JobState, Stored]


def told(
    log: EventLog, load: Callable[[], Loaded], goes_on: Callable[[JobState, Stored], bool], pause: Callable[[], object]
) -> Iterator[tuple[Event, ...]]:
    """Yield the events in their order, then those that come, for as long as the job `goes_on`.

    The store is listed again only where the state was written since. What waits in the state for a store that takes
    no event is told too: that happened as much.
    """
    known: set[str] = set()
    looked: str | None = None
    while True:
        state, stored = load()
        if stored.version != looked:
            pending = (one for one in state.pending_events[:MOST_READ] if one.name not in known)
            found = {one.name: one for one in (*pending, *log.read(frozenset(known)))}
            looked = stored.version
            known |= found.keys()
            if found:
                yield tuple(sorted(found.values(), key=in_order))
        if not goes_on(state, stored):
            return
        pause()
