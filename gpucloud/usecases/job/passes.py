"""One pass for a job, as cron and CI make it; and another budget, which is in force once a pass has obeyed it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.domain.errors import BudgetRefused, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job.quantities import in_cents
from gpucloud.domain.job.spec import Job
from gpucloud.domain.money.prepaid import sooner
from gpucloud.domain.state.order import Order, is_closed, with_budget
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.budget import (
    Standing,
    least_to_go_on,
    least_to_lower_to,
    plain_usd,
    refusal,
    shutdown_at,
)
from gpucloud.domain.supervision.self_driving import arming, most_machines
from gpucloud.domain.supervision.snapshot import Rules, rules_for
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.job.ordered import Access
from gpucloud.usecases.jobstore.lease import Lease, take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import Watcher
from gpucloud.usecases.supervise.session import Session
from gpucloud.usecases.supervise.story import budget_line

_LOOK_S = 0.1
_MACHINE_SAYS_SO = timedelta(seconds=30)


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
        if is_closed(before.order, state) and state.torn_down:
            raise UsageError(
                f"{asker.jobs.job} is over: no budget limits it any more",
                hint=f"the next run takes `budget:` of {self.file.name},"
                f" or gpucloud train --budget '{plain_usd(wanted)} USD'",
            )
        if before.order.budget_usd == wanted and not orders.is_trusted(before):
            return
        rules = rules_for(before.order.unattended, self.rules)
        standing = budget_standing(asker, state)
        if (why := refusal(state, before.order.budget_usd, wanted, standing, rules)) is not None:
            raise self._too_small(why, state, rules)
        order = orders.change(lambda newest: with_budget(newest, wanted)).order
        is_news = state.order_number < order.number
        self.await_order(order, rules)
        for change in order.budget_changes[-1:] if is_news else ():
            self.tell(budget_line(change))
        if not standing.alive and wanted < (least := least_to_go_on(state, standing, rules)):
            self.tell(f"that is too little to go on with: the least is {in_cents(least)} USD")

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

    def _too_small(self, why: str, state: JobState, rules: Rules) -> BudgetRefused:
        asker, job = self.asker, self.asker.jobs.job
        ends = "" if asker.state().status.ended else f", or gpucloud down {job} ends it now"
        return BudgetRefused(f"{job}: {why}", hint=f"gpucloud budget {job} {least_usd(asker, state, rules)} USD{ends}")


def budget_standing(asker: Asker, state: JobState) -> Standing:
    """Return what the money rule needs of a job, as it is seen from any terminal."""
    tracker = SpendTracker(asker.jobs, asker.market, asker.terms)
    return tracker.standing(state, asker.listed(state), asker.clock.now())


def bring_closer(asker: Asker, order: Order, rules: Rules) -> bool:
    """Have the cloud shut the machines off no later than the order's budget pays for; return whether that was closer.

    What the cloud has armed counts. It needs no lease: nobody who goes by the same order arms a later time.
    """
    state = asker.state()
    listed = asker.listed(state)
    if state.group is None or not listed.most_alive:
        return False
    closer = sooner(listed.armed_until, shutdown_at(state, order.budget_usd, budget_standing(asker, state), rules))
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


def least_usd(asker: Asker, state: JobState, rules: Rules) -> str:
    """Return the least sum that the budget can be lowered to now, in USD, rounded up to cents."""
    return in_cents(least_to_lower_to(state, budget_standing(asker, state), rules))
