"""Doing: one action, on the cloud, on nodes or in the books. Intent is written down first; all may be done twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpucloud.domain.bootstrap.record import attempt_lock
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import (
    Action,
    Appoint,
    CloseAttempt,
    CoolDown,
    Dismiss,
    Done,
    EndAttempt,
    Finish,
    Inspect,
    InTheBooks,
    NoteInterruptions,
    OnNodes,
    OnTheCloud,
    OpenAttempt,
    Pause,
    Prepare,
    QuarantineNodes,
    TakeOver,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.seen import Seen
from gpucloud.usecases.announced import Announced
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

    def act(self, action: Action, seen: Seen) -> None:
        """Do it. Errors of the cloud and of nodes come through as GpucloudError."""
        for line in (*self._announced.news(action, seen, self.world.rules.limits), tell_story(action, seen)):
            if line:
                self.watcher.story(line)
        if isinstance(action, OnTheCloud):
            self.renter.act(action)
        elif isinstance(action, InTheBooks):
            self._in_the_books(action, seen)
        else:
            self._on_nodes(action, seen)

    def let_us_in(self) -> None:
        """Bring the group's free parts up to date: SSH may come from another address than when they were made."""
        state = self.lease.state
        if self.world.knows_our_address and state.group is not None and not state.status.ended:
            self.renter.provision()

    def change_driver(self) -> None:
        """Have the job's machines drive it from now on, or no longer, as this start of it wants."""
        state = self.lease.state
        if self.world.order is None:
            self.preparer.records.withdraw_order()
        if state.group is not None and not state.status.ended:
            self.renter.provision()

    def _in_the_books(self, action: InTheBooks, seen: Seen) -> None:
        state = self.lease.state
        match action:
            case CoolDown():
                self.lease.write(books.cool_down(state, action, seen.now))
            case OpenAttempt():
                port = self.preparer.free_port(action.node_ids[0])
                self._keep_lock(action)
                self.lease.write(books.open_attempt(state, action, port, seen.now))
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
                self.closing.bring(action, seen)
                self.lease.write(books.close_attempt(state, action, seen.now))
            case Finish():
                self.lease.write(books.finish(state, action, seen.now))
            case Pause(message=message):
                self.lease.write(replace(state, message=message))

    def _keep_lock(self, action: OpenAttempt) -> None:
        made = {node_id: self.preparer.made_of(node_id) for node_id in action.node_ids}
        locks = {node_id: one.lock for node_id, one in made.items()}
        seconds = {node_id: dict(one.seconds) for node_id, one in made.items()}
        self.world.jobs.keep_attempt_lock(action.number, attempt_lock(locks, seconds))

    def _on_nodes(self, action: OnNodes | Wait | Done, seen: Seen) -> None:
        match action:
            case Prepare(node_ids=node_ids):
                for node_id in node_ids:
                    self.preparer.start(node_id, self.lease.state.gpu)
            case Inspect():
                self.inspector.start(action, seen)
            case Tell(node_ids=node_ids):
                self.preparer.tell(node_ids, self.lease.state)
            case Wait() | Done():
                pass
