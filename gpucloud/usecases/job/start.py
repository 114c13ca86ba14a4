"""Starting or continuing a job: which run, on which offer, under which order; nothing is rented yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Protocol

from gpucloud.domain.checkpoint.protection import NEVER, Saving
from gpucloud.domain.errors import BudgetRefused, BudgetTooSmall, NoCapacity, OrderChanged, UsageError
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.quantities import in_cents
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.domain.market.plan import Plan, make_plan
from gpucloud.domain.money.budget import NOTHING_USED, Used
from gpucloud.domain.money.ledger import ZERO, Terms
from gpucloud.domain.node.launch import script_of
from gpucloud.domain.node.node import NO_GROUP, GroupView
from gpucloud.domain.state.order import (
    Onward,
    Order,
    Until,
    held_until,
    is_finished,
    keeps,
    onward_of,
    to_wind_up,
    with_budget,
)
from gpucloud.domain.state.state import JobState, JobStatus
from gpucloud.domain.supervision.budget import least_to_go_on, least_to_lower_to, prepaid_rule_for, refusal, rules_for
from gpucloud.domain.supervision.capacity import no_start_fits
from gpucloud.domain.supervision.happened import submitted
from gpucloud.domain.supervision.snapshot import Rules, Snapshot
from gpucloud.domain.supervision.strays import as_taken_over, list_here
from gpucloud.ports import Account, Clock, MarketData, NodeGroup, Signer
from gpucloud.store import Conflict, ObjectStore
from gpucloud.usecases.job.jobs import Kept, kept_of
from gpucloud.usecases.job.ordered import first_state, pool_asked_again, require_start, require_time
from gpucloud.usecases.jobstore.condition import ConditionKind
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.lease import StoreClock
from gpucloud.usecases.jobstore.orders import Given, Orders, Reader, caller, sha256_of
from gpucloud.usecases.jobstore.runs import (
    Found,
    InItsPlace,
    changes_between,
    current_run,
    edited_files,
    next_run,
    outdated,
    require_own,
    require_steps_left,
    runs_otherwise,
)
from gpucloud.usecases.money.estimate import Planner
from gpucloud.usecases.money.simulate import Outlooks
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import PackCode

_PUT_BACK = "order {number} was put back, a newer one was here before: the job file's counts in its place"
_UNTRUSTED = "the last order is signed by nobody whom you trust: the job file's counts in its place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a start asks beside the job file.

    `budget_usd` is None for the file's, `unattended` where a supervisor outside drives the job. `adopts`: a run that
    another job file began is this file's from now on. `again`: a new run, also after one that failed by its own error
    or passed its deadline.
    """

    until: Until = Until.FINISHED
    keep: bool = False
    drill: bool = False
    hold: timedelta | None = None
    unattended: timedelta | None = None
    budget_usd: Decimal | None = None
    adopts: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A start as it would be: of which run, on what plan."""

    name: str
    plan: Plan | None
    state: JobState | None  # None for a run that does not exist yet
    after: JobState | None = None  # how the ended run stands that a new one comes after
    kept: Kept | None = None
    """The machines that it keeps, which the new one does not use: their rights and bills are that run's."""
    onward: Onward | None = None
    held: int = 0  # how many machines the cloud lists that were held for it

    @property
    def reopens(self) -> bool:
        """Whether a run whose script failed goes on, on machines that were held for it."""
        return self.onward is Onward.HELD


class Check(Protocol):
    """Refuses a start that cannot come to anything, by raising; nothing of it is written yet."""

    def __call__(self, prospect: Prospect, /) -> ConditionKind | None:
        """Raise what refuses it; return how an attempt that is open was heard, None where nobody asked."""
        ...


def _unchecked(prospect: Prospect) -> None:
    del prospect


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """The check of a new run, which is told what it comes after."""

    check: Check
    after: JobState | None
    kept: Kept | None

    def __call__(self, prospect: Prospect, /) -> ConditionKind | None:
        return self.check(replace(prospect, after=self.after, kept=self.kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that can be supervised now: by `order`, given over `over`.

    `plan` is None for a run whose attempt goes on. `changed` says what differs from the last start. `last` is the order
    of the ended run that this new one comes after, where its word counts. `reopens`: the script of this run failed, and
    its machines wait for the mended one. `clears`: they waited in vain, or not at all (`waited`), or it has succeeded
    with other code, and is torn down first. `winds_up`: it has succeeded as its files are now, and is torn down alone.
    `reruns`: what the next attempt runs, where that is another script. `after_teardown`: its state alone was left.
    """

    name: str
    order: Order
    over: Given
    plan: Plan | None
    continues: bool
    changed: tuple[str, ...] = ()
    last: Order | None = None
    reopens: bool = False
    clears: bool = False
    winds_up: bool = False
    waited: bool = False
    reruns: str = ""
    after_teardown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts jobs in one store, at one market's prices, by its cloud's rules, within what the account may rent.

    `host` is the gpucloud home that gives the orders, which `signer` signs; what `reader` does not trust counts for
    nothing. `pack_code` gives a folder's tree by its hash and what makes it anew, which is None where it is too large
    for the store. `outlooks` and `saving` are what a budget is judged by that does not surely suffice.
    """

    store: ObjectStore
    market: MarketData
    account: Account | None
    clock: Clock
    rules: Rules
    terms: Terms
    group: NodeGroup | None = None
    host: str = ""
    signer: Signer | None = None
    reader: Reader | None = None
    pack_code: PackCode | None = None
    outlooks: Callable[[], Outlooks] | None = None
    saving: Callable[[Job], Saving] | None = None

    @property
    def planner(self) -> Planner:
        """What plans the jobs that it starts."""
        bare = Planner(
            market=self.market,
            account=self.account,
            clock=self.clock,
            prepaid_rule=self.rules.prepaid_rule,
            terms=self.terms,
            changeover=self.rules.limits.changeover,
            outlooks=self.outlooks,
        )
        return bare if self.saving is None else replace(bare, saving=self.saving)

    def start(self, job: Job, spec: bytes, asked: Asked = Asked(), check: Check = _unchecked) -> Start:
        """Make the run's order and state, or find the unfinished one, and return it with its plan.

        Raises PlanRefused, NoCapacity, BudgetTooSmall, UsageError for a name that another job file has, and what
        `check` raises, before anything is written: whoever reads an order may act on it at once.
        """
        found = self.found(job, spec, adopts=asked.adopts, again=asked.again)
        if found is not None and not found.begins_anew(job, self.clock.now(), again=asked.again):
            return self._continue(job, spec, asked, found, check)
        last = found.given.order.run if found is not None else 0
        before = self.kept(found) if found is not None else None
        after = _Coming(check=check, after=found.state if found is not None else None, kept=before)
        try:
            start = self._create(job, spec, asked, *next_run(job.name, last, job_names(self.store)), after)
        except NoCapacity as error:
            raise error if before is None else NoCapacity(f"{error.message}; {before}", hint=error.hint) from None
        if found is None or not self._orders(JobStore(self.store, found.name)).is_trusted(found.given):
            return start
        return replace(start, last=found.given.order)

    def found(self, job: Job, spec: bytes, *, adopts: bool = False, again: bool = False) -> Found | None:
        """Return the newest run of the job, None where there is none; UsageError for a name that another file has."""
        found = current_run(self.store, job.name, self.clock)
        if found is not None and not adopts:
            anew = found.begins_anew(job, self.clock.now(), again=again)
            does = "begins its next run" if anew else "takes that run over"
            way = f"gpucloud train {job.source.name} --adopt {does}"
            require_own(found, job, sha256_of(spec), self.host, way, self.reader)
        return found

    def kept(self, found: Found) -> Kept | None:
        """Return the machines that a run which succeeded keeps; None for none."""
        if found.state.torn_down or not keeps(found.given.order, found.state):
            return None
        return kept_of(found.given.order, found.state, self._listed(found.state), self.clock.now())

    def plan(self, job: Job) -> Plan:
        """Return the plan of a new run; nothing is read from the store, nothing is written.

        Raises PlanRefused, NoCapacity (no offer, or no quota for any), BudgetTooSmall.
        """
        return self.planner.plan(job)

    def _create(self, job: Job, spec: bytes, asked: Asked, name: str, run: int, check: Check = _unchecked) -> Start:
        jobs = JobStore(self.store, name)
        budget = asked.budget_usd if asked.budget_usd is not None else job.budget_usd
        plan = self.plan(replace(job, name=name, budget_usd=budget))
        job, code_sha256, packed = self.packed(job)
        check(Prospect(name=name, plan=plan, state=None))
        if jobs.spec() is None:  # before all else: the store says what time it is where there is something to ask for
            jobs.keep_spec(spec)
        jobs.keep_code(code_sha256, packed)
        now = self._now(jobs)
        order = Order(
            number=1,
            store=self.store.url,
            job=name,
            base=job.name,
            run=run,
            by=caller(),
            at=now,
            first_at=now,
            host=self.host,
            resolved=job,
            spec_sha256=sha256_of(spec),
            code_sha256=code_sha256,
            file_budget_usd=job.budget_usd,
            budget_usd=budget,
            deadline_at=now + job.deadline if job.deadline is not None else None,
            **_requests(asked),
        )
        try:
            orders = self._orders(jobs)
            given = orders.first(order)
            jobs.create(submitted(first_state(name, job, plan.offer), now))
            given = orders.keep_first(given)
        except (Conflict, OrderChanged):
            raise UsageError(f"{name} was started elsewhere just now", hint="the same command again") from None
        return Start(name=name, order=order, over=given, plan=plan, continues=False)

    def _continue(self, job: Job, spec: bytes, asked: Asked, found: Found, check: Check) -> Start:
        jobs, before = JobStore(self.store, found.name), found.given.order
        orders, now = self._orders(jobs), self._now(jobs)
        newer, state = orders.put_back_before(found.given), self._taken_over(jobs, found.state, now)
        trusted = orders.is_trusted(found.given) and newer is None
        if not trusted:  # whoever wrote it may have raised the budget: the file's counts
            before = replace(before, budget_usd=job.budget_usd, file_budget_usd=job.budget_usd, budget_changes=())
        held = self.held(found, job, now) if trusted and not asked.again else 0
        reopens, ends = held > 0, is_finished(state) and not held  # `ends`: it lacks its teardown alone
        # What is ordered now comes after all that was; another's may say that it is of the future.
        before = replace(before, first_at=min((newer or before).first_at, now))
        used = NOTHING_USED if ends else self._tracker(jobs).used(state, self._listed(state), now)
        budget, order = _budget(before, job, asked), self._next(before, job, spec, asked, now)
        packed, plan = None, None
        if ends:
            order = to_wind_up(order, before, before if trusted else order)  # what goes on is compared with what ran
        else:  # what is left of a run that has ended is ended, whatever one would cost now
            known, code_sha256, packed = self.packed(job)
            order = with_budget(replace(order, resolved=known, code_sha256=code_sha256), budget)
        if reruns := script_of(order.resolved) if runs_otherwise(before, order) else "":
            state = outdated(state, reruns)
        if reopens or state.torn_down:
            require_time(state, order, now)
        if reopens:
            self._require_rest(state, order, used.usd)
        elif not ends and state.attempt is None:
            require_steps_left(before, order, found.state)
            plan = self._plan_again(replace(job, name=found.name, budget_usd=order.budget_usd), order, state, now, used)
        elif not ends:
            self._require_payable(jobs, state, before, order, now)
        onward = self._onward(replace(found, state=state), job, spec, asked, reopens=reopens, ends=ends)
        heard = check(Prospect(name=found.name, plan=plan, state=state, onward=onward, held=held))
        jobs.keep_code(order.code_sha256, packed)  # what other orders name stays: this one may still be refused
        instead, files = self._in_its_place(order, state, used.usd, now), partial(edited_files, jobs, packed)
        changed = () if ends else changes_between(before, order, state.attempt, instead, heard, files)
        if not trusted:
            changed = (*changed, _UNTRUSTED if newer is None else _PUT_BACK.format(number=found.given.order.number))
        return Start(
            name=found.name,
            order=order,
            over=found.given,
            plan=plan,
            continues=True,
            changed=changed,
            reopens=reopens,
            reruns=reruns,
            after_teardown=state.torn_down,
            clears=ends and onward is not Onward.RAN,
            winds_up=onward is Onward.RAN,
            waited=held_until(found.given.order, state) is not None,
        )

    def _onward(self, found: Found, job: Job, spec: bytes, asked: Asked, *, reopens: bool, ends: bool) -> Onward | None:
        asks = replace(found.given.order, **{name: value for name, value in _requests(asked).items() if value})
        same = asks == replace(found.given.order, hold=asks.hold) and asked.budget_usd in {None, asks.budget_usd}
        if ends and same and not asked.again and self.has_run(found, job, spec):
            return Onward.RAN
        return onward_of(found.state, reopens=reopens, again=asked.again)

    def has_run(self, found: Found, job: Job, spec: bytes) -> bool:
        """Whether it has succeeded, and nothing was edited since: a start follows a supervisor that was killed."""
        order, ran, attempts = found.given.order, found.given.order.resolved, found.state.attempts
        other = ran.cloud is not job.cloud or job.profile_steps not in {None, ran.profile_steps}
        if other or not attempts or found.state.status is not JobStatus.SUCCEEDED:
            return False
        return order.spec_sha256 == sha256_of(spec) and attempts[-1].script == script_of(self.packed(job)[0])

    def held(self, found: Found, job: Job, now: datetime) -> int:
        """Return how many machines wait for the run's mended script, if they are such as the job file wants now."""
        until, before = held_until(found.given.order, found.state), found.given.order.resolved
        if until is None or now >= until:
            return 0
        sections = (cloud.traits.section for cloud in Cloud)
        rented = ("cloud", "resources", "machine", *(section for section in sections if section is not None))
        alike = all(getattr(before, name) == getattr(job, name) for name in rented)
        return len(self._listed(found.state).alive) if alike else 0

    def _require_rest(self, state: JobState, order: Order, spent: Decimal) -> None:
        """A run that goes on has what is left of its budget, which may be less than a start costs."""
        rest, nodes = order.budget_usd - spent, order.resolved.resources.nodes
        least_usd = least_to_go_on(state, nodes, self.rules.prepaid_rule)
        if rest < least_usd:
            anew = f"; or a new run: gpucloud train {state.job} --again" if state.script_failed else ""
            raise BudgetTooSmall(
                f"{state.job} has {max(rest, ZERO):.2f} USD left of {order.budget_usd:f} USD, too little to go on",
                hint=f"gpucloud train {state.job} --budget '{in_cents(spent + least_usd)} USD' is the least{anew}",
            )

    def _in_its_place(self, order: Order, state: JobState, spent: Decimal, now: datetime) -> InItsPlace:
        """Return what it takes to have the order run in place of an attempt, on new machines."""
        usd = least_to_go_on(state, order.resolved.resources.nodes, self.rules.prepaid_rule, keeps=False)
        late = no_start_fits(state, order.deadline_at, NO_GROUP, now, self.rules.limits)
        fits, resumes = not late and order.budget_usd - spent >= usd, self._resumes(state, order.resolved)
        return InItsPlace(usd=usd if fits else None, saved=state.checkpoint is not None, resumes=resumes)

    def _next(self, before: Order, job: Job, spec: bytes, asked: Asked, now: datetime) -> Order:
        """Return the order of a start that goes on with a run: what the job's end was wished for is over."""
        return replace(
            before,
            number=before.number + 1,
            by=caller(),
            at=now,
            host=self.host,
            resolved=job,
            spec_sha256=sha256_of(spec),
            file_budget_usd=job.budget_usd,
            deadline_at=before.first_at + job.deadline if job.deadline is not None else None,
            end=None,
            **_requests(asked),
        )

    def _resumes(self, state: JobState, job: Job) -> bool:
        """Whether the next attempt may find a checkpoint, so that what it promises of it is less for a change."""
        if job.checkpoint.none:
            return False
        saves = self.saving is None or self.saving(job) not in NEVER
        return state.checkpoint is not None or (state.attempt is not None and saves)

    def packed(self, job: Job) -> tuple[Job, str, bytes | None]:
        """Return the job that knows its code, the hash of that, and what makes it anew: None where it is too large."""
        if self.pack_code is None:
            return job, "", None
        code = self.pack_code(job.code, limit=LARGEST_CODE_BYTES, apart=job.path_in_code)
        if code.packed is None:
            return job, "", None
        return replace(job, own_code_sha256=code.own_sha256), code.sha256, code.packed

    def _tracker(self, jobs: JobStore) -> SpendTracker:
        return SpendTracker(jobs, self.market, self.terms)

    def _listed(self, state: JobState) -> GroupView:
        return NO_GROUP if self.group is None else list_here(self.group.describe, state)

    def _taken_over(self, jobs: JobStore, state: JobState, now: datetime) -> JobState:
        return state if self.group is None else as_taken_over(self.group.describe, state, jobs.last_armed, now)

    def _plan_again(self, job: Job, order: Order, state: JobState, now: datetime, used: Used) -> Plan:
        listed = self._listed(state)
        require_start(state, order, now, listed, self.rules.limits)
        planner, rule = self.planner, prepaid_rule_for(state, self.rules.prepaid_rule)
        offers, saves = planner.offers(job), planner.saves(job)
        if state.group is not None:
            look = Snapshot(now=now, state=state, group=listed, spent_usd=used.usd, candidates=offers)
            pool = pool_asked_again(order, look, self.rules)
            plan = make_plan(job, offers, now, rule, used=used, pool=pool, saves=saves, offered=planner.offers)
            self._require_rest(state, order, used.usd)
            return plan
        # Asked of a run without a group alone: machines of its own would count as used of its quota.
        plan = make_plan(job, planner.allowed(job, offers), now, rule, used=used, saves=saves, offered=planner.offers)
        return planner.safer(job, plan, rule, used=used)

    def _require_payable(self, jobs: JobStore, state: JobState, before: Order, order: Order, now: datetime) -> None:
        """An attempt that runs needs no plan; lowered below what it must still cost, it could not even save."""
        standing = self._tracker(jobs).standing(state, self._listed(state), order.resolved.resources.nodes, now)
        rules = rules_for(order.resolved.checkpoint, order.unattended, self.rules)
        if (why := refusal(state, before.budget_usd, order.budget_usd, standing, rules)) is not None:
            least = in_cents(least_to_lower_to(state, standing, rules))
            raise BudgetRefused(f"{state.job}: {why}", hint=f"gpucloud train {state.job} --budget '{least} USD'")

    def _orders(self, jobs: JobStore) -> Orders:
        return Orders(jobs=jobs, clock=self.clock, signer=self.signer, reader=self.reader)

    def _now(self, jobs: JobStore) -> datetime:
        return StoreClock(self.clock, jobs, lambda _: None).now()


def _requests(asked: Asked) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("until", "keep", "drill", "hold", "unattended")}


def _budget(before: Order, job: Job, asked: Asked) -> Decimal:
    """The file's budget counts only where it changed since the last start: `gpucloud budget` may have come after it."""
    if asked.budget_usd is not None:
        return asked.budget_usd
    return job.budget_usd if job.budget_usd != before.file_budget_usd else before.budget_usd
