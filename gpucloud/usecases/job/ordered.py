"""A known job as it is meant on this machine, what going on with it or ending it takes here, and its state then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from gpucloud.domain.errors import CredentialsError, GpucloudError, PlanRefused, StateUnreadable, StoreError
from gpucloud.domain.job.quantities import counted, format_moment, format_span, format_usd, span_of, written_span
from gpucloud.domain.job.spec import AwsChoices, Cloud, Job, KnownJob
from gpucloud.domain.market.plan import affordable, fitting
from gpucloud.domain.node.node import NO_GROUP, GroupView
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.state.order import Order, is_finished, refuse_elsewhere, unusable
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.capacity import no_start_fits, pool_to_stay_in, shortest_start
from gpucloud.domain.supervision.deadline import situation
from gpucloud.domain.supervision.membership import pace_of
from gpucloud.domain.supervision.self_driving import waited_for
from gpucloud.domain.supervision.snapshot import Limits, Rules, Snapshot, Supervising, goal_of
from gpucloud.domain.supervision.strays import FindFleet, living_elsewhere
from gpucloud.domain.supervision.transitions import reopen
from gpucloud.store import is_refused, takes_nothing
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.condition import from_where
from gpucloud.usecases.jobstore.lease import unheld_for
from gpucloud.usecases.jobstore.orders import Given, Orders, sha256_of
from gpucloud.usecases.jobstore.runs import Found, outdated
from gpucloud.usecases.services import Services, Watcher
from gpucloud.usecases.supervise.agents import end_by_agents

_EDITED = "{file} was changed since the job was started: its order {number} counts; `gpucloud train` takes the file up"


UnpackCode = Callable[[str, Callable[[], bytes]], Path]
"""Makes the folder of a tree of code, from the object that the store has of it where that is not here: StoreError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedJob:
    """A known job by its orders and its file here.

    `host` tells which machine this is, `read_job` reads job files (JobFileError). Data in folders, secrets and keys
    are those of the file here unless the order was given here, by the own key; what comes home comes to where the file
    is known to be.
    """

    known: KnownJob
    orders: Orders
    host: Callable[[], str]
    read_job: Callable[[Path], Job]
    unpack: UnpackCode

    def to_go_on(self, given: Given) -> tuple[Job, str | None]:
        """Return the job as the order says, its code the order's, and a line where the job file says another by now.

        Raises JobFileError, StoreError, CredentialsError for what another machine alone can go on with.
        """
        if not self.orders.is_trusted(given):
            return self.to_end(given)
        order, is_here = given.order, self._is_given_here(given)
        refusal = None if is_here else refuse_elsewhere(order, has_file=self.known.file.is_file())
        if refusal is not None:
            raise CredentialsError(refusal.why, hint=refusal.hint)
        job = as_known(order.resolved, self.known)
        if not is_here:
            job = self._as_meant_here(job, needs_file=self.known.file.is_file())
        return self.with_pinned_code(job, order), self._edited(order)

    def to_end(self, given: Given) -> tuple[Job, str | None]:
        """Return the job as far as ending it needs it: without its code, which may be gone; and that line.

        An order that nobody signed whose word counts here says nothing but the job's name: that is enough.
        """
        if not self.orders.is_trusted(given):
            return _stand_in(self.known, given.order.budget_usd), None
        job = as_known(given.order.resolved, self.known)
        if not self._is_given_here(given):
            job = self._as_meant_here(job, needs_file=False)
        return job, self._edited(given.order)

    def newest(self) -> Job:
        """Return the job as its newest order says, for what comes home. UsageError where there is none."""
        return self.to_end(self.orders.newest())[0]

    def placed(self) -> Job | None:
        """Return what says on which account and in which regions the job runs; None where its order may not say it."""
        given = self.orders.given()
        if given is None or not self.orders.is_trusted(given):
            return None
        job = as_known(given.order.resolved, self.known)
        if self._is_given_here(given):
            return job
        return self._as_meant_here(job, needs_file=False) if unusable(given.order) is None else None

    def with_pinned_code(self, job: Job, order: Order) -> Job:
        """Return the job with the code that its order names, which no edit of the folder reaches. Raises StoreError."""
        sha256 = order.code_sha256
        if not sha256:
            return job
        code = self.unpack(sha256, lambda: self.orders.jobs.code(sha256))
        return replace(job, code=code, own_code_sha256=order.resolved.own_code_sha256)

    def _is_given_here(self, given: Given) -> bool:
        """Return whether what an order names of its machine is its reader's own word: a signer may name any host."""
        return given.order.host == self.host() and self.orders.is_own(given)

    def _as_meant_here(self, job: Job, *, needs_file: bool) -> Job:
        """Return the job of another machine's order with nothing of this machine but what the job file here names.

        JobFileError for a file that cannot be read, where `needs_file`.
        """
        try:
            here = self.read_job(self.known.file)
        except GpucloudError:
            if needs_file:
                raise
            in_s3 = tuple((source, name) for source, name in job.data if source.startswith("s3://"))
            return replace(job, code=self.known.file.parent, data=in_s3, ssh=replace(job.ssh, key=None), secrets=())
        owned = (cloud.traits.section for cloud in Cloud if cloud.traits.owned)
        hosts = {name: getattr(here, name) for name in owned if name is not None}  # the user's keys log in to them
        return replace(job, code=here.code, data=here.data, secrets=here.secrets, **hosts)

    def _edited(self, order: Order) -> str | None:
        try:
            differs = sha256_of(self.known.file.read_bytes()) != order.spec_sha256
        except OSError:
            return None
        return _EDITED.format(file=self.known.file, number=order.number) if differs else None


def enough_to_end(known: KnownJob, read_job: Callable[[Path], Job]) -> Job:
    """Return what ending a job takes where nobody can read its order: as its file here says, else as remembered."""
    with suppress(GpucloudError):
        return as_known(read_job(known.file), known)
    return _stand_in(known, Decimal(0))


def as_known(job: Job, known: KnownJob) -> Job:
    """Return the job where this machine knows it to be: an order, or a file, may name another place by now."""
    aws = replace(job.aws, profile=known.profile)
    return replace(job, source=known.file, cloud=known.cloud, store=known.store, aws=aws)


def _stand_in(known: KnownJob, budget_usd: Decimal) -> Job:
    """A job that is enough to end machines; nothing of it is ever sent to a node."""
    return Job(
        name=known.name,
        run="true",
        budget_usd=budget_usd,
        source=known.file,
        code=known.file.parent,
        cloud=known.cloud,
        store=known.store,
        aws=AwsChoices(profile=known.profile),
    )


# How a process comes to a job: all that going on with it takes, or what its end takes. Every command that supervises
# comes by here, so that none asks for less than another, or for what it does not need.


FindKey = Callable[[], Path | None]


class MakeServices(Protocol):
    """Composes what supervising a run of a job takes."""

    def __call__(self, job: Job, name: str, *, goes_on: bool = True, unattended: timedelta | None = None) -> Services:
        """Return it; without `goes_on` what ending the run takes: no secrets, and no key is made. Raises UsageError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What there is here: the job as it is meant here, and what supervising it takes.

    `unsaved` says why the job's end is one without a last save, None where there is one, or nothing to save. `edited`
    is the line to tell where the job file says another job by now.
    """

    job: Job
    services: Services
    unsaved: str | None = None
    edited: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The way to one known job from here.

    `key` tells where the private key of its machines is, or would be; None where they are opened by the user's own.
    """

    ordered: OrderedJob
    key: FindKey
    services: MakeServices
    fleet_elsewhere: FindFleet

    def by_order(self, state: JobState, given: Given) -> Means:
        """Return what there is for the job as it was ordered: to go on with it, or to end it.

        Raises CredentialsError, JobFileError, StoreError, UsageError where it cannot be gone on with from here.
        """
        if state.status.ended or given.order.end is not None:
            return self.to_end(state, given)
        self.require_key(state)
        (job, edited), unattended = self.ordered.to_go_on(given), given.order.unattended
        return Means(job=job, edited=edited, services=self.services(job, self._name, unattended=unattended))

    def to_go_on(self, state: JobState, job: Job, order: Order, *, reopens: bool) -> Means:
        """Return what there is for the job as its file here says, under a start's order. Raises what `by_order` raises.

        A run that lacks its teardown alone needs nothing.
        """
        self.require_fleet(state)
        if is_finished(state) and not reopens:
            return Means(job=job, services=self.services(job, self._name, goes_on=False))
        self.require_key(state)
        job = self.ordered.with_pinned_code(job, order)
        return Means(job=job, services=self.services(job, self._name, unattended=order.unattended))

    def to_end(self, state: JobState, given: Given) -> Means:
        """Return what there is to end the job: with a last save where an attempt runs and its code and key are here.

        An end takes no secrets, and no key is made for it. Raises a StoreError that may pass: what there is to save is
        not given up for that; FleetElsewhere where another home alone can end the machines.
        """
        self.require_fleet(state)
        job, edited = self.ordered.to_end(given)
        unsaved = None
        if not state.status.ended and not self.ordered.orders.is_trusted(given):
            unsaved = "its order is signed by nobody you trust"
        elif not state.status.ended:
            try:
                self.require_key(state)
                if state.attempt is not None:
                    job, edited = self.ordered.to_go_on(given)
                    unsaved = None if job.code.is_dir() else f"there is no folder {job.code}"
            except GpucloudError as error:
                if error.may_pass:
                    raise
                unsaved = str(error)
        services = self.services(job, self._name, goes_on=False)
        return Means(job=job, edited=edited, unsaved=unsaved, services=services)

    def require_fleet(self, state: JobState) -> None:
        """Raise FleetElsewhere where machines of the job live, and stay, on the embedded fleet of another home here."""
        orders, until = self.ordered.orders, None
        while (away := living_elsewhere(self.fleet_elsewhere, state, orders.clock.now())) is not None:
            if (quiet := unheld_for(orders.jobs)) is None:
                return  # one of them has it by now: that one is asked, or named
            until = until or orders.clock.now() + waited_for(state, orders.newest().order, quiet)
            if orders.clock.now() >= until:
                raise away
            orders.clock.sleep(1)

    def require_key(self, state: JobState) -> None:
        """Raise CredentialsError where the key of the job's machines is not here: a new one opens none of them."""
        self.require_fleet(state)
        path = None if state.group is None or self.fleet_elsewhere(state.group) is not None else self.key()
        if path is not None and not path.is_file():
            raise CredentialsError(
                f"{self._name} has machines, and their SSH key is not here ({path})",
                hint="GPUCLOUD_SSH_KEY=<the file>: the same one wherever the job is supervised from, from its start",
            )

    @property
    def _name(self) -> str:
        return self.ordered.known.name


# How a job's state begins, and goes on when it is started again.


def first_state(name: str, job: Job, offer: Offer) -> JobState:
    """Return the state of a run that is going to have that offer."""
    cap = offer.cap_usd_per_hour
    return JobState(job=name, pool=offer.pool, cap_usd_per_hour=cap, efa=(offer.efa,), gpu=offer.gpu, tags=job.tags)


def adopt(
    state: JobState, offer: Offer | None, *, drills: bool = False, reopens: bool = False, reruns: str = ""
) -> JobState:
    """Return the state as it goes on under the order of a start, with that offer if it has no group.

    A run that ended for good, and was not torn down, stays as it is, unless its script failed and a mended one
    `reopens` it. A drill that is wanted now is another one. `reruns`: the script that it has from now on, where
    that is not the last order's.
    """
    if is_finished(state) and not (reopens and state.script_failed):
        return state
    going_on = reopen(state) if state.status.ended else state
    message = going_on.message if going_on.attempt is not None else None  # what stopped it before is over
    adopted = replace(going_on, message=message)
    if drills:
        adopted = replace(adopted, drilled=None, drill_refused=None)
    adopted = outdated(adopted, reruns) if reruns else adopted
    if adopted.group is not None or offer is None:
        return adopted
    cap = offer.cap_usd_per_hour
    return replace(adopted, pool=offer.pool, cap_usd_per_hour=cap, efa=(offer.efa,), gpu=offer.gpu)


def pool_asked_again(order: Order, look: Snapshot, rules: Rules) -> Pool | None:
    """Return the pool that a run with a group asks again; None where it turns to another one.

    It is what whoever supervises it decides at the first look. The snapshot's candidates are all that is offered.
    """
    goal = goal_of(order, Supervising(leaves=order.unattended is not None))
    offers, left_usd = fitting(order.resolved, look.candidates), goal.budget_usd - look.spent_usd
    look = replace(look, candidates=affordable(offers, goal.nodes, left_usd, rules.prepaid_rule))
    return pool_to_stay_in(look, by_policy=situation(goal, look, rules) is not None)


def require_time(state: JobState, order: Order, now: datetime) -> None:
    """Raise PlanRefused after the deadline of a run of which nothing trains; it counts from its first start."""
    if order.deadline_at is None or now < order.deadline_at:
        return
    start = from_where(state.checkpoint)
    raise PlanRefused(
        f"the deadline of {state.job} was at {format_moment(order.deadline_at, now)}: it counts from its first start",
        hint=f"with a later `deadline:` it goes on from {start}; gpucloud train {state.job} --again begins a new run",
    )


def require_time_by_file(found: Found, job: Job, now: datetime) -> None:
    """Raise PlanRefused for an ended run whose deadline, as the job file has it now, is over."""
    order, lasts = found.given.order, job.deadline
    if found.state.status.ended:
        require_time(found.state, replace(order, deadline_at=order.first_at + lasts if lasts else None), now)


_TYPED = timedelta(minutes=5)
"""For whoever has to write a later deadline: the hint is to be the least that does, when it is given again."""


def require_start(state: JobState, order: Order, now: datetime, group: GroupView, limits: Limits) -> None:
    """Raise PlanRefused for a run without machines where no start fits before its deadline; the hint is what would do.

    The least deadline has room for the work that is left, as far as that is known. A run whose deadline has passed, and
    of which something is left, is gone on with: whoever supervises it ends it.
    """
    if not no_start_fits(state, order.deadline_at, group, now, limits):
        return
    if order.deadline_at is None or order.deadline_at <= now:
        return
    job = order.resolved
    pace = pace_of(state, job.work, now, limits, job.resources.nodes)
    rest = f"{format_span(pace.left)} of work and " if pace.left is not None else ""
    least = now - order.first_at + pace.start + (pace.left or timedelta(0)) + _TYPED
    raise PlanRefused(
        f"{format_span(order.deadline_at - now)} are left until the deadline of {state.job}, which counts from its"
        f" first start: a start takes {format_span(shortest_start(state, limits))} at the least, and nothing would come"
        " of what is rented",
        hint=f"deadline: {written_span(least)}, for {rest}a changeover of {format_span(pace.start)}",
    )


# A job in whose store nothing can be written. A full one is so for everybody: its machines are ended all the same.
# Where only this caller may not write, they go on: others can end them with a save.


_WAITED_S = 0.2
_SLACK = timedelta(seconds=5)


def end_unwritten(asker: Asker, access: Access, error: StoreError, watcher: Watcher, *, abandons: bool) -> None:
    """End the machines of a job by the state that is there, and raise StoreError: that it has ended is not written.

    A supervisor that cannot write loses the job when its lease is over: that is waited for. The script is stopped, and
    what it wrote comes home: what cannot keeps its machines, unless one `abandons` it. Returns where the store takes
    what is written: then `error` is about something else.
    """
    state, clock, name = asker.state(), asker.clock, access.ordered.known.name
    refused = _refusal(asker, state, error) if state.group is not None else None
    if refused is None:
        return
    if not (abandons or takes_nothing(refused)):
        raise StoreError(
            f"{name} is not ended: you may not write to its store, and who may can save it: {refused.message};"
            f" {_that_stays(asker, state)}",
            hint=f"{refused.hint}, then gpucloud down {name}; or that by {asker.supervisor() or 'whoever started it'};"
            f" {_abandon(name)} ends the machines all the same",
        )
    watcher.story(f"{error}\nnothing can be written there: ending the script and the machines of {name} all the same")
    until = clock.now() + span_of(state.lease_s) + _SLACK
    while (by := asker.supervisor()) is not None:
        if clock.now() > until:
            raise StoreError(f"{error.message}; {by} can, and goes on with {name}", hint=f"gpucloud down {name} there")
        clock.sleep(_WAITED_S)
    try:
        job, _ = access.ordered.to_end(access.ordered.orders.newest())
        services = access.services(job, name, goes_on=False)
        left = end_by_agents(services, asker.state(), watcher.story, abandons=abandons)
    except GpucloudError:
        watcher.story(_that_stays(asker, state))
        raise
    if left is not None:
        raise StoreError(
            f"{name} is stopped, and its machines are not ended: results of attempt {left.attempt} could not come home:"
            f" {left.error.message}; {_that_stays(asker, state)}",
            hint=f"{left.error.hint or 'see to that'}, then gpucloud down {name}; {_abandon(name)} ends them without",
        )
    first, then = f"{error.hint}, then " if error.hint else "", "notes what it has cost and removes what is left"
    message = f"the machines of {name} are ended, and that is not written down: {error.message}"
    raise StoreError(message, hint=f"{first}gpucloud down {name} {then}")


def not_ended_by(asker: Asker) -> GpucloudError | None:
    """Return why the store, or the credentials, would not let the job be ended from here now; None where they would.

    Nor do they keep a job from its end that is gone, or of which nothing can be read.
    """
    try:
        asker.jobs.try_to_keep(asker.state())
    except GpucloudError as error:
        theirs = isinstance(error, (StoreError, CredentialsError)) and not isinstance(error, StateUnreadable)
        return error if theirs and not takes_nothing(error) else None
    return None


def _abandon(name: str) -> str:
    return f"gpucloud down {name} --abandon"


def _refusal(asker: Asker, state: JobState, error: StoreError) -> StoreError | None:
    """Return why nothing of the job can be written from here; None where its state can, or may be in a moment."""
    try:
        asker.jobs.try_to_keep(state)
    except StoreError as refused:
        return None if refused.may_pass else refused
    return error if is_refused(error) else None


def _that_stays(asker: Asker, state: JobState) -> str:
    """Return which machines go on, until when they are paid, and what they cost at the most."""
    listed, now = NO_GROUP, asker.clock.now()
    with suppress(GpucloudError):
        listed = asker.listed(state)
    count, until = len(listed.alive) or len(state.alive), listed.armed_until or state.paid_until
    usd = count * state.dearest_usd_per_hour
    paid = f", paid until {format_moment(until, now)}" if until is not None else ""
    costs = f", for at most {format_usd(usd)} an hour" if usd else ""
    return f"{counted(count, 'machine')} of it {'goes' if count == 1 else 'go'} on{paid}{costs}"
