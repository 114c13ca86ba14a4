"""Looking: the cloud's list, every node's answer and its new output, in one pass with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.agentstatus import Outcome, Status
from gpucloud.domain.errors import GpucloudError, NodeError
from gpucloud.domain.launch import workers_per_node
from gpucloud.domain.ledger import with_beside
from gpucloud.domain.node import NO_GROUP, GroupView, Node, NodeState
from gpucloud.domain.offer import Offer
from gpucloud.domain.plan import affordable, fitting
from gpucloud.domain.state import Attempt, CheckpointRef, ExitReason, JobState
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import Appoint
from gpucloud.domain.supervision.capacity import is_cooling
from gpucloud.domain.supervision.course import heading
from gpucloud.domain.supervision.elastic import enough_since
from gpucloud.domain.supervision.membership import is_over, members_of, part_of, progress_of
from gpucloud.domain.supervision.seen import Goal, NodeSeen, Readiness, Seen
from gpucloud.domain.supervision.situation import lesson
from gpucloud.domain.supervision.succession import appointed
from gpucloud.store.commits import newest_commit
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.gate import gate_wanted
from gpucloud.usecases.history import HistoryKeeper
from gpucloud.usecases.inspection import Inspector
from gpucloud.usecases.jobstore import Request
from gpucloud.usecases.learning import Learning
from gpucloud.usecases.lookout import LogReader, read_node
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.usage import UsageMeter
from gpucloud.usecases.witnesses import Witnesses
from gpucloud.usecases.world import World

_ANSWER_S = 0.4  # how long one pass waits for a node; one that is late is silent at this pass
_OFFERS_LAST = timedelta(seconds=60)
_TRY_AGAIN = timedelta(seconds=30)
_TRIES = 2
_BEAT = timedelta(seconds=4)  # an agent that writes nothing for so long is dead, whatever SSH says


@dataclass(slots=True)
class _Memory:
    """What is known of one node from earlier passes; `lost_at` is when it last could not be reached to be prepared."""

    answered_at: datetime
    status: Status | None = None
    beat_at: datetime | None = None
    asked: Future[Status | None] | None = None
    lost_at: datetime | None = None


@dataclass(slots=True)
class _Since:
    """When something about the open attempt was first seen."""

    attempt: int = 0
    failed: datetime | None = None
    uneven: datetime | None = None


@dataclass(slots=True)
class _Offers:
    """The offers that the job takes, as they were lately."""

    at: datetime | None = None
    found: tuple[Offer, ...] = ()


@dataclass(slots=True)
class Observer:
    """Sees a job's world, pass after pass; remembers what a single look cannot tell."""

    world: World
    goal: Goal
    preparer: Preparer
    inspector: Inspector
    cashier: Cashier
    logs: LogReader
    wanted_end: Callable[[], ExitReason | None]
    pool: ThreadPoolExecutor
    history: HistoryKeeper
    usage: UsageMeter
    witnesses: Witnesses
    learning: Learning
    _memory: dict[str, _Memory] = field(default_factory=dict)
    _since: _Since = field(default_factory=_Since)
    _short_since: datetime | None = None
    _offers: _Offers = field(default_factory=_Offers)
    _checkpoint: tuple[tuple[int | None, bool], CheckpointRef | None] = ((None, False), None)

    def observe(self, state: JobState) -> Seen:
        """Return what is seen now."""
        now = self.world.clock.now()
        group = self._list_group(state)
        self.preparer.see(group)
        self._ask(group, state, now)
        nodes = tuple(self._node(node, state, now) for node in group.nodes)
        payable = self.cashier.payable(state, group, self._wanted(state), now, self.world.rules.wall)
        request = self.world.jobs.request()
        seen = Seen(
            now=now,
            state=state,
            group=group,
            nodes=nodes,
            payable_until=payable.until,
            payable_with_another=payable.with_another,
            lasts_until=payable.lasts_until,
            wanted_end=self._wanted_end(request, now),
            budget_wishes=request.budgets,
            spent_usd=payable.spent_usd,
            failed_bootstraps=self.preparer.failures,
            candidates=self._candidates(state, now),
            short_for=self._short_for(state, group, now),
            inspects=gate_wanted(self.world.job, state.gpu) is not None,
            inspection=self.inspector.seen(),
        )
        seen = self._with_heading(self.witnesses.hear(seen))
        seen = replace(seen, enough_at=enough_since(self.goal, seen, self.world.rules.limits))
        return self._with_times(state.attempt, seen) if state.attempt is not None else seen

    def _wanted(self, state: JobState) -> int:
        """Return how many machines there are to be, those that take over from others included."""
        return self.goal.nodes * (2 if state.successor is not None else 1)

    def _needed(self, state: JobState) -> int:
        """Return with how many machines none is missing: an attempt's own, and all that take over from others."""
        own = len(state.attempt.members) if state.attempt is not None else 0
        beside = self.goal.nodes if state.successor is not None else 0
        return max(own, self.goal.fewest(state.pool.market)) + beside

    def _with_heading(self, seen: Seen) -> Seen:
        """Add what the job is to run on by its deadline, and until when machines that take over could be paid too."""
        tables = self.learning.tables(lesson(self.goal, seen, self.world.rules))
        seen = replace(seen, heading=heading(replace(self.goal, tables=tables), seen, self.world.rules))
        offer = appointed(seen)
        if offer is None or seen.state.successor is not None:
            return seen
        both = books.appoint(seen.state, Appoint(offer=offer), seen.now)
        payable = self.cashier.payable(both, seen.group, self._wanted(both), seen.now, self.world.rules.wall)
        return replace(seen, payable_with_successor=payable.until)

    def _list_group(self, state: JobState) -> GroupView:
        return self.world.group.describe(state.group) if state.group is not None else NO_GROUP

    def _short_for(self, state: JobState, group: GroupView, now: datetime) -> timedelta | None:
        if not 0 < len(group.counted) < self._needed(state):
            self._short_since = None
            return None
        self._short_since = self._short_since or now
        return now - self._short_since

    def _candidates(self, state: JobState, now: datetime) -> tuple[Offer, ...]:
        """Ask the market only when another pool is needed or may be, and not at every pass."""
        by_deadline = self.goal.policy is not None and self.goal.buys_time
        if not by_deadline and (state.attempt is not None or not is_cooling(state, state.pool, now)):
            return ()
        if self._offers.at is None or now - self._offers.at > _OFFERS_LAST:
            self._offers = _Offers(at=now, found=self._ask_market(state))
        left = self.cashier.spend(state, now)
        usable = left.budget_usd - left.spent_usd
        return affordable(self._offers.found, self.goal.nodes, usable, self.world.rules.wall)

    def _ask_market(self, state: JobState) -> tuple[Offer, ...]:
        """A market that does not answer ends nothing that works: the prices of before count, for as long again."""
        job = self.world.job
        try:
            offers = with_beside(self.world.market.offers(job.resources), self.world.terms)
        except GpucloudError:
            if state.attempt is None:
                raise
            return self._offers.found
        return fitting(job, offers)

    def _ask(self, group: GroupView, state: JobState, now: datetime) -> None:
        asked = []
        for node in group.nodes:
            memory = self._memory.setdefault(node.id, _Memory(answered_at=now))
            if node.state is NodeState.RUNNING and self.preparer.readiness(node.id) is Readiness.READY:
                if memory.asked is None:
                    memory.asked = self.pool.submit(self._read, node, state)
                asked.append(memory.asked)
                memory.lost_at = None
            else:
                self._look_at_unprepared(node.id, memory, state, now)
        wait(asked, timeout=_ANSWER_S)
        after = self.world.clock.now()
        for memory in self._memory.values():
            if memory.asked is not None and memory.asked.done():
                self._take(memory, memory.asked, after)
                memory.asked = None

    def _look_at_unprepared(self, node_id: str, memory: _Memory, state: JobState, now: datetime) -> None:
        """One that cannot be reached is silent; while it may have a part in an attempt, it is tried again.

        Else a machine that froze while nobody supervised would be waited for until the budget is used up. Between
        attempts it is tried once more where no other answers: it may be us who are cut off.
        """
        if self.preparer.unreachable(node_id):
            memory.lost_at = memory.lost_at or now
            doubted = self.preparer.silences(node_id) < _TRIES and not self._somebody_answers(now)
            if now - memory.lost_at >= _TRY_AGAIN if state.attempt is not None else doubted:
                self.preparer.forget(node_id)
                memory.lost_at = now
        elif memory.lost_at is None:
            memory.answered_at = now

    def _somebody_answers(self, now: datetime) -> bool:
        lately = now - self.world.rules.limits.silent
        return any(memory.status is not None and memory.answered_at > lately for memory in self._memory.values())

    def _read(self, node: Node, state: JobState) -> Status | None:
        host = self.world.shell.host(node)
        status = read_node(host, node.id, state.attempt, workers_per_node(self.world.job), self.logs)[0]
        if state.attempt is not None:
            self.history.look(host, state.attempt.number)
        return status

    def _take(self, memory: _Memory, answer: Future[Status | None], now: datetime) -> None:
        if isinstance(answer.exception(), NodeError):
            return
        status = answer.result()
        memory.answered_at = now
        if status is not None and (memory.status is None or status.beat != memory.status.beat):
            memory.beat_at = now
            memory.status = status

    def _node(self, node: Node, state: JobState, now: datetime) -> NodeSeen:
        memory = self._memory[node.id]
        readiness = self.preparer.readiness(node.id)
        silence = max(timedelta(0), now - memory.answered_at)
        if readiness is Readiness.READY and not silence and memory.beat_at and now - memory.beat_at > _BEAT:
            self.preparer.forget(node.id)  # the node answers, and its agent is dead: prepare it again
            memory.beat_at = None
            readiness = Readiness.NO
        heard = self.preparer.has_heard(node, memory.status, state)
        told = heard or self.preparer.is_being_told(node, state)
        return NodeSeen(
            node=node,
            readiness=readiness,
            error=self.preparer.error(node.id),
            status=memory.status,
            silent_for=silence if silence > timedelta(seconds=_ANSWER_S / 2) else timedelta(0),
            told=told,
            heard=heard,
            refused=self.preparer.refused(node.id),
        )

    def _wanted_end(self, request: Request, now: datetime) -> ExitReason | None:
        wanted = self.wanted_end() or request.end
        if wanted is not None:
            return wanted
        late = self.goal.deadline_at is not None and now >= self.goal.deadline_at
        return ExitReason.DEADLINE if late else None

    def _with_times(self, attempt: Attempt, seen: Seen) -> Seen:
        members = members_of(attempt, seen)
        parts = [part_of(attempt, member) for member in members]
        overs = {is_over(attempt, member) for member in members}
        since = self._since if self._since.attempt == attempt.number else _Since(attempt=attempt.number)
        failed = any(part is not None and part.outcome is Outcome.FAILED for part in parts)
        since.failed = (since.failed or seen.now) if failed else None
        since.uneven = (since.uneven or seen.now) if len(overs) == 2 else None
        self._since = since
        return replace(
            seen,
            checkpoint=self._newest(attempt, seen, over=overs == {True}),
            failed_for=seen.now - since.failed if since.failed else None,
            uneven_for=seen.now - since.uneven if since.uneven else None,
            use=self.usage.take(attempt, seen),
        )

    def _newest(self, attempt: Attempt, seen: Seen, *, over: bool) -> CheckpointRef | None:
        """The manifest is read again when the script says that it has committed another step, and when it is over.

        What it committed last it may not have lived to say.
        """
        progress = progress_of(attempt, seen)
        news = (progress.committed_step if progress else None, over)
        if news != (None, False) and news != self._checkpoint[0]:
            newest = newest_commit(self.world.store, self.world.jobs.checkpoints)
            ref = CheckpointRef(step=newest[0], sha256=newest[1]) if newest else None
            self._checkpoint = (news, ref)
        return self._checkpoint[1]
