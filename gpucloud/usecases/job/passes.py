"""Passes over a job that is there: as cron and CI make one, for another budget, and to its end; and its deletion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.domain.errors import (
    BudgetRefused,
    CleanupIncomplete,
    CredentialsError,
    GpucloudError,
    LeaseHeld,
    OrderChanged,
    OrderUnreadable,
    ProvisionError,
    StateUnreadable,
    StoreError,
    ToolMissing,
    UsageError,
)
from gpucloud.domain.job.quantities import counted, format_moment, format_size, format_span, in_cents
from gpucloud.domain.job.spec import Job
from gpucloud.domain.money.budget import sooner
from gpucloud.domain.state.order import Order, is_closed, with_budget
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.domain.supervision.budget import (
    Standing,
    least_to_go_on,
    least_to_lower_to,
    plain_usd,
    refusal,
    rules_for,
    shutdown_at,
)
from gpucloud.domain.supervision.self_driving import Arming, arming, most_machines, rebuilt
from gpucloud.domain.supervision.snapshot import Rules, asked_of
from gpucloud.ports import Clock
from gpucloud.store import takes_nothing
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.job.ordered import Access, end_unwritten, enough_to_end
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import Lease, take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import Watcher
from gpucloud.usecases.supervise.session import Session
from gpucloud.usecases.supervise.story import budget_line, end_unheard, stage_of_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Makes passes for one known job; `tell` hears a line where its file says another job by now."""

    asker: Asker
    access: Access
    tell: Callable[[str], None]

    def settle(self, watcher: Watcher) -> Job:
        """Make one pass from nothing but what is stored and seen; return the job as it is meant here.

        LeaseHeld when somebody supervises it, CredentialsError without its SSH key.
        """
        means = self.access.by_order(self.asker.state(), self.orders.acted_on())
        if means.edited is not None:
            self.tell(means.edited)
        session = Session(services=means.services, orders=self.orders, watcher=watcher)
        if means.unsaved is None:
            session.settle()
        else:
            session.end_unsaved(means.unsaved)
        return means.job

    def end_unless_trusted(self, may_be_ended: Callable[[JobState], object]) -> None:
        """Order the end of an ended job whose order nobody signed whose word counts here.

        What is torn down all the same can be nothing else afterwards. `may_be_ended` raises CredentialsError.
        """
        if not self.orders.is_trusted(self.orders.newest()):
            may_be_ended(self.asker.state())
            self.orders.end()

    @property
    def orders(self) -> Orders:
        """The job's orders."""
        return self.access.ordered.orders


# Another budget for a job: an order like any other, in force once the cloud has the shut-off that it pays for.


_LOOK_S = 0.1
_MACHINE_SAYS_SO = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanger:
    """Changes one known job's budget.

    `rules` are its cloud's, `settle` makes a pass for the job, `tell` hears what is done, line by line.
    """

    asker: Asker
    orders: Orders
    file: Path
    rules: Rules
    settle: Callable[[], object]
    tell: Callable[[str], None]

    def make(self, wanted: Decimal) -> None:
        """Order it, and have it in force; the same sum again too: whoever ordered it may have died in between.

        BudgetRefused names the least, UsageError for a job that is over.
        """
        asker, orders = self.asker, self.orders
        state, before = asker.state(), orders.newest()
        if state.torn_down and (is_closed(before.order, state) or not asker.is_newest_run()):
            raise UsageError(
                f"{asker.jobs.job} is over: no budget limits it any more",
                hint=f"the next run takes `budget:` of {self.file.name},"
                f" or gpucloud train --budget '{plain_usd(wanted)} USD'",
            )
        if before.order.budget_usd == wanted and not orders.is_trusted(before):
            return
        rules = rules_for(before.order.resolved.checkpoint, before.order.unattended, self.rules)
        standing = budget_standing(asker, state, before.order)
        if (why := refusal(state, before.order.budget_usd, wanted, standing, rules)) is not None:
            raise self._too_small(why, state, least_to_lower_to(state, standing, rules))
        order = orders.change(lambda newest: with_budget(newest, wanted)).order
        is_news = state.order_number < order.number
        self.await_order(order, rules)
        for change in order.budget_changes[-1:] if is_news else ():
            self.tell(budget_line(change))
        start_usd = least_to_go_on(state, standing.needed, rules.prepaid_rule, keeps=False)
        if not standing.alive and wanted < (least := standing.spent_usd + start_usd):
            on = f"on {state.pool}, as last, " if state.group is None else ""  # others may do with less
            self.tell(f"that is too little to go on with: {on}the least is {in_cents(least)} USD")

    def await_order(self, order: Order, rules: Rules) -> None:
        """Return once the order is acted on: by whoever supervises the job, or from here when nobody does.

        A machine that drives its job has no right to move the shut-off on every cloud: that is done from here, and it
        has some time to say that it goes by the order. Whatever it says, the cloud ends it when the budget says.
        """
        asker, armed_at, told = self.asker, None, False
        if asker.state().drives_itself:  # what it wrote may say that it did
            bring_closer(asker, order, rules)
        while asker.stored_state().order_number < order.number:
            state, by = asker.state(), asker.supervisor()
            if by is None:
                with suppress(LeaseHeld):  # somebody supervises it from this moment on, and reads the order
                    self._obey(order, rules)
                continue
            if not told:
                self.tell(f"asking {by} to change the budget of {asker.jobs.job}")
            told = True
            if state.drives_itself or (state.owner is not None and state.owner.node):
                bring_closer(asker, order, rules)
                armed_at = armed_at or asker.clock.now()
                if asker.clock.now() - armed_at > _MACHINE_SAYS_SO:
                    self.tell(
                        f"{by} has not confirmed the new budget yet; the cloud ends the machines in time in any case"
                    )
                    return
            asker.clock.sleep(_LOOK_S)

    def _obey(self, order: Order, rules: Rules) -> None:
        with take(self.asker.jobs, self.asker.clock) as lease:
            closer = obey_here(self.asker, lease, order, rules)
        if not closer:
            return
        try:  # the machines hear of a closer shut-off by an ordinary pass, and save before it
            self.settle()
        except GpucloudError as error:  # the cloud has the closer shut-off: this is for the last save before it
            self.tell(f"the machines could not be told: {error}")

    def _too_small(self, why: str, state: JobState, least_usd: Decimal) -> BudgetRefused:
        asker, job = self.asker, self.asker.jobs.job
        what = "its machines" if state.status.ended else "it"
        over = state.status.ended and not asker.listed(state).alive
        ends = "" if over else f", or gpucloud down {job} ends {what} now"
        return BudgetRefused(f"{job}: {why}", hint=f"gpucloud budget {job} {in_cents(least_usd)} USD{ends}")


def budget_standing(asker: Asker, state: JobState, order: Order) -> Standing:
    """Return what the money rule needs of a job under that order, as it is seen from any terminal."""
    tracker, nodes = SpendTracker(asker.jobs, asker.market, asker.terms), order.resolved.resources.nodes
    return tracker.standing(state, asker.listed(state), nodes, asker.clock.now())


def bring_closer(asker: Asker, order: Order, rules: Rules) -> bool:
    """Have the cloud shut the machines off no later than the order's budget pays for; return whether that was closer.

    What the cloud has armed counts. It needs no lease: nobody who goes by the same order arms a later time.
    """
    state = asker.state()
    listed = asker.listed(state)
    if state.group is None or not listed.most_alive:
        return False
    closer = sooner(
        listed.armed_until, shutdown_at(state, order.budget_usd, budget_standing(asker, state, order), rules)
    )
    if closer is None:
        return False
    asker.group.arm(state.group, closer)
    if order.unattended is not None:  # after it is so: what was armed before counts until then
        machines = most_machines(state, order.resolved.resources.nodes, listed.most_alive)
        acted_on = replace(state, order_number=max(state.order_number, order.number))
        asker.jobs.arm(arming(acted_on, at=asker.clock.now(), machines=machines, until=closer))
    return True


def obey_here(asker: Asker, lease: Lease, order: Order, rules: Rules) -> bool:
    """Act on the order with the lease that nobody else holds; return whether the shut-off came closer."""
    lease.confirm()
    closer = bring_closer(asker, order, rules)
    listed = asker.listed(lease.state)
    lease.write(
        replace(
            lease.state,
            order_number=max(lease.state.order_number, order.number),
            paid_until=listed.armed_until if listed.exists else lease.state.paid_until,
        )
    )
    return closer


# The end of a job: its machines ended by whoever supervises it, or from here.


AskedToEnd = Callable[[], "ExitReason | None"]
"""Called at every pass: why the user at this terminal wants the end; raises where he leaves."""
_LINGERS = timedelta(seconds=20)
_WAITED_S = 0.2
_MACHINE_ENDS_WITHIN = timedelta(minutes=30)
"""It saves, and puts the outputs into the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ender:
    """Ends one known job; `ends_leftovers` tells what ends its `leftovers`, `abandons` gives up what cannot come."""

    asker: Asker
    access: Access
    leftovers: Callable[[], tuple[str, ...]]
    ends_leftovers: str = ""
    abandons: bool = False

    def end(self, watcher: Watcher, asked: AskedToEnd) -> None:
        """Return when the job has ended and its machines too.

        Machines that drive their job write its state: whatever stands there must not keep its owner from ending them.
        Raises OrderChanged where the job was started again meanwhile, LeaseHeld where a machine does not let go of it.
        """
        before = self.asker.jobs.last_armed()
        try:
            self._end_by_state(watcher, asked)
        except Exception as error:
            if isinstance(error, StoreError) and not (error.may_pass or isinstance(error, StateUnreadable)):
                end_unwritten(self.asker, self.access, error, watcher, abandons=self.abandons)
            newest = self.asker.jobs.last_armed() if before is not None and _is_of_the_state(error, before) else None
            if newest is None:
                raise
            why = str(error) if isinstance(error, GpucloudError) else f"{type(error).__name__}: {error}"
            watcher.story(f"{why}\nending the machines by what was armed for them, whatever they wrote")
            self._end_as_armed(newest, watcher, asked)

    def end_unsaved(self, watcher: Watcher, asked: AskedToEnd) -> None:
        """End a run that nobody supervises and that is worth nothing, its machines at once."""
        self._unsaved_session(watcher, asked).end_unsaved()

    def require_empty(self) -> None:
        """Return once nothing of the job is listed any more; CleanupIncomplete names what still is."""
        clock = self.asker.clock
        deadline = clock.now() + _LINGERS
        while (left := self.leftovers()) and clock.now() < deadline:  # disks go some seconds after their machine
            clock.sleep(1)
        if left:  # what the same command removes is gone by now; strays that nothing of ours made are not its own
            raise CleanupIncomplete(f"still listed: {', '.join(left)}", hint=self.ends_leftovers)

    @property
    def _orders(self) -> Orders:
        return self.access.ordered.orders

    def _end_by_state(self, watcher: Watcher, asked: AskedToEnd) -> None:
        """Return when the job has ended and its machines too, by whoever supervises it, or from here."""
        asker, orders, ordered = self.asker, self._orders, self.access.ordered
        state = asker.state()
        try:
            orders.given()
        except OrderUnreadable as error:
            watcher.story(f"{error.message}\nending the job by an order of your own in its place")
            orders.end_in_place(enough_to_end(ordered.known, ordered.read_job), ordered.host())
        if not (state.status.ended and state.torn_down):
            if asker.supervisor() is None:
                self.access.require_fleet(state)  # who cannot end it orders nothing; a supervisor there can
            orders.end()
        since = asker.clock.now()
        while not (state.status.ended and state.torn_down):
            by = asker.supervisor()
            if by is None:
                with suppress(LeaseHeld):  # one of its machines, or another terminal, has it from this moment on
                    self._end_here(state, watcher, asked)
            else:
                watcher.story(f"asking {by} to end {asker.jobs.job}: what it waits for is told there")
                self._await_end(by, since, watcher)
            state = asker.state()

    def _await_end(self, by: str, since: datetime, watcher: Watcher) -> None:
        """Wait while the same supervisor has the job and it is not torn down. OrderChanged if it was started again.

        How far that is, and machines that keep it waiting, are told here too. LeaseHeld where it is a machine that
        takes too long, whatever names it takes meanwhile: what runs on it may keep the job for as long as it is paid.
        """
        asker, told = self.asker, [""]
        while True:
            state, order = asker.state(), self._orders.newest().order
            if state.status.ended and state.torn_down:
                return
            rules, now = rules_for(order.resolved.checkpoint, order.unattended, asker.rules), asker.clock.now()
            brings = bool(asked_of(state.attempts, order.resolved.outputs))
            waits = end_unheard(state, rules.limits, now) or stage_of_end(state, rules.limits, now, has_outputs=brings)
            if waits not in told:
                watcher.story(waits)
                told.append(waits)
            if order.end is None:
                again = f"{order.job} was started again by {order.by} at {format_moment(order.at, now)}"
                raise OrderChanged(again, hint=f"gpucloud down {order.job}")
            if state.drives_itself and asker.clock.now() - since > _MACHINE_ENDS_WITHIN:
                raise LeaseHeld(f"{by} has not ended {order.job} for {format_span(_MACHINE_ENDS_WITHIN)}", hint=None)
            asker.clock.sleep(_WAITED_S)
            if asker.supervisor() != by:
                return

    def _end_here(self, state: JobState, watcher: Watcher, asked: AskedToEnd) -> None:
        """End the job from here: with a last save if that can be, else the machines at once."""
        means = self.access.to_end(state, self._orders.newest())
        session = Session(services=means.services, orders=self._orders, watcher=watcher, asked=asked)
        if means.unsaved is None:
            session.run()
        else:
            session.end_unsaved(means.unsaved)

    def _end_as_armed(self, newest: Arming, watcher: Watcher, asked: AskedToEnd) -> None:
        """End the machines first, which then write nothing more, and the job as it is known on the user's side."""
        self.access.require_fleet(rebuilt(self.asker.jobs.job, newest))
        session = self._unsaved_session(watcher, asked)
        for group in self._groups(newest):
            session.services.group.purge(group)
        self.asker.jobs.rescue(newest)
        session.end_unsaved()

    def _groups(self, newest: Arming) -> tuple[str, ...]:
        """Return the group that was armed, and that of the job's state, which is its own where it can be read."""
        named = [newest.rented.group]
        with suppress(StateUnreadable):
            named.append(self.asker.stored_state().group)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def _unsaved_session(self, watcher: Watcher, asked: AskedToEnd) -> Session:
        """Return what ends the job by a new order, without a last save: that needs no secrets."""
        job, _ = self.access.ordered.to_end(self._orders.end())
        services = self.access.services(job, self.access.ordered.known.name, goes_on=False)
        return Session(services=services, orders=self._orders, watcher=watcher, asked=asked)


def _is_of_the_state(error: Exception, before: Arming) -> bool:
    """Whether what the job's machines wrote may be why it could not be ended.

    What cannot be read or decided by, whenever they drove it; else only while they do, and no fault of the cloud, of
    its rights, of a tool or of a full disk: by the state, the job is saved first.
    """
    if isinstance(error, StateUnreadable) or not isinstance(error, GpucloudError):
        return True
    ours = (OrderChanged, CredentialsError, ProvisionError, CleanupIncomplete, ToolMissing)
    return before.machines > 0 and not (error.may_pass or isinstance(error, ours) or takes_nothing(error))


# What the store and this machine keep of a job that is over, deleted. A job with anything alive is not.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is kept of a job in its store: all keys, and its checkpoints with their bytes."""

    keys: tuple[str, ...]
    checkpoints: int
    size: int

    def __str__(self) -> str:
        return counted(len(self.keys), "object") + (f" with {self.saved}" if self.checkpoints else "")

    @property
    def saved(self) -> str:
        """Its checkpoints in words."""
        return f"{counted(self.checkpoints, 'checkpoint')} ({format_size(self.size)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleter:
    """Deletes one job that is over.

    `require_over` raises UsageError while anything of it is alive, or results of it would be lost; `clear` deletes
    what this machine has of it, while nobody else can start it.
    """

    jobs: JobStore
    clock: Clock
    require_over: Callable[[], None]
    clear: Callable[[], None]

    def stored(self) -> Stored:
        """Return what would be deleted from the store."""
        count, size = StoredCheckpoints(store=self.jobs.store, prefix=self.jobs.checkpoints, keep=2).held()
        return Stored(keys=self.jobs.store.list(self._root), checkpoints=count, size=size)

    def delete(self, told: Stored, called: str) -> None:
        """Delete everything while the job's lease is ours, so that nobody starts it meanwhile.

        UsageError for a job that somebody went on with since `told`: that was not all; `called` is what means the run
        on a command line. The state goes last: by it the same command again finds what is left, and until then no new
        run has the name, its key or its log. One that has none is given it first.
        """
        self.jobs.stand_in()
        with take(self.jobs, self.clock) as lease:
            self.require_over()
            if set(self.jobs.store.list(self._root)) - {*told.keys, f"{self._root}state.json"}:
                raise UsageError(f"{self.jobs.job} has gone on meanwhile", hint=f"gpucloud status {called}")
            for key in sorted(told.keys, key=lambda key: key.startswith(f"{self._root}control/order")):
                self._delete_key(lease, key)
            for key in self.jobs.store.list(self._root):  # a start that was refused meanwhile has left its code
                self._delete_key(lease, key)
            self.clear()
            lease.delete()

    @property
    def _root(self) -> str:
        return f"jobs/{self.jobs.job}/"

    def _delete_key(self, lease: Lease, key: str) -> None:
        if key != f"{self._root}state.json":
            lease.confirm()
            self.jobs.store.delete(key)
