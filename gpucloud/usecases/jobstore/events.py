"""A job's events in its store: how each comes there once, and how they are read, or followed until the job ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gpucloud.domain import codec
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.state.event import MOST_PENDING, Event, in_order
from gpucloud.domain.state.state import JobState
from gpucloud.store import ObjectStore, Stored, get_small, put_once

_READ_AT_ONCE, _PUT_AT_ONCE = 16, 100
_TRIED_AGAIN_S = 10.0
MOST_READ, _MOST_BYTES = 20_000, 32 << 20
"""Of events that are read of a job: machines that drive it may write as many as they like."""


class EventLog:
    """One job's events. Methods raise StoreError."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._root = f"jobs/{job}/events/"

    def put(self, event: Event) -> None:
        """Write an event; one of that name that is there already stays as it is."""
        put_once(self._store, f"{self._root}{event.name}.json", codec.to_json(event).encode())

    def read(self, known: frozenset[str] = frozenset()) -> tuple[Event, ...]:
        """Return the events but those of `known` names, in their order; what is none of ours is passed over."""
        found = (key.removeprefix(self._root).removesuffix(".json") for key in self._store.list(self._root))
        names = [name for name in found if name not in known][:MOST_READ]
        if not names:
            return ()
        read: list[Event] = []
        size = 0
        with ThreadPoolExecutor(max_workers=_READ_AT_ONCE, thread_name_prefix="events") as pool:
            for first in range(0, len(names), _READ_AT_ONCE):
                for data, event in pool.map(self._one, names[first : first + _READ_AT_ONCE]):
                    size += data
                    read += [event] if event is not None else []
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

    One that was put is left out of the state from its next write on. What fails is tried again in a while: nothing
    waits for it, and whoever has the job next finds it in the state.
    """

    log: EventLog | None
    uptime: Callable[[], float]
    pending: tuple[Event, ...] = ()
    _put: set[str] = field(default_factory=set)
    _failed_at: float | None = None

    def add(self, news: Iterable[Event]) -> tuple[Event, ...]:
        """Take what has happened, but what was put already, and return all that waits."""
        waiting = {one.name: one for one in self.pending}
        for one in news:
            if one.name not in self._put:
                waiting.setdefault(one.name, one)
        self.pending = tuple(waiting.values())[:MOST_PENDING]
        return self.pending

    def store(self) -> None:
        """Put what waits, one after the other, until the store takes one no more."""
        if self.log is None or (self._failed_at is not None and self.uptime() - self._failed_at < _TRIED_AGAIN_S):
            return
        try:
            for one in self.pending[:_PUT_AT_ONCE]:
                self.log.put(one)
                self._put.add(one.name)
            self._failed_at = None
        except (StoreError, CredentialsError):
            self._failed_at = self.uptime()
        self.pending = tuple(one for one in self.pending if one.name not in self._put)


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
