"""Starting or continuing a job: which run, on which offer, under which budget; nothing is rented yet."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.ledger import ZERO, Terms
from gpucloud.domain.plan import Plan, make_plan
from gpucloud.domain.state import BudgetWish, ExitReason, JobState
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.prepaid import Wall
from gpucloud.domain.supervision.seen import Limits
from gpucloud.ports import Account, Clock, MarketData
from gpucloud.store import Conflict, ObjectStore
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.planning import Planner
from gpucloud.usecases.runs import current_run, run_number

# Ends that a new run follows; after any other end the same job goes on from its checkpoint.
_CLOSED = (ExitReason.SUCCEEDED, ExitReason.USER_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that can be supervised now. `changed` says what differs from the job file of its last start."""

    name: str
    plan: Plan
    continues: bool
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts jobs in one store, at one market's prices, within what the account may rent.

    `changeover` is what a launch is taken to cost a job in time, as long as none was measured.
    """

    store: ObjectStore
    market: MarketData
    account: Account | None
    clock: Clock
    wall: Wall
    terms: Terms
    changeover: timedelta = Limits().changeover

    @property
    def planner(self) -> Planner:
        """What plans the jobs that it starts."""
        return Planner(
            market=self.market,
            account=self.account,
            clock=self.clock,
            wall=self.wall,
            terms=self.terms,
            changeover=self.changeover,
        )

    def start(self, job: Job, spec: bytes) -> Start:
        """Make the run's state, or find the unfinished one, and return it with its plan.

        Raises PlanRefused, NoCapacity, BudgetTooSmall before anything is written.
        """
        found = current_run(self.store, job.name)
        if found is not None and not is_closed(found[1]):
            return self._continue(job, spec, *found)
        number = run_number(job.name, found[0]) + 1 if found else 1
        return self._create(job, spec, job.name if number == 1 else f"{job.name}-{number}")

    def plan(self, job: Job) -> Plan:
        """Return the plan of a new run; nothing is read from the store, nothing is written.

        Raises PlanRefused, NoCapacity (no offer, or no quota for any), BudgetTooSmall.
        """
        return self.planner.plan(job)

    def _create(self, job: Job, spec: bytes, name: str) -> Start:
        now = self.clock.now()
        plan = self.plan(replace(job, name=name))
        state = JobState(
            job=name,
            created_at=now,
            budget_usd=job.budget_usd,
            spec_sha256=_sha256(spec),
            pool=plan.offer.pool,
            cap_usd_per_hour=plan.offer.cap_usd_per_hour,
            efa=(plan.offer.efa,),
            gpu=plan.offer.gpu,
            tags=job.tags,
        )
        try:
            JobStore(self.store, name).create(state, spec)
        except Conflict:
            raise UsageError(f"{name} was started elsewhere just now", hint="the same command again") from None
        return Start(name=name, plan=plan, continues=False)

    def _continue(self, job: Job, spec: bytes, name: str, state: JobState) -> Start:
        now = self.clock.now()
        spent = ZERO
        if state.exit_reason not in _CLOSED:  # a teardown needs no budget
            spent = Cashier(JobStore(self.store, name), self.market, self.terms).spend(state, now).spent_usd
        offers = self.planner.offers(job)
        if state.group is None:  # its own machines are in what is used of a quota
            offers = self.planner.allowed(job, offers)
        plan = make_plan(replace(job, name=name), offers, now, self.wall, spent_usd=spent)
        return Start(name=name, plan=plan, continues=True, changed=_changes(job, spec, state))


def is_closed(state: JobState) -> bool:
    """Whether the next `train` starts a new run instead of going on with this one: its end, or only its teardown."""
    return state.exit_reason in _CLOSED and (state.torn_down or state.kept)


def _changes(job: Job, spec: bytes, state: JobState) -> tuple[str, ...]:
    changes = []
    if _sha256(spec) != state.spec_sha256:
        changes.append("the job file differs from the one of the last start: resuming is best effort, not exact")
    if job.budget_usd != state.budget_usd:
        changes.append(f"budget: {state.budget_usd} → {job.budget_usd} USD")
    return tuple(changes)


def budget_wish(state: JobState, job: Job, by: str, now: datetime) -> BudgetWish | None:
    """Return the wish for the job file's budget where the run has another one; it is taken up like any other wish."""
    if state.exit_reason in _CLOSED or job.budget_usd == state.budget_usd:
        return None
    return BudgetWish(id=uuid.uuid4().hex, by=by, at=now, usd=job.budget_usd)


def adopt(state: JobState, spec: bytes, plan: Plan) -> JobState:
    """Return the state as it goes on under the job file of now, with the plan's offer if it has no group.

    A run that ended for good, and was not torn down, stays as it is. Another budget is wished for (`budget_wish`).
    """
    if state.exit_reason in _CLOSED:
        return state
    going_on = books.reopen(state) if state.status.ended else state
    message = going_on.message if going_on.attempt is not None else None  # what stopped it before is over
    adopted = replace(going_on, spec_sha256=_sha256(spec), message=message)
    if adopted.group is not None:
        return adopted
    offer = plan.offer
    cap = offer.cap_usd_per_hour
    return replace(adopted, pool=offer.pool, cap_usd_per_hour=cap, efa=(offer.efa,), gpu=offer.gpu)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
