"""What is wrong with a job's events, by what its state keeps of the same: missing, told twice, or invented."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone

from gpucloud.domain.state.event import Event, EventKind
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.usecases.jobstore.events import EventLog
from tests.fakes.memory_store import MemoryStore

Facts = Counter[tuple[str, object]]
_AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Watched:
    """Watches what is put into a store: how often each event was, and which a written state said before."""

    def __init__(self) -> None:
        self.put: Counter[str] = Counter()
        self.said: set[str] = set()

    def see(self, key: str, data: bytes) -> None:
        """Note an object that was written."""
        if "/events/" in key:
            self.put[key.rpartition("/")[2].removesuffix(".json")] += 1
        elif key.endswith("/state.json"):
            with suppress(
                ValueError, LookupError, TypeError, AttributeError, RecursionError
            ):  # machines may write what is no state
                self.said |= names_in(data)

    def wrong(self, pending: Iterable[Event] = ()) -> Iterator[str]:
        """What was put twice, was put though no state said it, or was said and never put; `pending` may still be."""
        yield from (f"{name} was written {count} times" for name, count in self.put.items() if count != 1)
        yield from (f"{name} is in the store, and no state said so" for name in sorted(self.put.keys() - self.said))
        left = {one.name for one in pending}
        yield from (f"{name} is missing" for name in sorted(self.said - self.put.keys() - left))


def names_in(state: bytes) -> set[str]:
    """Return the names of the events that are written with a state."""
    pending = json.loads(state)["pending_events"]  # alone: states are large, and many are written
    return {Event(kind=one["kind"], which=one["which"], at=_AT, job="", message="").name for one in pending}


class WatchedStore(MemoryStore):
    """A store in memory that is watched."""

    def __init__(self, clock) -> None:
        super().__init__(clock)
        self.watched = Watched()

    def put(self, key, data, **conditions) -> str:
        version = super().put(key, data, **conditions)
        self.watched.see(key, bytes(data))
        return version


def wrong_events(state: JobState, events: Iterable[Event]) -> Iterator[str]:
    """Say what the events do not tell of a job, tell more than once, or tell of nothing."""
    found = tuple(events)
    kept, told = _kept(state), _told(found)
    yield from (f"{kind} of {what} is missing" for kind, what in kept - told)
    yield from (f"{kind} of {what} is told, and there is none" for kind, what in told - kept)
    kinds = Counter(one.kind for one in found)
    yield from (f"no event says that it is {kind}" for kind in ("submitted", "planned") if not kinds[kind])
    ends = [one for one in found if one.kind == EventKind.ENDED.value]
    if state.status.ended and [one.reason for one in ends][-1:] != [state.exit_reason and state.exit_reason.value]:
        yield f"it ended {state.exit_reason}, and is said to have ended {[one.reason for one in ends]}"
    if state.status.ended and state.ended_at not in [one.at for one in ends]:
        yield f"it ended at {state.ended_at}, and is said to have at {[one.at for one in ends]}"


def _kept(state: JobState) -> Facts:
    facts: Facts = Counter()
    for one in state.attempts:
        facts["attempt", one.number] += 1
        facts["attempt_ended", one.number] += one.reason is not None
        facts["started", one.number] += one.stepped_at is not None or one.last_step is not None
        facts["hung", one.number] += ExitReason.HUNG in (one.reason, one.ending_reason)
    facts.update(("interrupted", one.node_id) for one in state.interruptions)
    facts.update(("resumed", one.node_id) for one in state.interruptions if one.resumed_at is not None)
    facts.update(("machines", one.node_id) for one in state.nodes)
    facts.update(("machines_ended", one.node_id) for one in state.nodes if one.ended_at is not None)
    unfit = {one.node_id for one in state.quarantined} | {n.node_id for n in state.nodes if n.given_up is not None}
    facts.update(("unhealthy", node_id) for node_id in unfit)
    return +facts


_OF_ATTEMPTS = ("attempt", "attempt_ended", "started", "hung")
_OF_MACHINES = ("interrupted", "resumed", "machines", "machines_ended", "unhealthy")


def _told(events: Iterable[Event]) -> Facts:
    facts: Facts = Counter()
    for one in events:
        if one.kind in _OF_ATTEMPTS:
            facts[one.kind, one.attempt] += 1
        if one.kind in _OF_MACHINES:
            facts.update((one.kind, node_id) for node_id in one.nodes)
    return facts


def stored(store: MemoryStore, job: str) -> tuple[Event, ...]:
    """Return the events that a store has of a job."""
    return EventLog(store, job).read()
