"""Two attempts at one job, each of three ranks, one of which acts at a chosen call of the other's to the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise
from gpucloud.store import ObjectStore
from gpucloud.store.checkpoints import Checkpoints, Fenced
from tests.fakes.memory_store import MemoryStore

_PREFIX, _KEEP, _RANKS = "jobs/x/checkpoints", 2, 3
_BEFORE, _LAST = 3, 6


class _Ticking:
    """A clock for the store."""

    def __init__(self) -> None:
        self._ticks = count()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=next(self._ticks))


class Attempt:
    """One attempt: it finds where to begin, takes a generation, and saves steps; `acknowledged` is its newest."""

    def __init__(self, store: ObjectStore) -> None:
        self._all = [Checkpoints(store, _PREFIX, keep=_KEEP) for _ in range(_RANKS)]
        self._all[0].announce(1)
        self.base = newest(store)
        self._all[0].begin(base=self.base, attempt=1)
        self.generation = self._all[0].generation
        for rank in self._all[1:]:
            rank.go_on(self.generation, base=self.base)
        self.acknowledged: Commit | None = None

    def train(self, last: int, *, first: int | None = None) -> None:
        """Save each step up to the last, from its base or another first one on. Raises Fenced."""
        begins = self.base.step if self.base else 0
        for step in range(begins if first is None else first, last):
            commit = Commit(self.generation, step + 1)
            pieces = [one.upload(commit, f"rank-{r}", memoryview(_body(commit, r))) for r, one in enumerate(self._all)]
            self._all[0].commit(Manifest(commit=commit, world=_RANKS, promise=Promise(), pieces=tuple(pieces)))
            self.acknowledged = commit
            self._all[0].collect()


@dataclass
class _Meeting:
    """The store, in which `act` is called just before or after the call of a number; `calls` is how many there were."""

    store: ObjectStore
    at: int
    act: Callable[[], None]
    after: bool
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls += 1
            meets = self.calls == self.at
            if meets and not self.after:
                self.act()
            try:
                return method(*given, **named)
            finally:
                if meets and self.after:
                    self.act()

        return call


def meetings() -> Iterator[tuple[str, str | None]]:
    """Yield each meeting of two attempts by name, with what is wrong in the end, None for nothing.

    One attempt makes a call to the store; just before, or after, the other begins and saves 0, 1 or 3 steps; then the
    one goes on until it is fenced off, or done.
    """
    whole = _Meeting(_job(), 0, lambda: None, after=False)
    Attempt(whole).train(_LAST)  # type: ignore[arg-type]
    for at in range(1, whole.calls + 1):
        for after in (False, True):
            for saves in (0, 1, 3):
                moment = "after" if after else "before"
                yield f"another that saves {saves} times meets call {at}, {moment}", _wrong(at, saves, after=after)


def overtakings() -> Iterator[tuple[str, str | None]]:
    """Yield each moment of an attempt's start at which the one before it saves again and again, and what is wrong.

    The one that starts dies before its first save: what is restored then is what it began from.
    """
    whole = _Meeting(_job(), 0, lambda: None, after=False)
    Attempt(whole)  # type: ignore[arg-type]
    for at in range(1, whole.calls + 1):
        for after in (False, True):
            yield f"the one before saves on {'after' if after else 'before'} call {at}", _overtaken(at, after=after)


def _overtaken(at: int, *, after: bool) -> str | None:
    store = _job()
    older = Attempt(store)
    older.train(_BEFORE + 1)

    def save_on() -> None:
        with contextlib.suppress(Fenced):
            older.train(_BEFORE + 5, first=_BEFORE + 1)

    newer = Attempt(_Meeting(store, at, save_on, after=after))  # type: ignore[arg-type]
    found = newest(store)
    if newer.base is None or found != newer.base:
        return f"{found} is restored instead of {newer.base}"
    return None


def newest(store: ObjectStore) -> Commit | None:
    """Return the commit that an attempt would begin from; every byte of it is right."""
    checkpoints = Checkpoints(store, _PREFIX, keep=_KEEP)
    for manifest in checkpoints.candidates():
        commit, objects = manifest.commit, checkpoints.fetch(manifest)
        if objects == tuple(_body(commit, rank) for rank in range(_RANKS)):
            return commit
    return None


def _wrong(at: int, saves: int, *, after: bool) -> str | None:
    store, attempts = _job(), []

    def meet() -> None:
        other = Attempt(store)
        attempts.append(other)
        with contextlib.suppress(Fenced):
            other.train((other.base.step if other.base else 0) + saves)

    stopped = False
    try:
        one = Attempt(_Meeting(store, at, meet, after=after))  # type: ignore[arg-type]
        attempts.append(one)
        one.train(_LAST)
    except Fenced:
        stopped = True
    if len(attempts) != 2:
        return "they did not meet"
    # Who took the higher generation goes on, whoever looked first for where to begin.
    loser, winner = sorted(attempts, key=lambda attempt: attempt.generation)
    if loser is one and not stopped and one.acknowledged != Commit(one.generation, _LAST):
        return "the older one was neither stopped nor done"
    expected = winner.acknowledged or winner.base
    found = newest(store)
    if found != expected:
        return f"{found} is restored instead of {expected}"
    third = Attempt(store)
    third.train(found.step + 1 if found else 1)
    return None if newest(store) == third.acknowledged else "the next attempt's commits do not count"


def _job() -> ObjectStore:
    """A job with three commits of an earlier attempt, the oldest already gone."""
    store = MemoryStore(_Ticking())  # type: ignore[arg-type]
    Attempt(store).train(_BEFORE)
    return store


def _body(commit: Commit, rank: int) -> bytes:
    return f"{commit} {rank}".encode()
