"""Looking: the cloud's list, every node's answer and its new output, in one pass with a deadline."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.errors import GpucloudError, NodeError
from gpucloud.domain.market.plan import affordable, fitting
from gpucloud.domain.money.ledger import with_extras
from gpucloud.domain.node.member import workers_per_node
from gpucloud.domain.node.node import NO_GROUP, EndCause, GroupView, Node, NodeState
from gpucloud.domain.node.status import Status
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import Attempt, CheckpointRef, ExitReason, JobState
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import Appoint
from gpucloud.domain.supervision.capacity import is_cooling
from gpucloud.domain.supervision.deadline import capacity_choice, lesson
from gpucloud.domain.supervision.elastic import appointed, enough_since
from gpucloud.domain.supervision.membership import is_gone, is_over, members_of, progress_of
from gpucloud.domain.supervision.quarantine import failures, noted, silences
from gpucloud.domain.supervision.snapshot import DriveTrial, Goal, Limits, NodeSnapshot, Readiness, Snapshot
from gpucloud.store import TooMany, newest_commit
from gpucloud.usecases.money.spend import Payable, SpendTracker
from gpucloud.usecases.services import Learning, Services
from gpucloud.usecases.supervise.closing import OutputsHome
from gpucloud.usecases.supervise.inspection import Inspector
from gpucloud.usecases.supervise.look import LogReader, PeerReports, read_node
from gpucloud.usecases.supervise.needs import gate_wanted
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.usage import UsageHistory, UsageMeter

_ANSWER_S = 0.4  # how long one pass waits for a node; one that is late is silent at this pass
_OFFERS_LAST = timedelta(seconds=60)
_TRY_AGAIN = timedelta(seconds=30)
_TRIES = 2
_COMMITS_UNHEARD = timedelta(seconds=30)
_HEARTBEAT = timedelta(seconds=4)  # an agent that writes nothing for so long is dead, whatever SSH says


@dataclass(slots=True)
class _Memory:
    """What is known of one node from earlier passes; `lost_at` is when it last could not be reached to be prepared.

    `silent_at` is since when it told an earlier supervisor nothing: that counts once it tells this one nothing.
    `mute_at` is since when it answers, and its agent tells nothing new; `prepared_again`: it was, for that.
    `word_at` is when its agent told something new: what is read first may have stood there for long.
    """

    answered_at: datetime
    status: Status | None = None
    heartbeat_at: datetime | None = None
    word_at: datetime | None = None
    asked: Future[Status | None] | None = None
    lost_at: datetime | None = None
    failed_at: datetime | None = None
    silent_at: datetime | None = None
    mute_at: datetime | None = None
    prepared_again: bool = False

    def lost(self) -> None:
        """It did not answer."""
        if self.silent_at is not None:
            self.answered_at, self.silent_at = min(self.answered_at, self.silent_at), None

    def told(self, status: Status | None, now: datetime) -> None:
        """It answered; None: nothing that can be read."""
        self.answered_at = now
        if status is not None and (self.status is None or status.heartbeat != self.status.heartbeat):
            self.word_at = now if self.status is not None else None
            self.status, self.heartbeat_at = status, now
            self.silent_at, self.mute_at, self.prepared_again = None, None, False
        elif self.mute_at is None:
            self.mute_at, self.silent_at = min(now, self.silent_at or now), None

    def mute_for(self, now: datetime) -> timedelta:
        """Return for how long its agent has told nothing new; agents write now and then: zero while that may be all."""
        length = now - self.mute_at if self.mute_at is not None else timedelta(0)
        return length if length > _HEARTBEAT else timedelta(0)


@dataclass(slots=True)
class _Offers:
    """The offers that the job takes, as they were lately."""

    at: datetime | None = None
    found: tuple[Offer, ...] = ()


@dataclass(slots=True)
class Observer:
    """Observes a job and its machines, pass after pass; remembers what a single look cannot tell."""

    services: Services
    bootstrapper: Bootstrapper
    inspector: Inspector
    home: OutputsHome
    tracker: SpendTracker
    logs: LogReader
    pool: ThreadPoolExecutor
    history: UsageHistory
    usage: UsageMeter
    peer_reports: PeerReports
    learning: Learning
    _memory: dict[str, _Memory] = field(default_factory=dict)
    _noted: int = 0
    _drivable: int | None = None
    _offers: _Offers = field(default_factory=_Offers)
    _checkpoint: tuple[tuple[int | None, bool, datetime | None], CheckpointRef | None] = ((None, False, None), None)

    def observe(self, state: JobState, goal: Goal) -> Snapshot:
        """Return what is seen now; `goal` says what is worth a look."""
        now = self.services.clock.now()
        tries = tuple(self.bootstrapper.tries[self._noted :])
        group = self._list_group(state)
        given_back = {node.id for node in group.nodes if node.end_cause is EndCause.CHOICE}
        state = self.home.with_rescued(noted(state, tries, given_back))
        self.bootstrapper.see(group)
        self._ask(group, state, now)
        nodes = tuple(self._node(node, state, now) for node in group.nodes)
        payable = self._payable(state, group, goal, now)
        snapshot = Snapshot(
            now=now,
            state=state,
            group=group,
            nodes=nodes,
            payable_until=payable.until,
            payable_with_another=payable.with_another,
            lasts_until=payable.lasts_until,
            wanted_end=_wanted_end(goal, now),
            spent_usd=payable.used.usd,
            unproven_usd=payable.used.unproven_usd,
            failed_bootstraps=failures(state),
            candidates=self._candidates(state, goal, payable.used.usd, now),
            inspects=gate_wanted(self.services.job, state.gpu) is not None,
            inspection=self.inspector.snapshot(),
            homecoming=self.home.stands(state, group, now),
            outputs_still_at=self.home.still_at,
        )
        snapshot = replace(snapshot, nodes=self._with_trials(nodes, goal))
        snapshot = self._with_capacity_choice(self._with_times(self.peer_reports.hear(snapshot), goal), goal)
        snapshot = replace(snapshot, enough_at=enough_since(goal, snapshot, self.services.rules.limits))
        snapshot = (
            self._with_attempt(snapshot.state.attempt, snapshot) if snapshot.state.attempt is not None else snapshot
        )
        self._noted += len(tries)  # not before: a look that failed is made again
        return snapshot

    def _with_trials(self, nodes: tuple[NodeSnapshot, ...], goal: Goal) -> tuple[NodeSnapshot, ...]:
        """Say what the machines have shown of their right to drive, where they are to, until one has shown that."""
        if (goal.until is not Until.LAUNCHED and self.services.order is None) or self._drivable == goal.number:
            return nodes
        found = tuple(replace(snapshot, trial=self.services.jobs.trial(snapshot.node.id)) for snapshot in nodes)
        shown = any(snapshot.trial == DriveTrial(number=goal.number, refused=None) for snapshot in found)
        if shown and goal.until is not Until.LAUNCHED:
            self._drivable = goal.number
        return found

    def _payable(self, state: JobState, group: GroupView, goal: Goal, now: datetime) -> Payable:
        """Those that take over from others are to be paid too; those that wait for a mended script, all that time."""
        wanted, rule = goal.nodes * (2 if state.successor is not None else 1), self.services.rules.prepaid_rule
        if goal.hold is not None and state.failed_at is not None:
            rule = replace(rule, horizon=max(rule.horizon, goal.hold))
        return self.tracker.payable(state, group, wanted, now, goal.budget_usd, rule)

    def _needed(self, state: JobState, goal: Goal) -> int:
        """Return with how many machines none is missing: an attempt's own, and all that take over from others."""
        own = len(state.attempt.members) if state.attempt is not None else 0
        beside = goal.nodes if state.successor is not None else 0
        return max(own, goal.fewest(state.pool.market)) + beside

    def _with_capacity_choice(self, snapshot: Snapshot, goal: Goal) -> Snapshot:
        """Add what the job is to run on by its deadline, and until when machines that take over could be paid too."""
        tables = self.learning.tables(lesson(goal, snapshot, self.services.rules))
        snapshot = replace(
            snapshot, capacity_choice=capacity_choice(replace(goal, tables=tables), snapshot, self.services.rules)
        )
        offer = appointed(snapshot)
        if offer is None or snapshot.state.successor is not None:
            return snapshot
        both = transitions.appoint(snapshot.state, Appoint(offer=offer), snapshot.now)
        return replace(snapshot, payable_with_successor=self._payable(both, snapshot.group, goal, snapshot.now).until)

    def _list_group(self, state: JobState) -> GroupView:
        return self.services.group.describe(state.group) if state.group is not None else NO_GROUP

    def _candidates(self, state: JobState, goal: Goal, spent_usd: Decimal, now: datetime) -> tuple[Offer, ...]:
        """Ask the market only when another pool is needed or may be, and not at every pass."""
        by_deadline = goal.policy is not None and goal.buys_time
        if not by_deadline and (state.attempt is not None or not is_cooling(state, state.pool, now)):
            return ()
        if self._offers.at is None or now - self._offers.at > _OFFERS_LAST:
            self._offers = _Offers(at=now, found=self._ask_market(state))
        return affordable(self._offers.found, goal.nodes, goal.budget_usd - spent_usd, self.services.rules.prepaid_rule)

    def _ask_market(self, state: JobState) -> tuple[Offer, ...]:
        """A market that does not answer ends nothing that works: the prices of before count, for as long again."""
        job = self.services.job
        try:
            offers = with_extras(self.services.market.offers(job.resources), self.services.terms)
        except GpucloudError:
            if state.attempt is None:
                raise
            return self._offers.found
        return fitting(job, offers)

    def _ask(self, group: GroupView, state: JobState, now: datetime) -> None:
        """Ask those that are prepared, and those that work: what works is heard whether or not we can prepare it."""
        asked = []
        members = {member.node_id for member in state.attempt.members} if state.attempt is not None else set()
        for node in group.nodes:
            memory = self._memory.setdefault(node.id, self._known(node.id, state, now))
            ready = self.bootstrapper.readiness(node.id) is Readiness.READY
            works = node.id in members and node.host_key is not None
            if not ready or node.state is not NodeState.RUNNING:
                self._look_at_unprepared(node.id, memory, state, now, works=works)
            else:
                memory.lost_at = memory.failed_at = None
            if node.state is NodeState.RUNNING and (ready or works):
                if memory.asked is None:
                    memory.asked = self.pool.submit(self._read, node, state)
                asked.append(memory.asked)
        wait(asked, timeout=_ANSWER_S)
        after = self.services.clock.now()
        for memory in self._memory.values():
            if memory.asked is not None and memory.asked.done():
                self._take(memory, memory.asked, after)
                memory.asked = None

    def _known(self, node_id: str, state: JobState, now: datetime) -> _Memory:
        """What was silent for an earlier supervisor still is, if that looked lately; else we may have been away."""
        lately = state.looked_at is not None and now - state.looked_at <= self.services.rules.limits.alone
        silent = (interval.silent_at for interval in state.nodes if interval.node_id == node_id)
        return _Memory(answered_at=now, silent_at=next(silent, None) if lately else None)

    def _look_at_unprepared(
        self, node_id: str, memory: _Memory, state: JobState, now: datetime, *, works: bool
    ) -> None:
        """One that cannot be reached is silent; while it may have a part in an attempt, it is tried again.

        Else a machine that froze while nobody supervised would be waited for until the budget is used up. Between
        attempts it is tried once more where no other answers: it may be us who are cut off.
        """
        if self.bootstrapper.unreachable(node_id):
            memory.lost_at = memory.lost_at or now
            memory.lost()
            doubted = silences(state, node_id) < _TRIES and not self._somebody_answers(now)
            if now - memory.lost_at >= _TRY_AGAIN if state.attempt is not None else doubted:
                self.bootstrapper.forget(node_id)
                memory.lost_at = now
        elif works and self.bootstrapper.readiness(node_id) is Readiness.FAILED:
            memory.failed_at = memory.failed_at or now
            if now - memory.failed_at >= _TRY_AGAIN:
                self.bootstrapper.try_again(node_id, ends=state.attempt is not None and state.attempt.ends_for_good)
                memory.failed_at = None
        elif memory.lost_at is None and not works:
            memory.answered_at, memory.mute_at = now, None

    def _somebody_answers(self, now: datetime) -> bool:
        lately = now - self.services.rules.limits.silent
        return any(memory.status is not None and memory.answered_at > lately for memory in self._memory.values())

    def _read(self, node: Node, state: JobState) -> Status | None:
        host = self.services.shell.host(node)
        status = read_node(host, node.id, state.attempt, workers_per_node(self.services.job), self.logs)[0]
        if state.attempt is not None:
            self.history.look(host, state.attempt.number)
        return status

    def _take(self, memory: _Memory, answer: Future[Status | None], now: datetime) -> None:
        if isinstance(answer.exception(), NodeError):
            memory.lost()
        else:
            memory.told(answer.result(), now)

    def _node(self, node: Node, state: JobState, now: datetime) -> NodeSnapshot:
        memory = self._memory[node.id]
        readiness = self.bootstrapper.readiness(node.id)
        silence = max(timedelta(0), now - memory.answered_at)
        mute = memory.mute_for(now) if not silence else timedelta(0)
        dead = mute > (_HEARTBEAT if memory.heartbeat_at is not None else _TRY_AGAIN)
        if readiness is Readiness.READY and dead and not memory.prepared_again:
            self.bootstrapper.forget(node.id)  # the node answers, and its agent is dead: prepare it again
            memory.prepared_again, memory.mute_at = True, None
            readiness, mute = Readiness.NO, timedelta(0)
        heard = self.bootstrapper.has_heard(node, memory.status, state)
        told = heard or self.bootstrapper.is_being_told(node, state)
        return NodeSnapshot(
            node=node,
            readiness=readiness,
            error=self.bootstrapper.error(node.id),
            status=memory.status,
            silent_for=silence if silence > timedelta(seconds=_ANSWER_S / 2) else timedelta(0),
            mute_for=mute,
            last_word_at=memory.word_at,
            told=told,
            heard=heard,
            refused=self.bootstrapper.refused(node.id),
            setup_failed=self.bootstrapper.setup_failed(node.id),
        )

    def _with_times(self, snapshot: Snapshot, goal: Goal) -> Snapshot:
        """Say for how long that has been so which has a time limit, whoever supervised then."""
        state = transitions.with_steps(snapshot)  # who takes over knows how far others saw it come
        state = transitions.since(state, snapshot, self._needed(state, goal))
        attempt = state.attempt
        return replace(
            snapshot,
            state=state,
            short_for=_for(state.short_at, snapshot.now),
            failed_for=_for(attempt.failed_at, snapshot.now) if attempt is not None else None,
            uneven_for=_for(attempt.broken_at, snapshot.now) if attempt is not None else None,
        )

    def _with_attempt(self, attempt: Attempt, snapshot: Snapshot) -> Snapshot:
        over = all(is_over(attempt, member) for member in members_of(attempt, snapshot))
        use = self.usage.take(attempt, snapshot)
        state = self.usage.written(snapshot.state)
        return replace(snapshot, state=state, checkpoint=self._newest(attempt, snapshot, over=over), use=use)

    def _newest(self, attempt: Attempt, snapshot: Snapshot, *, over: bool) -> CheckpointRef | None:
        """The manifest is read again when the script says that it has committed another step, and when it is over.

        What it committed last it may not have lived to say. One that is not heard may commit all the same: it is read
        now and then, and at every look while its end is waited for.
        """
        progress = progress_of(attempt, snapshot)
        at = snapshot.now if _is_unheard(attempt, snapshot, self.services.rules.limits) else None
        if at is not None and not attempt.ends_for_good:
            at -= (at - attempt.started_at) % _COMMITS_UNHEARD
        news = (progress.committed_step if progress else None, over, at)
        if news != (None, False, None) and news != self._checkpoint[0]:
            self._checkpoint = (news, newest_checkpoint(self.services, snapshot.state))
        return self._checkpoint[1]


def newest_checkpoint(services: Services, state: JobState) -> CheckpointRef | None:
    """Return the job's newest checkpoint, as its store says; None before the first. Raises StoreError.

    Where a script filled the folder beyond what is listed, what was known before stays: nobody is kept from the job by
    that.
    """
    try:
        newest = newest_commit(services.store, services.jobs.checkpoints)
    except TooMany:
        return state.checkpoint
    return CheckpointRef(**newest._asdict()) if newest else None


def _is_unheard(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether a machine that runs the attempt tells nothing; a moment without a word is no silence."""
    members = (node for node in members_of(attempt, snapshot) if node is not None and not is_gone(node))
    return any(max(node.silent_for, node.mute_for) >= limits.silent for node in members)


def _wanted_end(goal: Goal, now: datetime) -> ExitReason | None:
    late = goal.deadline_at is not None and now >= goal.deadline_at
    return goal.end or (ExitReason.DEADLINE if late else None)


def _for(since: datetime | None, now: datetime) -> timedelta | None:
    return max(timedelta(0), now - since) if since is not None else None
