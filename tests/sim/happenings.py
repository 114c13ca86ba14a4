"""One schedule of several supervisors that write what happens to one job, over the product's own lease and events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.errors import GpucloudError, LeaseHeld, StoreError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, Fault
from gpucloud.domain.node.status import Stop
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import CheckpointRef, ExitReason, Interruption, InterruptionKind, JobState
from gpucloud.domain.state.state import UsageInterval as Interval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    CloseAttempt,
    CoolDown,
    EndAttempt,
    Finish,
    NoteInterruptions,
    OpenAttempt,
    QuarantineNodes,
)
from gpucloud.domain.supervision.happened import submitted, with_budget_reached
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from tests.faults.happenings import Watched, wrong_events
from tests.sim.leases import FIRST
from tests.sim.loom import EPOCH, Loom, Process
from tests.sim.store import Faults, Store, StoreLine
from tests.sim.threads import simulated

_LENGTH_S, _QUIET_S, _LEASE_S = 150.0, 600.0, 6.0
_STEPS, _ATTEMPTS = 100, 7
_POOLS = tuple(Pool(instance_type="p2.xlarge", zone=f"us-east-2{zone}", market=Market.SPOT) for zone in "abc")
_KILLED_WITHIN = 24  # calls, each counted on its way there and on its way back


@dataclass(slots=True)
class Outcome:
    """What one schedule showed; `wrong` says each breach in words, and is empty where all is well."""

    wrong: list[str] = field(default_factory=list)
    killed: int = 0
    """How many supervisors were killed while the job was theirs."""
    rivals: int = 0
    """How many times a supervisor was at work that had been followed already."""
    events: int = 0
    delayed: int = 0
    """How often the store took an object, and no event."""


class _Store(Store):
    """A store that takes no events for a while, as a role may, and notes what is written."""

    def __init__(self, loom: Loom) -> None:
        super().__init__(loom)
        self.watched = Watched()
        self.closed_until = 0.0
        self.refused = 0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None) -> str:
        if "/events/" in key and self.loom.now < self.closed_until:
            self.refused += 1
            raise StoreError("the store is full")
        version = super().put(key, data, if_absent=if_absent, if_version=if_version)
        self.watched.see(key, bytes(data))
        return version


class Schedule:
    """Supervisors on a few hosts that are killed at a call, pause past their lease, lose replies, and begin again."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._loom = Loom()
        self._store = _Store(self._loom)
        self._processes: dict[int, Process] = {}
        self._holders: set[int] = set()
        self._calm = False
        self.outcome = Outcome()

    def run(self) -> Outcome:
        first = replace(FIRST, pool=_POOLS[0], lease_s=_LEASE_S)
        JobStore(self._store, "job").create(submitted(first, EPOCH))
        with simulated(self._loom, self._dice, self._processes, lambda: None):
            for _ in range(self._dice.choice((2, 3))):
                self._loom.at(self._dice.uniform(0, 3), self._begin)
            self._loom.at(self._dice.uniform(1, 6), self._disturb)
            self._loom.run(_LENGTH_S)
            self._calm, self._store.closed_until = True, 0.0
            self._begin()
            self._loom.run(_LENGTH_S + _QUIET_S)
            for process in self._processes.values():
                process.kill()
        self._judge()
        return self.outcome

    def _judge(self) -> None:
        jobs = JobStore(self._store, "job")
        loaded = jobs.load()
        assert loaded is not None
        state, events = loaded[0], jobs.events.read()
        if not state.torn_down:
            self.outcome.wrong.append("the job did not come to its end")
        self.outcome.wrong += [*self._store.watched.wrong(), *wrong_events(state, events)]
        self.outcome.events, self.outcome.delayed = len(events), self._store.refused

    def _begin(self) -> None:
        host = f"host{self._dice.randrange(3)}"
        process = Process(self._loom, host, host=host, skew_s=self._dice.uniform(-5, 5))
        self._processes[process.pid] = process
        self._loom.spawn(process, lambda: self._supervise(process))

    def _disturb(self) -> None:
        if self._calm:
            return
        alive = [one for one in self._processes.values() if one.alive and one.dies_at_call is None]
        if not alive or len([one for one in self._processes.values() if one.alive]) < 2:
            self._begin()
        if alive:
            self._strike(self._dice.choice(alive))
        if self._dice.random() < 0.1:
            self._store.closed_until = self._loom.now + self._dice.uniform(1, 25)
        self._loom.after(self._dice.expovariate(1 / 1.2), self._disturb)

    def _strike(self, process: Process) -> None:
        if self._dice.random() < 0.7:
            process.dies_at_call = process.calls + self._dice.randint(1, _KILLED_WITHIN)
            self._loom.after(self._dice.uniform(0, 3), self._begin)
        else:
            process.pause(self._dice.uniform(0, 2.5 * _LEASE_S))

    def _supervise(self, process: Process) -> None:
        line = StoreLine(self._store, process, self._dice, Faults(refused=0.03, reply_lost=0.05))
        jobs = JobStore(line, "job")
        while not self._is_over():
            try:
                self._hold(process, jobs)
            except GpucloudError:
                process.sleep(self._dice.uniform(1, 5))

    def _is_over(self) -> bool:
        found = self._store.objects["jobs/job/state.json"].data
        return b'"torn_down":true' in found and b'"pending_events":[]' in found

    def _hold(self, process: Process, jobs: JobStore) -> None:
        lease = take(jobs, process, lambda: self._loom.now, tells=True)
        self._holders.add(process.pid)
        try:
            with lease:
                for _ in range(self._dice.randint(2, 20)):
                    process.sleep(self._dice.uniform(0.05, 2))
                    happens = life(lease.state, self._dice, process)
                    if self._dice.random() < 0.25:
                        lease.remember(happens)  # as what can wait for the next renewal
                    else:
                        lease.write(happens)
        except LeaseHeld:
            self.outcome.rivals += 1
            raise
        finally:
            self._holders.discard(process.pid)
            self.outcome.killed += not process.alive
        process.sleep(self._dice.uniform(0, 2))


def life(state: JobState, dice: random.Random, process: Process) -> JobState:
    """Return the state of the job a moment later: machines come and go, attempts run, are interrupted, end."""
    now = process.now()
    state = replace(state, looked_at=now)
    if state.status.ended:
        gone = tuple(replace(one, ended_at=one.ended_at or now, end_cause=EndCause.CHOICE) for one in state.nodes)
        return replace(state, nodes=gone, torn_down=True)
    attempt = state.attempt
    if attempt is None:
        return _between(state, dice, process)
    if attempt.ending_reason is not None:
        return transitions.close_attempt(state, CloseAttempt(reason=attempt.ending_reason), now)
    if attempt.last_step is None or dice.random() < 0.5:
        return _stepped(state, dice, process)
    chance, members = dice.random(), [member.node_id for member in attempt.members]
    if chance < 0.4:
        taken = tuple(
            Interruption(node_id=one, kind=InterruptionKind.NOTICE, attempt=attempt.number, noticed_at=now)
            for one in dice.sample(members, dice.randint(1, len(members)))
        )
        state = transitions.note_interruptions(state, NoteInterruptions(interruptions=taken))
        return transitions.order_end(state, EndAttempt(how=Stop.SAVE, reason=ExitReason.INTERRUPTED), now)
    if chance < 0.6:
        return transitions.order_end(state, EndAttempt(how=Stop.ABORT, reason=ExitReason.HUNG), now)
    if chance < 0.7:
        state = transitions.quarantine(state, QuarantineNodes(nodes=((members[0], "its GPU is hot"),)), now)
        return transitions.close_attempt(state, CloseAttempt(reason=ExitReason.LOST), now)
    return _stepped(state, dice, process)


def _between(state: JobState, dice: random.Random, process: Process) -> JobState:
    now, number = process.now(), len(state.attempts) + 1
    if number > _ATTEMPTS:
        return transitions.finish(state, Finish(reason=ExitReason.SUCCEEDED), now)
    fresh = [one.node_id for one in state.nodes if one.node_id.startswith(f"i-{number}-")]
    if not fresh:
        if dice.random() < 0.3:
            pool = dice.choice(_POOLS)
            five = timedelta(minutes=5)
            refusal = CoolDown(
                pool=pool, fault=Fault.CAPACITY, code="NoCapacity", message="none", length=five, longest=6 * five
            )
            return transitions.cool_down(state, refusal, now)
        old = tuple(replace(one, ended_at=one.ended_at or now, end_cause=EndCause.INTERRUPTED) for one in state.nodes)
        new = tuple(Interval(node_id=f"i-{number}-{n}", pool=state.pool, launched_at=now) for n in (1, 2))
        return replace(state, nodes=(*old, *new))
    return transitions.open_attempt(state, OpenAttempt(number=number, node_ids=tuple(fresh)), 29500, now)


def _stepped(state: JobState, dice: random.Random, process: Process) -> JobState:
    now, attempt = process.now(), state.attempts[-1]
    reached = min(_STEPS, max(one.last_step or 0 for one in state.attempts) + dice.randint(1, 12))
    attempt = replace(
        attempt,
        first_step=attempt.first_step or reached,
        last_step=reached,
        stepped_at=attempt.stepped_at or now,
        last_step_at=now,
        total_steps=_STEPS,
    )
    known = tuple(
        one if one.resumed_at is not None else replace(one, resumed_at=max(now, one.noticed_at))
        for one in state.interruptions
    )
    saved = CheckpointRef(step=reached, sha256="0" * 64) if dice.random() < 0.4 else state.checkpoint
    stepped = replace(state, attempts=(*state.attempts[:-1], attempt), interruptions=known, checkpoint=saved)
    return with_budget_reached(stepped, Decimal(reached), Decimal(_STEPS))
