"""Questions about jobs, from any terminal at any time (report, logs, what a run keeps)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum

from gpucloud.domain.checkpoint.layouts import additions_of
from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.domain.job.quantities import counted, format_moment, span_of
from gpucloud.domain.job.spec import Job, Market
from gpucloud.domain.money.budget import Bound, most_prepaid
from gpucloud.domain.money.costs import Sundries, charges_of
from gpucloud.domain.money.ledger import Terms, with_extras
from gpucloud.domain.node.member import workers_per_node
from gpucloud.domain.node.node import NO_GROUP, GroupView
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.offer import rank
from gpucloud.domain.state.order import Order, held_until, is_to_end, keeps, undrilled
from gpucloud.domain.state.state import Attempt, CheckpointRef, ExitReason, JobState, MissingOutput
from gpucloud.domain.supervision.budget import ended_at_limit, resumption, with_leaving
from gpucloud.domain.supervision.capacity import standing
from gpucloud.domain.supervision.membership import time_to_go
from gpucloud.domain.supervision.self_driving import hands_over, makes_itself_fit
from gpucloud.domain.supervision.snapshot import Rules, asked_of
from gpucloud.domain.supervision.strays import as_listed, list_group, unseen_words
from gpucloud.domain.supervision.transitions import with_commit
from gpucloud.ports import Clock, MarketData, NodeGroup
from gpucloud.store import Stored, TooMany, newest_commit
from gpucloud.store.contract import Tally
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import is_over, supervised_by
from gpucloud.usecases.jobstore.orders import Given, Orders, Reader
from gpucloud.usecases.jobstore.records import LogPart, fetched_until
from gpucloud.usecases.jobstore.report import JobReport, report, without_lost_outputs
from gpucloud.usecases.jobstore.runs import current_run
from gpucloud.usecases.money.spend import SpendTracker


class _Comes(Enum):
    """How soon one of its machines takes a job that nobody holds."""

    SOON = "within a minute"
    FITS_FIRST = "once it has made itself fit"


_LEAVING = timedelta(minutes=2)
"""From the question whether to leave until the time is armed: it stands for a minute, and then a supervisor begins."""
_ASKED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepaid:
    """For how long machines are paid at the most that are left alone, and what the job has cost by then at the most.

    `asked_for` is how many machines it asks for where some are still to come: they are paid for so long from when they
    are there, whichever come. Else it is 0, and machines that are there are paid `until` then. With `keep` they stay so
    long after a success, too.
    """

    until: datetime
    lasts: timedelta
    usd: Decimal
    budget_usd: Decimal
    asked_for: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftJob:
    """A job as somebody leaves it: its state, who supervises it then, and how many machines its group asks for.

    `end` is why its newest order wants its end; `asked_for` is None where nobody tells it.
    """

    state: JobState
    supervisor: str | None = None
    end: ExitReason | None = None
    asked_for: int | None = None

    @property
    def ends(self) -> bool:
        """Whether it is to end, and has not ended yet."""
        return is_to_end(self.state, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupervised:
    """A job that is not over and that nobody sees to, and until when its output was fetched."""

    state: JobState
    fetched_until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Answers questions about one job; changes nothing but to leave a charge that it caused.

    `tally` counts what is asked of the job's store, where output that is followed is looked for every `look_s`; whoever
    fetches it keeps it there every `flush_s`.
    `reader` knows whose signatures count here, and is made for an order that is signed: that takes cryptography.
    """

    jobs: JobStore
    market: MarketData
    group: NodeGroup
    clock: Clock
    terms: Terms
    rules: Rules = field(default_factory=Rules)
    tally: Tally = field(default_factory=Tally)
    look_s: float = 0.3
    flush_s: float = 1.0
    reader: Callable[[], Reader] | None = None

    def state(self) -> JobState:
        """Return the job's state as it may be believed; UsageError when there is no such job."""
        return self._loaded(self.jobs.believed())[0]

    def is_newest_run(self) -> bool:
        """Return whether no later run of the same job is in its store: it is listed for that."""
        own = self._orders.newest().order
        newest = current_run(self.jobs.store, own.base, self.clock)
        return newest is None or newest.given.order.run <= own.run

    def stored_state(self) -> JobState:
        """Return the state as it is stored, for what nothing is decided by: it costs one request."""
        return self._loaded(self.jobs.load())[0]

    def report(self) -> JobReport:
        """Return where the job stands, what it has cost, and which machines live."""
        state, stored = self._loaded(self.jobs.believed())
        supervisor, now = _supervisor(state, stored), self.clock.now()
        tracker = SpendTracker(self.jobs, self.market, self.terms)
        listed = self.listed(state)
        state = _with_shutdown(as_listed(state, listed, now), listed)
        used = tracker.used(state, listed, now)
        given = self._orders.newest()
        spend = tracker.spend(state, listed, now, given.order.budget_usd, self.rules.prepaid_rule, used.unproven_usd)
        comes = self._comes(state, given.order, stored) if supervisor is None else None
        again = resumption(state, given.order, used, self.rules.prepaid_rule, stored.store_time)
        told = replace(report(state, spend, tracker.charges(state, now), listed, supervisor), resumption=again)
        if (why := undrilled(given.order, state)) is not None:
            told = replace(told, message=why, exit_code=ExitReason.USER_ERROR.exit_code)
        else:
            nodes, budget_usd = given.order.resolved.resources.nodes, given.order.budget_usd
            end = ended_at_limit(state, budget_usd, used, self.rules.prepaid_rule, nodes=nodes, again=again)
            told = replace(told, message=end.said() if end is not None else state.message, limit_end=end)
        told = replace(
            told,
            backoff=standing(state, now, self.rules.limits),
            signed_by=self._signed_by(given),
            started_at=given.order.first_at,
            ordered_at=given.order.at,
            deadline_at=given.order.deadline_at,
            held_until=_held_until(given.order, state, listed, now),
            kept_until=_kept_until(given.order, state, listed, now),
            owned=state.pool.market is Market.OWNED,
            rehearses=bool(given.order.resolved.trial),
            last_supervisor=supervised_by(state.owner) if state.owner is not None else None,
            written_at=stored.modified,
            looked_at=stored.store_time,
            base=given.order.base,
            run=given.order.run,
            limits=self.rules.limits,
            least_nodes=given.order.resolved.resources.least,
            ends=is_to_end(state, given.order.end),
            spec_sha256=given.order.spec_sha256,
            hands_over=comes is not None,
            fits_first=comes is _Comes.FITS_FIRST,
            buys_time=_buys_time(state, supervisor),
            outputs=asked_of(state.attempts, given.order.resolved.outputs),
            saves=None if given.order.is_stand_in else given.order.resolved.checkpoint,
            additions=additions_of(given.order.resolved.checkpoint.directory),
        )
        told = replace(told, message="; ".join(filter(None, (told.message, unseen_words(listed, supervisor)))) or None)
        return without_lost_outputs(told)

    def with_stored_checkpoint(self, report: JobReport) -> JobReport:
        """Return the report with the newest checkpoint that the store has: a script saves on without a supervisor."""
        if report.supervisor is not None or not report.attempts or report.attempts[-1].reason is not None:
            return report
        with suppress(StoreError, TooMany):
            newest = newest_commit(self.jobs.store, self.jobs.checkpoints)
            if newest is not None:
                attempts = with_commit(report.attempts, newest.step, newest.counts)
                return replace(report, checkpoint=CheckpointRef(**newest._asdict()), attempts=attempts)
        return report

    def listed(self, state: JobState) -> GroupView:
        """Return the job's group as the cloud lists it now, or as it was known last (`GroupView.unseen`)."""
        return list_group(self.group.describe, state, self.clock.now) if state.group is not None else NO_GROUP

    def prepaid_for(self, span: timedelta) -> Prepaid | None:
        """Return what the job's machines are prepaid for that are left alone for so long; None for too little money.

        What is told is kept to: where machines are still to come, it is the most over all that may.
        """
        state, order, now = self.state(), self.order(), self.clock.now()
        listed, wanted = self.listed(state), order.resolved.resources
        comes = len(listed.alive) < wanted.least
        least, within = (wanted.least, timedelta(0)) if comes else (len(listed.alive), _LEAVING)
        caps = {state.cap_usd_per_hour, state.dearest_usd_per_hour}
        coming = self._caps_to_come(order.resolved) if comes else set()
        most = most_prepaid(
            caps | (coming or set()),
            range(least, max(least, wanted.nodes) + 1),
            used_usd=SpendTracker(self.jobs, self.market, self.terms).used(state, listed, now).usd,
            budget_usd=order.budget_usd,
            prepaid_rule=replace(self.rules.prepaid_rule, horizon=span),
            launched=not comes,
            within=within,
        )
        if coming is None:
            most = Bound(lasts=span, usd=order.budget_usd)
        if most is None:
            return None
        return Prepaid(
            until=now + most.lasts,
            lasts=most.lasts,
            usd=most.usd,
            budget_usd=order.budget_usd,
            asked_for=wanted.nodes if comes else 0,
            keep=order.keep,
        )

    def _caps_to_come(self, job: Job) -> set[Decimal] | None:
        """Return the highest prices of all machines that the job may turn to; None where nobody tells them."""
        try:
            offers = self.market.offers(job.resources)
        except GpucloudError:
            return None
        return {offer.cap_usd_per_hour for offer in rank(with_extras(offers, self.terms), job.resources)}

    def left_job(self) -> LeftJob:
        """Return what somebody leaves who goes now; where the cloud does not answer, as it is stored."""
        state, stored = self._loaded(self.jobs.believed())
        left = LeftJob(state=state, supervisor=_supervisor(state, stored))
        with suppress(GpucloudError):
            left = replace(left, end=self.order().end)
        with suppress(GpucloudError):
            listed = self.listed(state)
            state = _with_shutdown(as_listed(state, listed, self.clock.now()), listed)
            left = replace(left, state=state, asked_for=listed.size)
        return left

    def supervisor(self) -> str | None:
        """Return who supervises the job now, None when nobody does."""
        loaded = self.jobs.believed()  # the lease lasts as long as the user's side said
        return _supervisor(*loaded) if loaded is not None else None

    def is_off(self, attempt: Attempt, state: JobState) -> bool:
        """Whether the cloud lists none of the attempt's machines; False where it does not answer."""
        members = {member.node_id for member in attempt.members}
        with suppress(GpucloudError):
            return not any(node.id in members for node in self.listed(state).alive)
        return False

    def order(self) -> Order:
        """Return the newest order for the job, whoever signed it; UsageError when there is no such job."""
        return self._orders.newest().order

    def ranks_of_a_node(self, attempt: int) -> int:
        """Return how many ranks each node of the attempt had; 1 where nobody can tell any more."""
        try:
            return self.jobs.records.workers(attempt) or workers_per_node(self.order().resolved)
        except GpucloudError:
            return 1

    def bill_pull(self, fetched: int) -> None:
        """Write down what it cost that a command brought bytes out of the cloud, where that costs anything.

        With the requests that were made for it. Whoever may read alone reads all the same.
        """
        if not self.terms.rates:
            return
        now = self.clock.now()
        with suppress(StoreError):
            rates = self.terms.rates_in(self.stored_state().pool.region)
            puts, gets = self.tally.take()
            used = Sundries(attempt=None, start=now, end=now, puts=puts, gets=gets, sent=fetched)
            if charges := charges_of(used, rates):
                self.jobs.bill_outside_budget(f"pull-{now:%Y%m%dT%H%M%S.%f}", charges)

    def output(
        self,
        *,
        attempt: int | None,
        rank: int | None,
        follow: bool,
        caught_up: Callable[[Unsupervised | None], None] = lambda _: None,
    ) -> Iterator[tuple[LogPart, DatedPiece]]:
        """Yield the kept output in order with its times; with `follow`, until the job has ended and all is told.

        Where two supervisors kept the same stretch in different pieces, it comes once. `caught_up` is called whenever
        all that is kept by then was told, with what stands there of a job that nobody sees to.
        """
        told: set[str] = set()
        ends: dict[tuple[int, int], int] = {}
        left: Unsupervised | None = None
        looked: tuple[object, ...] = ()
        while True:
            state, stored = self._loaded(self.jobs.load())
            for part in self.jobs.records.log_parts(attempt):
                if part.key not in told and rank in (None, part.rank):
                    told.add(part.key)
                    piece, told_to = self.jobs.records.read_dated(part), ends.get((part.attempt, part.rank), 0)
                    if (end := part.offset + len(piece.data)) > told_to:
                        ends[part.attempt, part.rank] = end
                        yield part, piece.after(max(0, told_to - part.offset))
            found = stored.version, _supervisor(state, stored), (stored.store_time - stored.modified) // _ASKED_EVERY
            if found != looked:  # each time it is asked is paid for
                looked, left = found, self._unsupervised(state, stored)
            caught_up(left)
            if not follow or state.status.ended:
                return
            self.clock.sleep(self.look_s)

    def _unsupervised(self, state: JobState, stored: Stored) -> Unsupervised | None:
        """One of its machines that is about to take the job sees to it."""
        if state.status.ended or _supervisor(state, stored) is not None:
            return None
        if state.drives_itself and self._comes(state, self.order(), stored) is not None:
            return None
        return Unsupervised(state=state, fetched_until=fetched_until(state, stored.modified) - span_of(self.flush_s))

    @property
    def _orders(self) -> Orders:
        return Orders(jobs=self.jobs, clock=self.clock)

    def _comes(self, state: JobState, order: Order, stored: Stored) -> _Comes | None:
        """Return how soon one of its machines takes the job that nobody holds; None where none does.

        Once one has shown what came of its try to drive, no other is waited for that makes itself fit.
        """
        quiet, now = stored.store_time - stored.modified, stored.store_time
        if not hands_over(state, order.unattended, timedelta(0)):
            return None
        if makes_itself_fit(state, order.at, self.rules.limits, now) and not self._has_tried(state):
            return _Comes.FITS_FIRST
        return _Comes.SOON if hands_over(state, order.unattended, quiet) else None

    def _has_tried(self, state: JobState) -> bool:
        return any(self.jobs.trial(interval.node_id) is not None for interval in state.alive)

    def _signed_by(self, given: Given) -> str | None:
        if self.reader is None or not given.envelope.key:
            return None
        orders = replace(self._orders, reader=self.reader())
        return orders.signed_by(given) if orders.put_back_before(given) is None else None

    def _loaded(self, loaded: tuple[JobState, Stored] | None) -> tuple[JobState, Stored]:
        if loaded is None:
            raise self.jobs.absent()
        return loaded


def with_forecast(report: JobReport) -> JobReport:
    """Return the report with what the whole job will have cost, where its nodes say how far they are.

    Where nobody supervises it, its machines go on until they switch themselves off, whatever their script does; the
    user's own cost nothing.
    """
    if not report.nodes or report.status.ended:
        return report
    alone = report.supervisor is None and not report.can_be_handed_over
    if alone and (report.owned or report.spend.off_at is not None):
        return replace(report, spend=report.spend.until_off())
    to_go = time_to_go(None if report.ran_out or report.ends else report.progress)
    spend = with_leaving(report.spend, (one.status for one in report.standing))
    return replace(report, spend=spend.for_job_of(to_go, report.deadline_at, buys_time=report.buys_time))


def with_stored_outputs(report: JobReport, attempts: frozenset[int]) -> JobReport:
    """Return the report of a job of which outputs of these attempts are in its store: they are not home yet."""
    copies = f"gpucloud cp -r {report.job}:@store/outputs FOLDER copies it"
    then = "" if report.status.ended else f" once the job has ended, {copies} now"
    why = f"in the job's store: {copies if report.home is None else f'gpucloud down {report.job} brings it home{then}'}"

    def told(one: MissingOutput) -> MissingOutput:
        return replace(one, why=f"{one.why}; what was stored before that is {why}") if one.attempt in attempts else one

    said = {(one.path, one.attempt) for one in report.missing_outputs}
    stored = (p for p in report.ever_outputs if (p, None) not in said and any((p, a) not in said for a in attempts))
    missing = (*map(told, report.missing_outputs), *(MissingOutput(path=path, why=why) for path in stored))
    return replace(report, has_stored_outputs=report.status.ended, missing_outputs=missing)


def _with_shutdown(state: JobState, listed: GroupView) -> JobState:
    """Return the state with the shut-off that the cloud has: whoever moved it may not have written that down."""
    return replace(state, paid_until=listed.armed_until if listed.exists else None)


def _held_until(order: Order, state: JobState, listed: GroupView, now: datetime) -> datetime | None:
    until = held_until(order, state) if listed.alive and not state.torn_down else None
    if until is None or until <= now:
        return None
    return min(until, listed.armed_until or until)


def _kept_until(order: Order, state: JobState, listed: GroupView, now: datetime) -> datetime | None:
    until = listed.armed_until
    stay = keeps(order, state) and bool(listed.alive) and not state.torn_down
    return until if stay and until is not None and until > now else None


def _buys_time(state: JobState, supervisor: str | None) -> bool:
    """Whether who holds the job prolongs its machines' paid time: none of these, and nobody who leaves it to them."""
    if supervisor is None or state.owner is None:
        return not state.drives_itself
    return not (state.owner.node or state.owner.leaves)


def _supervisor(state: JobState, stored: Stored) -> str | None:
    return None if state.owner is None or is_over(state, stored) else supervised_by(state.owner)


# What a run that succeeded keeps.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Machines that a run which succeeded leaves up, and until when they are paid; `run` is its number."""

    name: str
    run: int
    machines: int
    until: datetime
    as_of: datetime
    owned: bool = False

    def __str__(self) -> str:
        some = self.machines != 1
        held = "taken" if self.owned else "paid"
        are = f"{counted(self.machines, 'machine')}, {held} until {format_moment(self.until, self.as_of)}"
        # A job's name means its newest run, and another one is there or about to be.
        called = f"{self.name}@1" if self.run == 1 else self.name
        return f"{self.name} keeps {are}: `gpucloud down {called}` ends {'them' if some else 'it'} now"


def kept_of(order: Order, state: JobState, listed: GroupView, now: datetime) -> Kept | None:
    """Return what a run keeps of which the cloud lists that; None where it keeps nothing, or nothing of it lives."""
    alive, until = len(listed.alive), listed.armed_until
    if state.torn_down or not keeps(order, state) or not alive or until is None:
        return None
    owned = state.pool.market is Market.OWNED
    return Kept(name=order.job, run=order.run, machines=alive, until=until, as_of=now, owned=owned)
