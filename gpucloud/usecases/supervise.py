"""Supervision: observe, write down, decide, act; again until nothing is left to do. Crash-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.masking import words_of
from gpucloud.domain.state import ExitReason, JobState
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import Action, Done, Pause, Wait
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.seen import Goal
from gpucloud.usecases.act import Actor
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.closing import Closing
from gpucloud.usecases.datasets import JobData
from gpucloud.usecases.discreet import Discreet
from gpucloud.usecases.forecast import time_left
from gpucloud.usecases.history import HistoryKeeper
from gpucloud.usecases.inspection import Inspector
from gpucloud.usecases.learning import Learning
from gpucloud.usecases.lease import Lease
from gpucloud.usecases.lookout import LogReader
from gpucloud.usecases.noderecords import NodeRecords
from gpucloud.usecases.observe import Observer
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.rent import Renter
from gpucloud.usecases.storeclock import StoreClock
from gpucloud.usecases.telling import Teller
from gpucloud.usecases.usage import UsageMeter
from gpucloud.usecases.witnesses import Witnesses
from gpucloud.usecases.world import Watcher, World

_PATIENCE = timedelta(minutes=2)
_PAUSE_S = 2.0


@dataclass(slots=True)
class Supervisor:
    """One supervisor of one job, holding its lease."""

    world: World
    goal: Goal
    lease: Lease
    observer: Observer
    actor: Actor
    cashier: Cashier
    logs: LogReader
    watcher: Watcher

    def tick(self) -> Action:
        """Make one pass and return what was done."""
        seen = self.observer.observe(self.lease.state)
        recorded = self.cashier.settle(books.record(seen), seen.now)
        if _is_news(self.lease.state, recorded):
            self.lease.write(recorded)  # a machine is in the books before anything else is done about it
        self.lease.remember(recorded)
        action = decide(self.goal, seen, self.world.rules)
        if (line := self.observer.usage.warning()) is not None:
            self.watcher.story(line)
        self.watcher.tick(seen, action, self.cashier.spend(recorded, seen.now, time_left(seen)))
        self.actor.act(action, seen)
        return action

    def _tick_patiently(self) -> Action:
        """Make a pass; what may pass is waited for, up to two minutes: the machines work on meanwhile."""
        since, told = self.world.clock.now(), False
        while True:
            try:
                return self.tick()
            except GpucloudError as error:
                if not error.may_pass or self.world.clock.now() - since > _PATIENCE:
                    raise
                if not told:
                    self.watcher.story(f"{error}; trying again for {_PATIENCE.total_seconds():.0f} s")
                told = True
                self.world.clock.sleep(_PAUSE_S)

    def settle(self) -> None:
        """Tick until there is nothing to do but to wait for the job itself."""
        while not isinstance(action := self.tick(), Done | Pause):
            if isinstance(action, Wait):
                if not self.observer.preparer.busy and not self.observer.inspector.busy:
                    break
                self.world.clock.sleep(self.world.period_s)
        self.logs.flush()

    def run(self) -> JobState:
        """Tick until nothing is left to do for the goal; return the state then."""
        flushed = self.world.clock.now()
        while not isinstance(action := self._tick_patiently(), Done | Pause):
            if isinstance(action, Wait):
                self.world.clock.sleep(self.world.period_s)
            now = self.world.clock.now()
            if (now - flushed).total_seconds() >= self.world.flush_s:
                self.logs.flush()
                flushed = now
        self.logs.flush()
        if self.goal.keep and self.lease.state.status.ended:
            self.lease.write(replace(self.lease.state, kept=True))
        return self.lease.state


def _is_news(old: JobState, new: JobState) -> bool:
    """Whether the state must be written now; steps alone can wait for the lease's next renewal."""
    watched = ("nodes", "status", "interruptions", "checkpoint")
    return any(getattr(old, name) != getattr(new, name) for name in watched)


@contextmanager
def supervisor(
    world: World, goal: Goal, lease: Lease, watcher: Watcher, wanted_end: Callable[[], ExitReason | None]
) -> Iterator[Supervisor]:
    """Give a supervisor whose threads and connections end with the block; the lease is taken already."""
    world = replace(world, clock=StoreClock(world.clock, world.jobs, watcher.story))
    readers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="read")
    makers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="prepare")
    syncs = ThreadPoolExecutor(max_workers=8, thread_name_prefix="sync")
    tellers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="tell")
    cashier = Cashier(world.jobs, world.market, world.terms)
    told = Discreet(watcher, words_of(world.secrets.values()))
    logs = LogReader(world.jobs, told.output, told.hidden)
    history = HistoryKeeper(world.jobs, world.clock)
    data = JobData(job=world.job, jobs=world.jobs, sets=world.data_sets, story=told.story)
    records = NodeRecords(world=world)
    teller = Teller(world=world, pool=tellers)
    preparer = Preparer(world=world, watcher=told, pool=makers, syncs=syncs, data=data, records=records, teller=teller)
    inspector = Inspector(world=world, preparer=preparer, pool=makers)
    observer = Observer(
        world=world,
        goal=goal,
        preparer=preparer,
        inspector=inspector,
        cashier=cashier,
        logs=logs,
        wanted_end=wanted_end,
        pool=readers,
        history=history,
        usage=UsageMeter(lasting=goal.idle.lasting if goal.idle else None),
        witnesses=Witnesses(world=world, preparer=preparer, pool=readers),
        learning=Learning(make=world.make_tables, pool=makers),
    )
    actor = Actor(
        world=world,
        lease=lease,
        preparer=preparer,
        inspector=inspector,
        renter=Renter(world=world, lease=lease, preparer=preparer, cashier=cashier, watcher=told),
        closing=Closing(world=world, preparer=preparer, logs=logs, history=history, watcher=told),
        watcher=told,
    )
    try:
        with lease:
            actor.let_us_in()
            yield Supervisor(
                world=world,
                goal=goal,
                lease=lease,
                observer=observer,
                actor=actor,
                cashier=cashier,
                logs=logs,
                watcher=told,
            )
    finally:
        world.shell.close()
        for pool in (readers, makers, syncs, tellers):
            pool.shutdown(wait=False, cancel_futures=True)
