"""One process with one job: the lease, the order, then the loop (observe, write down, decide, act), and back again.

Every entrance comes by here: `train`, `up`, `down`, `budget`, `reconcile` for one job or all, a CI tick, a machine that
drives its own job. What is to be done stands in the order and the state alone; an entrance says who it is, whether it
gives another order first, and whether it stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from gpucloud.domain.errors import FleetElsewhere, GpucloudError, LeaseHeld, OrderChanged, RunIsOver, StoreError
from gpucloud.domain.job.quantities import counted, format_moment
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import fleet_of
from gpucloud.domain.state.event import EventKind
from gpucloud.domain.state.order import Order, Until, is_closed
from gpucloud.domain.state.state import ExitReason, JobState, UsageInterval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import Action, Done, Pause, StayOn, Wait
from gpucloud.domain.supervision.budget import with_leaving
from gpucloud.domain.supervision.happened import happened, with_budget_reached
from gpucloud.domain.supervision.membership import time_left
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.self_driving import as_armed_at_least
from gpucloud.domain.supervision.snapshot import OUTSIDE, Goal, Snapshot, Supervising, goal_of
from gpucloud.domain.supervision.strays import let_go, may_live
from gpucloud.domain.untrusted import in_one_line, masked, words_of
from gpucloud.system.retries import Retry
from gpucloud.usecases.jobstore.lease import Lease, StoreClock, take
from gpucloud.usecases.jobstore.orders import Given, Orders
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import Learning, Services, Watcher
from gpucloud.usecases.supervise.act import Actor
from gpucloud.usecases.supervise.agents import AgentWriter, NodeRecords
from gpucloud.usecases.supervise.closing import Closing, OutputsHome
from gpucloud.usecases.supervise.inspection import Inspector
from gpucloud.usecases.supervise.look import LogReader, PeerReports
from gpucloud.usecases.supervise.needs import JobData
from gpucloud.usecases.supervise.observe import Observer, newest_checkpoint
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.provision import MachineProvisioner
from gpucloud.usecases.supervise.usage import UsageHistory, UsageMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """A start of the job: the order that it gives over the one that it has read, and the state as it goes on.

    `after_teardown`: the run had ended, and nothing was left of it but its state. `is_newest`: whether no later run was
    begun since.
    """

    order: Order
    over: Given
    spec: bytes
    adopt: Callable[[JobState], JobState]
    after_teardown: bool = False
    is_newest: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one process needs to supervise one job.

    `asked` is called at every pass: it returns why the user at this terminal wants the job to end, which becomes an
    order, and raises where he leaves. `left` hears how the job was known to stand when the session failed, and why.
    """

    services: Services
    orders: Orders
    watcher: Watcher
    who: Supervising = OUTSIDE
    asked: Callable[[], ExitReason | None] = lambda: None
    left: Callable[[JobState, GpucloudError], object] = lambda *_: None

    def run(self, entering: Entering | None = None) -> JobState:
        """Supervise the job until nothing is left to do for its order, and return the state then.

        Raises LeaseHeld while another supervisor has it; OrderChanged, RunIsOver instead of `entering`; CannotLeave
        where the job was to be left to machines that cannot drive it.
        """
        with self._held(entering) as one:
            return one.run()

    def settle(self) -> JobState:
        """Make one pass, from nothing but what is stored and seen; return the state then. Raises LeaseHeld."""
        with self._held(None) as one:
            one.settle()
            return one.lease.state

    def end_unsaved(self, why: str | None = None) -> JobState:
        """End the job as it stands and its machines at once, and say why; return the state then. Raises LeaseHeld."""
        with self._held(None, saves=False) as one:
            if why is not None:
                self.watcher.story(f"{why}\nending the machines without a last save")
            return one.run()

    @contextmanager
    def _held(self, entering: Entering | None, *, saves: bool = True) -> Iterator[Supervisor]:
        services = replace(self.services, clock=StoreClock(self.services.clock, self.services.jobs, self.watcher.story))
        orders = replace(self.orders, clock=services.clock)
        who = replace(self.who, began_at=services.clock.now(), saving=services.saving)
        with take(services.jobs, services.clock, node=self.who.node, leaves=self.who.leaves, tells=True) as lease:
            if entering is None:
                orders.acted_on()
            else:
                _enter(entering, orders, lease)
            if not saves and not lease.state.status.ended:
                known = _with_newest(services, lease.state)
                lease.write(transitions.abandon(known, services.clock.now(), services.job.outputs))
            self._let_go_elsewhere(services, lease)
            with supervisor(services, who, orders, lease, self.watcher, self.asked) as one, self._telling(lease):
                if not who.node:
                    one.begin()
                yield one

    def _let_go_elsewhere(self, services: Services, lease: Lease) -> None:
        """Go on without machines of the embedded fleet of another home. FleetElsewhere where they are ended there."""
        state, now, fleet = lease.state, services.clock.now(), fleet_of(lease.state.group)
        if state.group is None or fleet is None:
            return
        try:
            services.group.describe(state.group)
        except FleetElsewhere as error:
            state = as_armed_at_least(state, services.jobs.last_armed())
            if may_live(state, now) and error.is_here:
                raise
            if may_live(state, now) and state.paid_until is not None:
                seen = counted(len(state.alive), "machine") if state.alive else "machines that were asked for last"
                self.watcher.story(
                    f"{seen} of the embedded fleet of {in_one_line(fleet.host)}:{in_one_line(fleet.home)} are not seen"
                    f" from here: they switch themselves off by {format_moment(state.paid_until, now)} at the latest"
                )
            lease.write(let_go(state, now))

    @contextmanager
    def _telling(self, lease: Lease) -> Iterator[None]:
        try:
            yield
        except LeaseHeld:
            raise
        except GpucloudError as error:
            self.left(lease.state, error)
            raise


def _enter(entering: Entering, orders: Orders, lease: Lease) -> Order:
    """The job is ours before its order changes: whoever is refused has ordered nothing.

    A run that ended by itself meanwhile is over. One that somebody ended has another order by now, which refuses it.
    """
    job, begins = lease.state.job, entering.order.end is None and orders.newest().version == entering.over.version
    ended_meanwhile = begins and lease.state.torn_down and not entering.after_teardown
    if is_closed(entering.over.order, lease.state):
        raise RunIsOver(f"{job} ended just now", hint="the same command again starts another run")
    if ended_meanwhile:
        raise RunIsOver(f"{job} ended just now", hint="the same command again goes on with it")
    if begins and entering.after_teardown and not entering.is_newest():
        raise OrderChanged(f"a newer run of {job} was begun just now", hint="the same command again goes on with that")
    given = orders.give(entering.order, entering.over)
    orders.jobs.keep_spec(entering.spec)
    orders.jobs.keep_code_of(given.order, entering.over.order)
    adopted = entering.adopt(lease.state)
    until = (entering.over.order.until, given.order.until)
    if not adopted.status.ended and (lease.state.status.ended or until == (Until.READY, Until.FINISHED)):
        adopted = replace(adopted, began_at=orders.clock.now())
    lease.write(adopted)
    return given.order


# Supervision: observe, write down, decide, act; again until nothing is left to do. Crash-only.


T = TypeVar("T")

_PATIENCE = Retry(first_s=2.0, factor=1.0, within_s=120.0)


def _with_newest(services: Services, state: JobState) -> JobState:
    """Return the state with what its open attempt committed when nobody listened, where the store tells it."""
    newest = None
    with suppress(StoreError):
        newest = newest_checkpoint(services, state) if state.attempt is not None else None
    if newest is None:
        return state
    return replace(
        state, checkpoint=newest, attempts=transitions.with_commit(state.attempts, newest.step, newest.counts)
    )


class CannotLeave(Exception):
    """The machines have not shown that they can drive the job, and why. Nothing failed."""


@dataclass(slots=True)
class Supervisor:
    """One supervisor of one job, holding its lease. It goes by the newest order, read at every pass."""

    services: Services
    who: Supervising
    orders: Orders
    lease: Lease
    observer: Observer
    actor: Actor
    tracker: SpendTracker
    logs: LogReader
    watcher: Watcher
    asked: Callable[[], ExitReason | None]

    def begin(self) -> None:
        """Bring up to date what stands from whoever had the job before."""
        self._patiently(self.actor.begin)

    def tick(self) -> Action:
        """Make one pass and return what was done."""
        goal = self._goal()
        snapshot = self.observer.observe(self.lease.state, goal)
        recorded = self.tracker.settle(transitions.record(snapshot), snapshot.now)
        recorded = with_budget_reached(recorded, snapshot.spent_usd, goal.budget_usd)
        if _is_news(self.lease.state, recorded, snapshot.now):
            self.lease.write(recorded)  # what came or happened is written before anything is done about it
        self.lease.remember(recorded)
        action = decide(goal, snapshot, self.services.rules)
        listed, rule = snapshot.group, self.services.rules.prepaid_rule
        unproven = self.tracker.unproven_usd(recorded, listed, snapshot.now)
        spend = self.tracker.spend(recorded, listed, snapshot.now, goal.budget_usd, rule, unproven)
        if (line := self.observer.usage.warning()) is not None:
            self.watcher.story(line)
        spend = with_leaving(spend, (node.status for node in snapshot.nodes))
        left, buys_time = time_left(snapshot), goal.buys_time
        self.watcher.tick(snapshot, action, spend.for_job_of(left, goal.deadline_at, buys_time=buys_time))
        self.actor.act(action, snapshot, goal)
        return action

    def _goal(self) -> Goal:
        """What the user says here becomes an order: whoever supervises the job after us goes by it too."""
        end, given = self.asked(), self.orders.acted_on()
        if end is not None and given.order.end is None:
            given = self.orders.end(end)
        return goal_of(given.order, self.who)

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do it; what may pass is waited for, up to two minutes: the machines work on meanwhile."""
        clock, told = self.services.clock, False
        tries = _PATIENCE.begin(clock.sleep, now=lambda: clock.now().timestamp())
        while True:
            try:
                return work()
            except GpucloudError as error:
                if not error.may_pass:
                    raise
                if not told:
                    self.watcher.story(f"{error}; trying again for {_PATIENCE.within_s:.0f} s")
                told = True
                if not tries.again():
                    raise

    def settle(self) -> None:
        """Tick until there is nothing to do but to wait for the job itself."""
        while not isinstance(action := self._patiently(self.tick), Done | Pause):
            if isinstance(action, Wait):
                busy = self.observer.bootstrapper.busy or self.observer.inspector.busy or self.observer.home.busy
                if not action.briefly and not busy:
                    break
                self.services.clock.sleep(self.services.period_s)
        self._patiently(self.logs.flush)

    def run(self) -> JobState:
        """Tick until nothing is left to do for the goal; return the state then. Raises CannotLeave."""
        flushed = self.services.clock.now()
        while not isinstance(action := self._patiently(self.tick), Done | Pause | StayOn):
            if isinstance(action, Wait):
                self.services.clock.sleep(self.services.period_s)
            now = self.services.clock.now()
            if (now - flushed).total_seconds() >= self.services.flush_s:
                self._patiently(self.logs.flush)
                flushed = now
        self._patiently(self.logs.flush)
        if isinstance(action, StayOn):
            raise CannotLeave(action.why)
        return self.lease.state


def _is_news(old: JobState, new: JobState, now: datetime) -> bool:
    """Whether the state must be written now; steps and words of machines can wait for the lease's next renewal.

    That a machine falls silent, or speaks again, is written at once, with when it was heard last; so is that results
    came: the machine that brought them may be going. Of events a milestone alone can wait: nothing is done about it.
    """
    watched = ("status", "message", "interruptions", "checkpoint")
    is_same = _unheard(old) == _unheard(new) and _came(old) == _came(new)
    if not is_same or any(getattr(old, name) != getattr(new, name) for name in watched):
        return True
    return any(one.kind != EventKind.MILESTONE.value for one in happened(old, new, now))


def _came(state: JobState) -> tuple[tuple[bool, bool], ...]:
    return tuple((attempt.outputs_came, attempt.outputs_coming) for attempt in state.attempts)


def _unheard(state: JobState) -> tuple[UsageInterval, ...]:
    return tuple(replace(interval, last_word_at=None) for interval in state.nodes)


@contextmanager
def supervisor(
    services: Services,
    who: Supervising,
    orders: Orders,
    lease: Lease,
    watcher: Watcher,
    asked: Callable[[], ExitReason | None],
) -> Iterator[Supervisor]:
    """Give a supervisor whose threads and connections end with the block; the lease is held already."""
    threads = _Threads()
    told = RedactingWatcher(watcher, words_of(services.secrets.values()))
    observer = _observer(services, threads, told)
    try:
        yield Supervisor(
            services=services,
            who=who,
            orders=orders,
            lease=lease,
            observer=observer,
            actor=_actor(services, lease, observer, told),
            tracker=observer.tracker,
            logs=observer.logs,
            watcher=told,
            asked=asked,
        )
    finally:
        services.shell.close()
        threads.end()


def _pool(most: int, does: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=most, thread_name_prefix=does)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threads:
    """What one supervisor does at once: reading nodes, making them fit, code to them, and writing to their agents."""

    readers: ThreadPoolExecutor = field(default_factory=lambda: _pool(16, "read"))
    makers: ThreadPoolExecutor = field(default_factory=lambda: _pool(8, "prepare"))
    homes: ThreadPoolExecutor = field(default_factory=lambda: _pool(2, "home"))
    syncs: ThreadPoolExecutor = field(default_factory=lambda: _pool(8, "sync"))
    agent_writers: ThreadPoolExecutor = field(default_factory=lambda: _pool(16, "tell"))

    def end(self) -> None:
        """Begin nothing more, and wait for nothing."""
        for pool in (self.readers, self.makers, self.homes, self.syncs, self.agent_writers):
            pool.shutdown(wait=False, cancel_futures=True)


def _observer(services: Services, threads: _Threads, watcher: RedactingWatcher) -> Observer:
    bootstrapper = Bootstrapper(
        services=services,
        watcher=watcher,
        pool=threads.makers,
        syncs=threads.syncs,
        data=JobData(job=services.job, jobs=services.jobs, sets=services.data_sets, story=watcher.story),
        records=NodeRecords(services=services),
        agent_writer=AgentWriter(services=services, pool=threads.agent_writers),
    )
    return Observer(
        services=services,
        bootstrapper=bootstrapper,
        inspector=Inspector(services=services, bootstrapper=bootstrapper, pool=threads.makers),
        home=OutputsHome(services=services, bootstrapper=bootstrapper, pool=threads.homes, watcher=watcher),
        tracker=SpendTracker(services.jobs, services.market, services.terms),
        logs=LogReader(services.jobs, watcher.output, watcher.hidden),
        pool=threads.readers,
        history=UsageHistory(services.jobs, services.clock),
        usage=UsageMeter(lasting=services.job.idle.lasting if services.job.idle else None),
        peer_reports=PeerReports(services=services, bootstrapper=bootstrapper, pool=threads.readers),
        learning=Learning(make=services.make_tables, pool=threads.makers),
    )


def _actor(services: Services, lease: Lease, observer: Observer, watcher: Watcher) -> Actor:
    return Actor(
        services=services,
        lease=lease,
        bootstrapper=observer.bootstrapper,
        inspector=observer.inspector,
        machine_provisioner=MachineProvisioner(
            services=services,
            lease=lease,
            bootstrapper=observer.bootstrapper,
            tracker=observer.tracker,
            watcher=watcher,
        ),
        closing=Closing(
            services=services, home=observer.home, logs=observer.logs, history=observer.history, watcher=watcher
        ),
        watcher=watcher,
    )


# Who looks on sees no secret of the job, whoever wrote it.


_HALVES = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Halves of letters, which a machine's JSON may hold and no text; those between stand for bytes that are no letter."""


@dataclass(frozen=True, slots=True)
class RedactingWatcher:
    """A watcher that passes everything on but the `hidden` words: a failed `setup` may have printed one."""

    watcher: Watcher
    hidden: tuple[bytes, ...]

    def story(self, line: str) -> None:
        """Something happened, in one line."""
        self.watcher.story(self._shown(line))

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """One pass was made."""
        self.watcher.tick(snapshot, action, spend)

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        self.watcher.output(attempt, rank, self._shown(text))

    def _shown(self, text: str) -> str:
        whole = _HALVES.sub("\ufffd", text)
        return masked(whole.encode("utf-8", "surrogateescape"), self.hidden).decode("utf-8", "replace")
