"""The lease on a job: one supervisor writes its state, and every write is a compare-and-swap; and the store's clock."""

from __future__ import annotations

import math
import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import CredentialsError, GpucloudError, LeaseHeld, StoreError
from gpucloud.domain.job.quantities import format_moment, span_of
from gpucloud.domain.state.event import Event
from gpucloud.domain.state.state import JobState, JobStatus, Owner
from gpucloud.domain.supervision.happened import happened
from gpucloud.ports import Clock
from gpucloud.store import Conflict, Stored
from gpucloud.system import processes
from gpucloud.usecases.jobstore.events import Outbox
from gpucloud.usecases.jobstore.jobstore import JobStore

_UNUSED_S = 3600.0
"""Longer than any one pass takes. Whoever does not come by for so long hangs, and another may have the job."""

_PUTS_S = 5.0


class Lease:
    """A job's state, held by this process. Use as a context: it is renewed beside and given back at the end.

    `uptime` counts seconds, those asleep too. Made right after a write, whose start was at `written_at` of it. With
    `tells` what happens is put among the job's events; else it waits in the state for whoever does.
    """

    def __init__(  # noqa: PLR0913  each is told by name, or has a default
        self,
        jobs: JobStore,
        clock: Clock,
        state: JobState,
        version: str,
        uptime: Callable[[], float] = processes.uptime,
        written_at: float | None = None,
        *,
        tells: bool = False,
    ) -> None:
        self._jobs = jobs
        self._now = clock.known if isinstance(clock, StoreClock) else clock.now  # the lock waits for no other call
        self._state = self._compared = state
        self._seq = state.seq
        self._version = version
        self._uptime = uptime
        self._used_at = self._written_at = uptime() if written_at is None else written_at
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._lost: LeaseHeld | None = None
        self._unsure: set[str] = set()  # nonces of writes that may have come through: their replies never came
        self._outbox = Outbox(log=jobs.events if tells else None, uptime=uptime, pending=state.pending_events)
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)

    @property
    def state(self) -> JobState:
        """The state as this process knows it."""
        return self._state

    def remember(self, state: JobState) -> None:
        """Take the state over; it is written with the next write or renewal."""
        with self._lock:
            self._used_at = self._uptime()
            self._state = state

    def write(self, state: JobState) -> None:
        """Write the state now. LeaseHeld when another supervisor has taken the job over."""
        self._used_at = self._uptime()
        self._write(state)

    def renew(self) -> None:
        """Write the state again, as it is now, unless its owner has not come by for long. Raises what `write` does."""
        with self._lock:  # one that is read before the lock is had may be older than what is written
            if self._uptime() - self._used_at < _UNUSED_S:
                self._write(self._state)

    def _write(self, state: JobState) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            # What the caller knows may be older than the last renewal: the number goes on from what was written.
            self._seq += 1
            pending = self._with_news(state)
            self._state = replace(state, seq=self._seq, nonce=uuid.uuid4().hex, pending_events=pending)
            started = self._uptime()
            self._unsure.add(self._state.nonce)
            self._version = self._put()
            self._unsure.clear()
            self._written_at = started
            self._outbox.store()  # what a state says has happened is told once it is so

    def _with_news(self, state: JobState) -> tuple[Event, ...]:
        """Return the events that are written with this state: what it says has happened, and what waits from before."""
        compared, self._compared = self._compared, state
        return self._outbox.add(happened(compared, state, self._now()))

    def confirm(self) -> None:
        """Make sure that the job is ours still: write, if the last write is older than a third of the lease.

        To be called before anything is done outside: a process that was stopped, or a laptop that slept, may have been
        followed meanwhile. LeaseHeld then, StoreError when the store cannot be asked: in both nothing may be done.
        """
        with self._lock:
            self._used_at = self._uptime()
            if self._lost is not None:
                raise self._lost
            if self._uptime() - self._written_at > self._state.lease_s / 3:
                self.write(self._state)

    def delete(self) -> None:
        """Delete the state, and the job with it, while it is ours; nothing is written after that.

        It is written once more before: so nobody else can have the job until it is gone.
        """
        with self._lock:
            self.write(self._state)
            self._jobs.delete()
            self._lost = LeaseHeld(f"{self._jobs.job} is deleted", hint="gpucloud status")

    def __enter__(self) -> Lease:
        """Start renewing."""
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Stop renewing and give the lease back; the state stays. After a failure, one more is not told.

        Events that are not put in a while wait in the state for whoever comes next.
        """
        until = self._uptime() + _PUTS_S
        self._outbox.wait(_PUTS_S)
        self._end.set()
        self._thread.join()
        if self._lost is None:
            with suppress(*(() if failure is None else (GpucloudError,))):
                self.write(replace(self._state, owner=None))
        self._outbox.wait(max(0.0, until - self._uptime()))

    def _put(self) -> str:
        """Return the version under which the state is stored now.

        A refused write was ours if the nonce says so: its reply was lost on the way. So was an earlier one that seemed
        to fail: this one then follows it.
        """
        while True:
            try:
                return self._jobs.replace(self._state, self._version)
            except Conflict:
                loaded = self._jobs.believed()
                if loaded is None or loaded[0].nonce not in self._unsure:
                    self._lost = _held(self._jobs.job, *(loaded or (None, None)))
                    raise self._lost from None
                self._version = loaded[1].version
                if loaded[0].nonce == self._state.nonce:
                    return self._version

    def _renew_for_ever(self) -> None:
        while not self._end.wait(self._state.lease_s / 5):
            try:
                self.renew()
            except LeaseHeld:
                return
            except (StoreError, CredentialsError):
                continue  # the next write tries again; the lease itself ends by the store's clock


def take(
    jobs: JobStore,
    clock: Clock,
    uptime: Callable[[], float] = processes.uptime,
    *,
    node: str = "",
    leaves: bool = False,
    tells: bool = False,
) -> Lease:
    """Return the lease on the job. LeaseHeld while another supervisor has it and is alive.

    A holder on this host whose process is gone is replaced at once, any other one when its lease is over by the
    store's own clock. `node` is the machine of the job that asks, empty for a supervisor outside; `leaves`: that stays
    until one drives it; `tells` as `Lease` says.
    """
    loaded = jobs.believed()
    if loaded is None:
        raise StoreError(f"there is no job {jobs.job!r} in {jobs.store.url}")
    state, stored = loaded
    if state.owner is not None and not is_over(state, stored):
        raise _held(jobs.job, state, stored)
    started = uptime()
    taken = replace(
        state, epoch=state.epoch + 1, owner=_me(clock, node, leaves=leaves), seq=state.seq + 1, nonce=uuid.uuid4().hex
    )
    try:
        version = jobs.replace(taken, stored.version)
    except Conflict:
        again = jobs.believed()
        if again is None or again[0].nonce != taken.nonce:
            raise _held(jobs.job, *(again or (None, None))) from None
        version = again[1].version
    return Lease(jobs, clock, taken, version, uptime, started, tells=tells)


def require_free(jobs: JobStore, *, is_strangers: bool) -> None:
    """Raise LeaseHeld where somebody supervises the job: what a start says of it beforehand would come to nothing."""
    loaded = jobs.believed()
    if loaded is not None and not is_over(*loaded):
        raise _held(jobs.job, *loaded, is_strangers=is_strangers)


def is_over(state: JobState, stored: Stored) -> bool:
    """Whether nobody holds the job any more."""
    owner = state.owner
    if owner is None:
        return True
    near = (owner.host, owner.space) == (socket.gethostname(), processes.space())
    if near and not processes.alive(owner.pid, owner.started):
        return True
    return stored.store_time - stored.modified >= span_of(state.lease_s)


def unheld_for(jobs: JobStore) -> timedelta | None:
    """Return how long nobody has written the state of a job that nobody holds; None while somebody does."""
    loaded = jobs.believed()
    if loaded is None:
        return timedelta.max
    state, stored = loaded
    return stored.store_time - stored.modified if is_over(state, stored) else None


def supervised_by(owner: Owner) -> str:
    """Return the owner in words."""
    if owner.node:
        return f"its own node {owner.node}"
    return f"process {owner.pid} on {owner.host}{' until its machines drive it' if owner.leaves else ''}"


def winds_up(state: JobState, supervisor: str) -> str:
    """Return that a job is over, and who sees to what is left of it."""
    return f"{state.job} has {state.status.value}, and {supervisor} winds it up"


def _me(clock: Clock, node: str, *, leaves: bool) -> Owner:
    pid = os.getpid()
    return Owner(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=pid,
        started=processes.started(pid) or "",
        since=clock.now(),
        space=processes.space(),
        node=node,
        leaves=leaves,
    )


def _held(job: str, state: JobState | None, stored: Stored | None, *, is_strangers: bool = False) -> LeaseHeld:
    owner = state.owner if state is not None else None
    if state is None or owner is None or stored is None:
        return LeaseHeld(f"another supervisor took {job} over", hint=f"gpucloud status {job}")
    age = (stored.store_time - stored.modified).total_seconds()
    since = format_moment(owner.since, stored.store_time)
    free_in = max(1, math.ceil(state.lease_s - age))
    ways = (
        f"gpucloud logs -f {job} follows it, gpucloud budget {job} SUM changes its budget, gpucloud down {job} ends it"
    )
    if is_strangers:  # who takes a run over need not mean to end it for whoever trains it
        ways = "it is somebody else's: another `name:` trains beside it"
    elif state.status.ended:
        begins = ", which begins a new run then" if state.status is JobStatus.SUCCEEDED else ""
        ways = f"the same command again once that is done{begins}"
    supervised = f"{job} is supervised by {supervised_by(owner)} since {since}"
    return LeaseHeld(
        f"{winds_up(state, supervised_by(owner)) if state.status.ended else supervised} (last sign {age:.0f} s ago)",
        hint=f"{ways}; if it is dead, the same command takes over in {free_in} s",
    )


# The time by the store's clock: all who supervise a job then agree, however wrong the clocks of their machines are.
#
# The shut-off is a time of the cloud's. Reckoned by a laptop that is an hour ahead it would come an hour late, and the
# budget would not hold.


_LASTS = timedelta(seconds=60)  # a clock that is put right meanwhile is wrong for so long at the most
_ALIKE = timedelta(seconds=3)  # S3 tells whole seconds, and the answer takes its time


@dataclass(slots=True)
class StoreClock:
    """Implements `Clock`; `story` hears of a clock that is wrong, once. Where the store does not answer, the last
    difference stands."""

    clock: Clock
    jobs: JobStore
    story: Callable[[str], None]
    _ahead: timedelta = timedelta(0)
    _asked_at: datetime | None = None
    _told: bool = False

    def now(self) -> datetime:
        """Return the time, aware, UTC."""
        here = self.clock.now()
        # A clock that was moved shows as an age below zero, or above the limit.
        if self._asked_at is None or not timedelta(0) <= here - self._asked_at < _LASTS:
            self._ask()
            here = self.clock.now()
        return here - self._ahead

    def known(self) -> datetime:
        """Return the time by what is known of the store's: nothing is asked, and any thread may call it."""
        return self.clock.now() - self._ahead

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.clock.sleep(seconds)

    def _ask(self) -> None:
        self._asked_at = self.clock.now()
        try:
            there = self.jobs.time()
        except (StoreError, CredentialsError):
            return
        if there is None:
            return
        self._asked_at = self.clock.now()
        ahead = self._asked_at - there
        self._ahead = ahead if abs(ahead) > _ALIKE else timedelta(0)
        if self._ahead and not self._told:
            self._told = True
            way = "ahead of" if ahead > timedelta(0) else "behind"
            self.story(f"this machine's clock is {abs(ahead.total_seconds()):.0f} s {way} the store's, which counts")
