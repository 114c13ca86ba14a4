"""Doing: one action, on the cloud, on nodes or in the books. Intent is written down first; all may be done twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpucloud.domain.bootstrap.record import attempt_lock
from gpucloud.domain.outputtimes import DatedPiece
from gpucloud.domain.state import ExitReason
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import (
    Action,
    Appoint,
    BringHome,
    CloseAttempt,
    CoolDown,
    Dismiss,
    Done,
    EndAttempt,
    Finish,
    Idle,
    Inspect,
    InTheBooks,
    NoteInterruptions,
    ObeyOrder,
    OnNodes,
    OnTheCloud,
    OpenAttempt,
    Pause,
    Prepare,
    QuarantineNodes,
    StayOn,
    TakeOver,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.seen import Goal, Seen
from gpucloud.domain.supervision.setups import failed_setup
from gpucloud.usecases.announced import Announced
from gpucloud.usecases.attemptrecords import BEFORE
from gpucloud.usecases.closing import Closing
from gpucloud.usecases.inspection import Inspector
from gpucloud.usecases.lease import Lease
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.rent import Renter
from gpucloud.usecases.story import tell_story
from gpucloud.usecases.world import Watcher, World


@dataclass(slots=True)
class Actor:
    """Carries decisions out for one job."""

    world: World
    lease: Lease
    preparer: Preparer
    inspector: Inspector
    renter: Renter
    closing: Closing
    watcher: Watcher
    _announced: Announced = field(default_factory=Announced)

    def act(self, action: Action, seen: Seen, goal: Goal) -> None:
        """Do it. Errors of the cloud and of nodes come through as GpucloudError."""
        news = self._announced.news(action, seen, self.world.rules.limits, self.world.job.checkpoint)
        for line in (*news, tell_story(action, seen)):
            if line:
                self.watcher.story(line)
        if isinstance(action, OnTheCloud):
            self.renter.act(action)
        elif isinstance(action, InTheBooks):
            self._in_the_books(action, seen, goal)
        else:
            self._on_nodes(action, seen)

    def begin(self) -> None:
        """Bring the group's free parts up to date: who drives the job, and from where SSH comes, may have changed.

        Machines that are to drive it no longer find nothing to drive, then lose the right to write its state. Only what
        is written after that may be believed again. Those of a job that has ended lose it with their group.
        """
        state, drives = self.lease.state, self.world.order is not None
        taken_back = state.drives_itself and not drives
        if taken_back:
            self.preparer.records.withdraw_order()
        if state.group is not None and state.status.ended:
            return
        if state.group is not None and (drives or taken_back or self.world.knows_our_address):
            self.renter.provision()
        if drives != state.drives_itself:
            self.lease.write(replace(self.lease.state, drives_itself=drives))
        if taken_back:
            self.renter.close_armings()

    def _in_the_books(self, action: InTheBooks, seen: Seen, goal: Goal) -> None:  # noqa: C901  (one flat match)
        state = self.lease.state
        match action:
            case ObeyOrder():
                self.lease.write(books.obey_order(state, action))
            case CoolDown():
                self.lease.write(books.cool_down(state, action, seen.now))
            case OpenAttempt():
                self._open(action, seen)
            case NoteInterruptions():
                self.lease.write(books.note_interruptions(state, action))
            case QuarantineNodes():
                self.lease.write(books.quarantine(state, action, seen.now))
            case EndAttempt():
                self.lease.write(books.order_end(state, action, seen.now))
            case Appoint():
                self.lease.write(books.appoint(state, action, seen.now))
            case Dismiss():
                self.lease.write(books.dismiss(state))
            case TakeOver():
                self.lease.write(books.take_over(state, seen.now))
            case CloseAttempt():
                left = self.closing.bring(action, seen)
                closed = books.close_attempt(state, action, seen.now, goal.budget_usd, left.missing, left.failure)
                self.lease.write(closed)
            case Finish():
                self._keep_failed_setup(action, seen)
                ended = books.finish(state, action, seen.now, goal.budget_usd)
                self.lease.write(books.left_behind(ended, self.world.job.outputs))
            case Pause(message=message):
                self.lease.write(replace(state, message=message))

    def _keep_failed_setup(self, action: Finish, seen: Seen) -> None:
        """What a setup wrote is told, and kept before its machine ends, as the output of what came before attempt 1.

        Only where it is what ends the job: one that failed on a machine given up since is no news of a failed script.
        """
        is_the_end = action.reason is ExitReason.USER_ERROR and failed_setup(seen) is not None
        failed = self.preparer.failed_setup() if is_the_end else None
        if failed is not None:
            shown, log = failed
            self.watcher.story(shown)
            records = self.world.jobs.records
            records.append_log(BEFORE, 0, records.log_end(BEFORE, 0)[0], DatedPiece(data=log))

    def _open(self, action: OpenAttempt, seen: Seen) -> None:
        tree = self.preparer.one_tree(action.node_ids)
        if tree is None:
            return  # they are prepared again, with the code as it is now
        port = self.preparer.meeting_port(action.number, action.node_ids)
        if port is None:
            self.world.clock.sleep(self.world.period_s)
            return  # what is seen of the node by then says what to do about it
        self._keep_lock(action)
        self.lease.write(books.open_attempt(self.lease.state, action, port, seen.now, tree))

    def _keep_lock(self, action: OpenAttempt) -> None:
        made = {node_id: self.preparer.made_of(node_id) for node_id in action.node_ids}
        locks = {node_id: one.lock for node_id, one in made.items()}
        seconds = {node_id: dict(one.seconds) for node_id, one in made.items()}
        self.world.jobs.records.keep_attempt_lock(action.number, attempt_lock(locks, seconds))

    def _on_nodes(self, action: OnNodes | Idle, seen: Seen) -> None:
        match action:
            case Prepare(node_ids=node_ids):
                for node_id in node_ids:
                    self.preparer.start(node_id, self.lease.state.gpu)
            case Inspect():
                self.inspector.start(action, seen)
            case BringHome():
                self.closing.home.start(seen)
            case Tell(node_ids=node_ids):
                self.preparer.tell(node_ids, self.lease.state)
            case StayOn() | Wait() | Done():
                pass
