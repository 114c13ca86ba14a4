"""What is brought home when an attempt is over: output, the cause of a failure, results, profiles."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import LandingRefused, NodeError, StoreError
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.member import workers_per_node
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import Attempt, ExitReason, JobState, MissingOutput
from gpucloud.domain.supervision.action import CloseAttempt
from gpucloud.domain.supervision.membership import NOTICE, TAKEN_WITHIN, is_gone
from gpucloud.domain.supervision.renewal import (
    is_beside,
    lost_outputs,
    rank_0_answering,
    rank_0_leaves,
    to_bring,
    without_unasked,
)
from gpucloud.domain.supervision.snapshot import (
    Homecoming,
    NodeSnapshot,
    Readiness,
    Snapshot,
    are_left,
    asked_of,
    is_awaited,
    waits,
)
from gpucloud.domain.untrusted import KEPT_OUTPUT_BYTES
from gpucloud.ports import Brought, Host, Outputs
from gpucloud.system.retries import Retry
from gpucloud.usecases.services import Services, Watcher
from gpucloud.usecases.supervise.look import LogReader, read_node
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.provision import SundryLedger
from gpucloud.usecases.supervise.story import LastWords, brought_lines, last_words, missing_line
from gpucloud.usecases.supervise.usage import UsageHistory, bring_profiles

_AGAIN = timedelta(seconds=30)
_READS_FOR = timedelta(minutes=10)
"""At the end of an attempt, for what is left of all its output: who wants the job to end waits meanwhile."""
_READ = Retry(first_s=2.0, factor=1.0, tries=3)
_READ_ONCE = replace(_READ, tries=1)
_Lost = tuple[MissingOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rescue:
    """What an attempt left on a machine that is about to go, on its way; `lost` is what to say if it never comes."""

    attempt: int
    node_id: str
    lost: _Lost
    work: Future[Brought]
    until: datetime | None = None  # when that machine is gone at the latest


@dataclass(slots=True)
class OutputsHome:
    """Brings the outputs of an attempt home beside everything else; where that fails, into the store.

    They lie on the node of rank 0. Where that goes while the job goes on, or the job goes on elsewhere, they come
    beside the next attempt's start. Those of an attempt that no other follows are brought before the machines end.
    """

    services: Services
    bootstrapper: Bootstrapper
    pool: ThreadPoolExecutor
    watcher: Watcher
    _attempt: int = 0
    _work: Future[Brought] | None = None
    _failed_at: datetime | None = None
    _try: int = 0
    _moves: int = 0
    _moved: tuple[int, datetime] | None = None
    """How often something had arrived, and when that was seen to rise last, by this supervisor or the one before."""
    _looked_at: datetime | None = None
    _moves_before: int = 0
    _before: tuple[int, datetime | None] | None = None  # for the one before: of which attempt, and since when
    _stalled: bool = False
    _rescue: _Rescue | None = None
    _rescued: dict[int, Brought] = field(default_factory=dict)  # what came of machines that went, by the attempt
    _left: dict[int, _Lost] = field(default_factory=dict)  # what did not come, by the attempt
    _billed: set[int] = field(default_factory=set)  # of which of them that is billed

    @property
    def busy(self) -> bool:
        """Whether any are on their way; a copy that stands still is not, nor one whose machine must be gone by now."""
        rescue = self._rescue
        if self._copies or rescue is None or rescue.work.done():
            return self._copies
        return rescue.until is None or self.services.clock.now() < rescue.until

    @property
    def _copies(self) -> bool:
        return self._work is not None and not self._work.done() and not self._stalled

    @property
    def still_at(self) -> datetime | None:
        """Since when nothing has come of the open attempt's; None where they are not being brought."""
        return self._moved[1] if self._moved is not None and self._work is not None else None

    def stands(self, state: JobState, group: GroupView, now: datetime) -> Homecoming:
        """Return how far the outputs of the open attempt are, or of the last one. A fault of ours is raised here."""
        rescue, asked = self._rescue, self._asked(state.attempts)
        comes = rescue if rescue is not None and not rescue.work.done() else None
        if comes is not None and self._stands_still(comes.attempt, comes.node_id, comes.lost[0].path, now):
            self.give_up()  # neither an end nor a pass over all jobs waits for it any longer
        if state.status.ended or state.attempt is None:  # what would go is brought before
            return self._after_the_end(state, group)
        self._take_over(state, now)
        attempt = state.attempt
        if not asked or attempt is None or group.there(attempt.members[0].node_id) is None:
            return Homecoming.DONE
        if self._work is None or self._attempt != attempt.number:
            first = self._rescue if self.busy else None  # of an attempt before, whose machine is paid, and sends
            preparing = self.bootstrapper.readiness(attempt.members[0].node_id) is Readiness.PREPARING
            comes_first = preparing or (first is not None and group.there(first.node_id) is not None)
            return Homecoming.ON_THE_WAY if comes_first else Homecoming.NO
        if not self._work.done() and not self._stands_still(attempt.number, attempt.members[0].node_id, asked[0], now):
            return Homecoming.ON_THE_WAY
        error = self._work.exception() if self._work.done() else None
        if self._work.done() and (error is None or isinstance(error, LandingRefused)):
            return Homecoming.DONE  # no other try takes what may lie nowhere
        if error is not None and not isinstance(error, NodeError | StoreError):
            raise error
        self._failed_at = self._failed_at or now
        return Homecoming.NO if now - self._failed_at >= _AGAIN else Homecoming.FAILED

    def start(self, snapshot: Snapshot) -> None:
        """Begin to bring them, or begin again: what was cut off goes on."""
        attempt = snapshot.state.attempts[-1]
        node = snapshot.group.there(attempt.members[0].node_id)
        if node is not None and attempt.reason is not None:
            self._begin_rescue(snapshot.state.attempts, node, f"on {node.id}")
        elif node is not None and not self._copies:
            self._begin_anew()
            self._attempt, self._failed_at = attempt.number, None
            self._work = self.pool.submit(self._bring, node, snapshot.state.attempts, self._try)

    def brought(self, reason: ExitReason, snapshot: Snapshot) -> Brought:
        """Return what became of the outputs of the attempt that is closed; that they are lost is said."""
        attempts, attempt = snapshot.state.attempts, snapshot.state.attempts[-1]
        outputs = self._asked(attempts)
        work = self._work if self._attempt == attempt.number else None
        error = work.exception() if work is not None and work.done() else None
        if work is not None and work.done() and error is None:
            return work.result()
        if isinstance(error, LandingRefused):
            return Brought(missing=self._leave(attempt.number, self.lost(attempts), error))
        if outputs and (rank_0_leaves(attempt, snapshot) or reason is ExitReason.RESCHEDULED):
            node = rank_0_answering(attempt, snapshot) if reason.retried else None
            return Brought(missing=self.lose(attempts) if node is None else self.rescue(attempts, node))
        if reason.retried or not outputs:
            return Brought()
        self.watcher.story(f"the outputs of attempt {attempt.number} could not be brought home")
        if snapshot.state.pool.market is not Market.OWNED:
            return Brought(missing=tuple(MissingOutput(path=one, why="could not be brought home") for one in outputs))
        return Brought(missing=self._leave(attempt.number, self.lost(attempts), error))

    def lose(self, attempts: Sequence[Attempt]) -> _Lost:
        """Tell and return which outputs of the last attempt nobody brings home: of those that are here, what is not."""
        came = self.services.outputs.came(attempts[-1])
        self._tell(*map(missing_line, missing := self.lost(attempts) if came is None else came))
        return missing

    def rescue(self, attempts: Sequence[Attempt], node: Node) -> _Lost:
        """Begin to bring what the last attempt wrote before its machine goes; return what is lost if it never comes."""
        return self._begin_rescue(attempts, node, f"before {node.id} goes", NOTICE + TAKEN_WITHIN)

    def leave(self, attempts: Sequence[Attempt]) -> _Lost:
        """Begin to bring what the last attempt wrote where the next one does not run, if that can be asked."""
        node = self.bootstrapper.known(attempts[-1].members[0].node_id)
        if node is None or not node.is_there:
            return self.lose(attempts)
        return self._begin_rescue(attempts, node, f"on {node.id}")

    def _begin_rescue(
        self, attempts: Sequence[Attempt], node: Node, words: str, lasts: timedelta | None = None
    ) -> _Lost:
        attempt, lost = attempts[-1], self.lost(attempts)
        if attempt.number in self._rescued or (self._rescue is not None and self._rescue.attempt == attempt.number):
            return lost  # the attempt's end could not be written down, and is made once more
        self._begin_anew()
        self._tell(f"bringing home what attempt {attempt.number} wrote{', ' if lasts else ' '}{words}")
        until = self.services.clock.now() + lasts if lasts is not None else None
        work = self.pool.submit(self._bring, node, attempts, self._try)
        self._rescue = _Rescue(attempt=attempt.number, node_id=node.id, lost=lost, work=work, until=until)
        return lost

    def _begin_anew(self) -> None:
        """Make way for another try: what comes of those before counts for nothing from now on."""
        self.give_up()
        self._work, self._try, self._moved, self._stalled = None, self._try + 1, None, False
        self._looked_at, self._moves_before = None, self._moves

    def _after_the_end(self, state: JobState, group: GroupView) -> Homecoming:
        """Return how far those are that nobody has brought; a try that failed was the last, or machines are paid on."""
        rescue, last = self._rescue, state.attempts[-1] if state.attempts else None
        if rescue is not None and group.there(rescue.node_id) is not None:
            return Homecoming.ON_THE_WAY
        self.give_up()
        if last is None or not self._asked(state.attempts) or state.torn_down or not is_awaited(last, state.pool):
            return Homecoming.DONE
        is_lost = last.number in self._left or group.there(last.members[0].node_id) is None
        return Homecoming.DONE if is_lost else Homecoming.NO

    def _asked(self, attempts: Sequence[Attempt]) -> tuple[str, ...]:
        return asked_of(attempts, self.services.job.outputs)

    def lost(self, attempts: Sequence[Attempt]) -> _Lost:
        """Return what is missing of the last attempt's outputs if nobody brings them."""
        return lost_outputs(attempts, self.services.job.outputs, self.bootstrapper.known)

    def give_up(self) -> None:
        """Bring no more of a machine that goes: another attempt's outputs come now, or nobody is left to bring any."""
        self._see_rescued()
        if (rescue := self._rescue) is not None:
            self._rescue, self._try = None, self._try + 1
            self._leave(rescue.attempt, rescue.lost)

    def _leave(self, attempt: int, lost: _Lost, error: BaseException | None = None) -> _Lost:
        """Tell and return what nobody tries to bring any more; the next command may, where it stays on its host."""
        if isinstance(error, LandingRefused):
            lost = tuple(replace(one, why=f"{one.why}; it was refused here: {error}") for one in lost)
        self._left[attempt] = lost
        self._tell(*map(missing_line, lost))
        return lost

    def stays(self, state: JobState) -> JobState:
        """Return the state before the next attempt begins where the last one ran: it brings what was written there."""
        self._see_rescued()
        before, last = state.attempts[:-1], state.attempts[-1]
        if last.outputs_came or last.number in self._rescued:
            return state
        if self._rescue is not None and self._rescue.attempt == last.number:
            self._rescue, self._try = None, self._try + 1
        waits = replace(last, missing_outputs=tuple(one for one in last.missing_outputs if one.attempt is None))
        return replace(state, attempts=(*before, waits))

    def with_rescued(self, state: JobState) -> JobState:
        """Return the state with what has come of machines that went, or is to; that it could not is told once."""
        self._see_rescued()
        for number in self._rescued.keys() - self._billed:
            SundryLedger(services=self.services).bill_sent(state, number, self._rescued[number].size)
            self._billed.add(number)
        return replace(state, attempts=tuple(map(self._as_it_stands, map(self._as_it_came, state.attempts))))

    def _as_it_stands(self, attempt: Attempt) -> Attempt:
        first = self._rescue.attempt if self._rescue is not None else self._attempt
        return replace(attempt, outputs_coming=self.busy and attempt.number == first and are_left(attempt))

    def _as_it_came(self, attempt: Attempt) -> Attempt:
        if attempt.number in self._rescued:
            return replace(attempt, missing_outputs=self._rescued[attempt.number].missing, outputs_came=True)
        if are_left(attempt) and not attempt.outputs_came and (came := self.services.outputs.came(attempt)) is not None:
            return replace(attempt, missing_outputs=came, outputs_came=True)
        lost = self._left.get(attempt.number) if attempt.missing_outputs else None
        return replace(attempt, missing_outputs=lost) if lost is not None else attempt

    def _see_rescued(self) -> None:
        if self._rescue is None or not self._rescue.work.done():
            return
        rescue, self._rescue = self._rescue, None
        if (error := rescue.work.exception()) is None:
            self._rescued[rescue.attempt] = rescue.work.result()
        elif isinstance(error, NodeError | StoreError):
            self._leave(rescue.attempt, rescue.lost, error)
        else:
            raise error

    def _take_over(self, state: JobState, now: datetime) -> None:
        """Learn at the first look what it was for the supervisor before, if that looked lately; else nobody brought."""
        attempt = state.attempt
        if self._before is None and attempt is not None:
            lately = state.looked_at is not None and now - state.looked_at <= self.services.rules.limits.alone
            self._before = (attempt.number, attempt.outputs_still_at if lately else None)

    def _still_since(self, attempt: int, now: datetime) -> datetime:
        number, since = self._before or (0, None)
        if number != attempt:
            return now
        self._before = (0, None)  # for one try
        return since or now

    def _stands_still(self, attempt: int, node_id: str, path: str, now: datetime) -> bool:
        """Whether nothing has arrived for long, with no error either: told once, and tried again as after one.

        What stood still for one supervisor does so for the next, which tries it for a moment all the same.
        """
        if self._moved is None:
            since = self._still_since(attempt, now)
            self._moved = (self._moves, since if self._moves == self._moves_before else now)
        elif self._moved[0] != self._moves:
            self._moved = (self._moves, now)
        self._looked_at = self._looked_at or now
        limit, name = self.services.rules.limits.homing, self.services.name
        if not self._stalled and now - self._moved[1] >= limit and now - self._looked_at >= _AGAIN:
            self._stalled = True
            self.watcher.story(
                f"the outputs stand still: nothing of them has come from {node_id} for {format_span(limit)};"
                f" while it is paid, `gpucloud cp -r {name}:{path} .` asks for them too"
            )
        return self._stalled

    def _bring(self, node: Node, attempts: Sequence[Attempt], number: int) -> Brought:
        def moves() -> None:
            """One that stood still for too long must not come to life beside the next try."""
            if number != self._try:
                raise NodeError(f"{node.id}: another try brings the outputs", hint=None)
            self._moves += 1

        def by(outputs: Outputs) -> Brought:
            brought = outputs.bring_home(host, code, attempt.number, moves, paths)
            return replace(brought, missing=without_unasked(brought.missing, self._asked(attempts)))

        attempt, host = attempts[-1], self.services.shell.host(node)
        code = self.bootstrapper.tree_on(node, attempt.tree)
        paths = to_bring(attempts, self.services.job.outputs, self.bootstrapper.known)
        try:
            brought = by(self.services.outputs)
        except (NodeError, StoreError) as error:
            if number != self._try:
                raise
            self.watcher.story(f"the outputs could not be brought home: {error}")
            if self.services.stored_outputs is None or isinstance(error, LandingRefused):
                raise  # no other place takes what may lie nowhere
            kept = by(self.services.stored_outputs)
            self._tell(
                f"{len(kept.paths)} outputs are in the store instead, and come home when the job has ended;"
                f" where they cannot yet, `gpucloud down {self.services.name}` tries again",
                *map(missing_line, kept.missing),
            )
            return Brought(missing=kept.missing)
        self.services.outputs.note(attempt, brought.missing, attempts[0].started_at)
        self._tell(*brought_lines(brought), *map(missing_line, brought.missing))
        return brought

    def _tell(self, *lines: str) -> None:
        for line in lines:
            self.watcher.story(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """What an attempt leaves in the state: outputs that did not come home, and its script's exception in one line."""

    missing: tuple[MissingOutput, ...] = ()
    failure: str | None = None


@dataclass(slots=True)
class Closing:
    """Brings home what an attempt leaves on its nodes; of a node that is gone, what had been read of it is kept."""

    services: Services
    home: OutputsHome
    logs: LogReader
    history: UsageHistory
    watcher: Watcher

    def bring(self, action: CloseAttempt, snapshot: Snapshot) -> LeftBehind:
        """Bring all there is, tell what became of it, and return which outputs are missing and what failed.

        Raises StoreError when what the script wrote cannot be kept.
        """
        attempt = snapshot.state.attempt
        self._read_to_the_end(snapshot, _READ_ONCE if action.reason.retried else _READ)
        said = self._explain(action, snapshot)
        brought = self.home.brought(action.reason, snapshot) if attempt is not None else Brought()
        self._bring_profiles(snapshot)
        if attempt is not None:
            SundryLedger(services=self.services).bill(snapshot.state, attempt, brought.size)
        return LeftBehind(missing=brought.missing, failure=said.failure)

    def move_on(self, state: JobState, node_id: str, tree: str) -> JobState:
        """Return the state before rank 0 starts there, with what of the last attempt's outputs stays elsewhere."""
        before, last = state.attempts[:-1], state.attempts[-1] if state.attempts else None
        if last is None or not asked_of(state.attempts, self.services.job.outputs):
            return state
        if is_beside(last, node_id, tree, self.home.bootstrapper.known):
            return self.home.stays(state)
        if not waits(last):
            return state
        return replace(state, attempts=(*before, replace(last, missing_outputs=self.home.leave(state.attempts))))

    def _read_to_the_end(self, snapshot: Snapshot, policy: Retry = _READ) -> None:
        """Where another attempt follows, nothing is waited for, and nobody is asked who does not answer anyhow."""
        attempt, silent = snapshot.state.attempt, self.services.rules.limits.silent
        alive = {n.node.id: n for n in snapshot.nodes if not is_gone(n) and n.silent_for < silent}
        until = self.services.clock.now() + _READS_FOR
        for member in attempt.members if attempt else ():
            if attempt is not None and member.node_id in alive:
                self._read_patiently(alive[member.node_id], attempt, until, policy)
        self.logs.flush()

    def _read_patiently(self, node: NodeSnapshot, attempt: Attempt, until: datetime, policy: Retry) -> None:
        """Read what is left: of a node that answers at more than one try, for it is ended after this."""
        answers = not node.silent_for
        tries = (policy if answers else _READ_ONCE).begin(self.services.clock.sleep)
        while True:
            try:
                host = self.services.shell.host(node.node)
                self._read_whole(host, node.node.id, attempt, until)
                self.history.look(host, attempt.number, last=True)
            except NodeError as error:
                if tries.again():
                    continue
                if answers and policy is _READ:
                    self.watcher.story(f"the rest of what {node.node.id} said could not be read: {error}")
            return

    def _read_whole(self, host: Host, node_id: str, attempt: Attempt, until: datetime) -> None:
        """Read the node's output, which comes in pieces: no more than a node keeps of it, and not for long."""
        most = self.logs.taken + KEPT_OUTPUT_BYTES
        while read_node(host, node_id, attempt, workers_per_node(self.services.job), self.logs)[1]:
            if self.logs.taken >= most or self.services.clock.now() >= until:
                self.watcher.story(f"{node_id} says more than can be waited for: the rest of its output is left out")
                return

    def _explain(self, action: CloseAttempt, snapshot: Snapshot) -> LastWords:
        attempt = snapshot.state.attempt
        barred = attempt is not None and any(member.outcome is Outcome.BARRED for member in attempt.members)
        if attempt is None or not (action.reason.by_script or barred):
            return LastWords()
        try:
            words = last_words(attempt, snapshot, self.services.jobs, self.services.shell)
        except NodeError:
            return LastWords()
        if words.shown:
            self.watcher.story(words.shown)
        return words

    def _bring_profiles(self, snapshot: Snapshot) -> None:
        attempt = snapshot.state.attempt
        if self.services.job.profile_steps and attempt is not None:
            members = {member.node_id for member in attempt.members}
            nodes = tuple(node for node in snapshot.group.alive if node.id in members)
            gone = tuple(sorted(members - {node.id for node in nodes}))
            one, shell, stored = self.services.outputs, self.services.shell, self.services.stored_outputs
            for line in bring_profiles(one, shell, nodes, attempt.number, gone=gone, stored=stored):
                self.watcher.story(line)
