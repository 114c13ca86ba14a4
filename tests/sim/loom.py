"""Simulated time: ordinary blocking code of many processes, interleaved by one seed and repeatable.

Product code runs unchanged. Where it would wait, its strand is set aside and the next event takes its turn, so that
another process, a machine or the cloud may act in the middle of any outside call. A process may be killed or paused at
any moment: all its strands with it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from greenlet import getcurrent, greenlet

EPOCH = datetime(2026, 3, 1, tzinfo=timezone.utc)


class Killed(BaseException):
    """SIGKILL: thrown into every strand of a process, and by every outside call that it makes while it unwinds."""


class Process:
    """One simulated process; `skew_s` is how far its clock is ahead, `host` where it runs."""

    def __init__(self, loom: Loom, name: str, *, host: str = "laptop", skew_s: float = 0.0) -> None:
        self.loom = loom
        self.name = name
        self.host = host
        self.pid = next(loom.pids)
        self.skew = timedelta(seconds=skew_s)
        self.alive = True
        self.online = True
        self.paused_until = 0.0
        self.calls = 0
        self.dies_at_call: int | None = None
        self.strands: list[_Strand] = []

    def now(self) -> datetime:
        """The process's own clock."""
        return self.loom.time + self.skew

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.loom.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """Stop every strand for so long, as a laptop that sleeps."""
        self.paused_until = max(self.paused_until, self.loom.now + seconds)

    def kill(self) -> None:
        """End it without a word; its strands unwind, and reach nothing any more."""
        self.alive = False
        for strand in self.strands:
            if strand is self.loom.current:
                continue  # it dies at its next outside call
            if not strand.dead and strand:
                strand.throw(Killed)

    def call(self, latency_s: float) -> None:
        """Half of an outside call: the way there, or the way back."""
        self.calls += 1
        if self.calls == self.dies_at_call:
            self.kill()
        self.loom.sleep(latency_s)


class _Strand(greenlet):
    """One line of work of a process."""

    process: Process
    turn = 0


class Loom:
    """The clock, the events to come, and whose turn it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pids = itertools.count(1000)
        self.events = 0
        self.watch: Callable[[], None] = lambda: None
        self._hub = getcurrent()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def time(self) -> datetime:
        """The true time."""
        return EPOCH + timedelta(seconds=self.now)

    @property
    def current(self) -> _Strand | None:
        """The strand whose turn it is; None while an event of the world happens."""
        strand = getcurrent()
        return strand if isinstance(strand, _Strand) else None

    @property
    def process(self) -> Process:
        """The process whose turn it is."""
        strand = self.current
        assert strand is not None
        return strand.process

    def seconds(self, moment: datetime) -> float:
        """Return a true time as seconds since the beginning."""
        return (moment - EPOCH).total_seconds()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have `what` happen then."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Have `what` happen so much later."""
        self.at(self.now + seconds, what)

    def spawn(self, process: Process, work: Callable[[], Any]) -> _Strand:
        """Start a strand of the process; it begins at its own turn."""
        strand = _Strand(lambda: _run(work), parent=self._hub)
        strand.process = process
        process.strands = [one for one in process.strands if not one.dead]
        process.strands.append(strand)
        self.at(self.now, lambda: self._resume(strand, 0))
        return strand

    def sleep(self, seconds: float) -> None:
        """Let so much time pass for this strand."""
        strand = self.current
        assert strand is not None
        process = strand.process
        if not process.alive:
            raise Killed
        until = self.now + seconds
        if (not self._heap or self._heap[0][0] > until) and process.paused_until <= self.now:
            self.now = until
            return
        self.park(seconds)

    def park(self, seconds: float | None) -> None:
        """Set this strand aside until somebody wakes it, or so much time has passed."""
        strand = self.current
        assert strand is not None
        if not strand.process.alive:
            raise Killed
        strand.turn += 1
        turn = strand.turn
        if seconds is not None:
            self.at(self.now + seconds, lambda: self._resume(strand, turn))
        self._hub.switch()
        if not strand.process.alive:
            raise Killed

    def wake(self, strand: _Strand) -> None:
        """Give a strand that is set aside its turn."""
        turn = strand.turn
        self.at(self.now, lambda: self._resume(strand, turn))

    def run(self, until: float) -> None:
        """Let everything happen up to a time."""
        while self._heap and self._heap[0][0] <= until:
            when, _, what = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            self.events += 1
            what()
            self.watch()

    def clear(self) -> None:
        """Let nothing more happen."""
        self._heap.clear()

    def _resume(self, strand: _Strand, turn: int) -> None:
        process = strand.process
        if strand.dead or strand.turn != turn or not process.alive:
            return
        if process.paused_until > self.now:
            self.at(process.paused_until, lambda: self._resume(strand, turn))
            return
        strand.switch()


def _run(work: Callable[[], Any]) -> None:
    try:
        work()
    except Killed:
        return
