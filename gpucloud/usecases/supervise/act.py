"""Doing: one action, on the cloud, on nodes or in the state; and what lasts for a while and is told once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.checkpoint.layouts import additions_of, anew_warning
from gpucloud.domain.checkpoint.protection import COSTS_A_RESTART, COSTS_ALL, NOT_CALLED
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import CheckpointPolicy, Market
from gpucloud.domain.money.budget import Used
from gpucloud.domain.node.bootstrap.facts import attempt_lock
from gpucloud.domain.node.node import Fault, Refusal
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.node.status import OUTPUT, Progress, RunState
from gpucloud.domain.state.state import Attempt, ExitReason, JobState
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Action,
    Appoint,
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    Dismiss,
    Done,
    EndAttempt,
    Finish,
    Idle,
    Inspect,
    LedgerTransition,
    NoteInterruptions,
    ObeyOrder,
    OnNodes,
    OnTheCloud,
    OpenAttempt,
    Pause,
    Prepare,
    QuarantineNodes,
    Replace,
    StayOn,
    TakeOver,
    TearDown,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.budget import has_budget_left
from gpucloud.domain.supervision.capacity import PAUSING
from gpucloud.domain.supervision.during import DRILL_WAITS
from gpucloud.domain.supervision.elastic import AWAITING
from gpucloud.domain.supervision.membership import (
    AGAIN,
    all_silent,
    hangs_in_a_row,
    is_gone,
    longer_by,
    members_of,
    part_of,
    patience,
    progress_of,
    start_limit,
    vouched_for,
)
from gpucloud.domain.supervision.quarantine import failed_setup
from gpucloud.domain.supervision.reconcile import IN_USE
from gpucloud.domain.supervision.renewal import HOMING
from gpucloud.domain.supervision.snapshot import Goal, Limits, NodeSnapshot, Snapshot
from gpucloud.domain.untrusted import in_one_line
from gpucloud.usecases.jobstore.lease import Lease
from gpucloud.usecases.jobstore.records import BEFORE
from gpucloud.usecases.services import Services, Watcher
from gpucloud.usecases.supervise.closing import Closing
from gpucloud.usecases.supervise.inspection import Inspector
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.provision import MachineProvisioner, Shortage
from gpucloud.usecases.supervise.story import (
    answer_again,
    decision_line,
    end_unheard,
    silence,
    tell_story,
    unreached,
)

_FIRST_WORD = timedelta(minutes=1)


@dataclass(slots=True)
class Announcements:
    """What was told and still holds; when it holds again later, it is told again."""

    _told: set[str] = field(default_factory=set)
    _refusals: set[Refusal] = field(default_factory=set)
    _silent: frozenset[str] = frozenset()
    """The machines of which it was told that none answers."""
    _silent_at: datetime | None = None
    _protected: str | None = None
    _anew: int = 0
    """The newest attempt of which it was told that its script began anew."""
    _hangs: int = -1
    """How many attempts in a row had hung when it was told what is taken for a hang."""
    _end_told: bool = False
    """Whether the order to end said itself that machines do not hear it."""

    def news(
        self, action: Action, snapshot: Snapshot, limits: Limits, policy: CheckpointPolicy | None = None
    ) -> tuple[str, ...]:
        """Return the lines that were not told yet; `policy` is what the job file says of checkpoints."""
        passing = (*self._excluded(snapshot), *self._silence(snapshot, limits))
        saving = (*self._protection(snapshot, policy), *self._begun_anew(snapshot, policy))
        patience = self._patience(snapshot, limits)
        return (*passing, *_decision(snapshot), *saving, *patience, *self._lasting(action, snapshot, limits))

    def _patience(self, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
        """What is taken for a hang, once the script is one that may hang; again when that is longer or shorter."""
        attempt, attempts = snapshot.state.attempt, snapshot.state.attempts
        part = part_of(attempt, members_of(attempt, snapshot)[0]) if attempt is not None else None
        progress, hangs = part.shown if part is not None else None, hangs_in_a_row(attempts)
        if progress is None or hangs == self._hangs or patience(progress, attempts, limits) is None:
            return ()
        self._hangs = hangs
        owner = snapshot.state.owner
        if attempt is None or (owner is not None and attempt.started_at < owner.since):
            return ()  # who had it before has said so
        return (hang_words(progress, attempts, limits),)

    def _begun_anew(self, snapshot: Snapshot, policy: CheckpointPolicy | None) -> tuple[str, ...]:
        """Once in an attempt that a script which saves by itself did not take the checkpoint that was put back."""
        attempt = snapshot.state.attempt
        progress = progress_of(attempt, snapshot) if attempt is not None else None
        drop = progress.counter_drop if progress is not None else None
        if attempt is None or drop is None or attempt.number == self._anew:
            return ()
        self._anew = attempt.number
        return (anew_warning(drop, additions_of(policy.directory if policy else None)),)

    def _protection(self, snapshot: Snapshot, policy: CheckpointPolicy | None) -> tuple[str, ...]:
        """Once how the script saves, by its own word, or after its first minute without one; again when it changes."""
        told = _how_it_saves(snapshot, policy)
        if told is None or told == self._protected:
            return ()
        self._protected = told
        return (told,)

    def _excluded(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Which of the user's own hosts are excluded now: another has taken their place, so no action tells it."""
        found = tuple(
            refusal
            for refusal in dict.fromkeys(snapshot.group.refusals)
            if refusal.fault is Fault.TRANSIENT and refusal.pool.market is Market.OWNED
        )
        fresh = tuple(refusal for refusal in found if refusal not in self._refusals)
        self._refusals.update(fresh)
        return tuple(f"excluded: {refusal.message}" for refusal in fresh)

    def _silence(self, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
        """Once that no machine answers, which may be our own line, and once which of those do again."""
        alive = {node.node.id: node for node in snapshot.nodes if not is_gone(node)}
        if all_silent(snapshot, limits):
            told = () if self._silent else (silence(snapshot, limits),)
            self._silent, self._silent_at = frozenset(alive), self._silent_at or snapshot.now
            return told
        again = sorted(one for one in self._silent & alive.keys() if self._has_spoken(alive[one]))
        others = any(not node.silent_for for one, node in alive.items() if one not in self._silent)
        if again or others or not self._silent & alive.keys():
            self._silent, self._silent_at = frozenset(), None
        return (answer_again(again),) if again else ()

    def _has_spoken(self, node: NodeSnapshot) -> bool:
        """Whether it has told something since that was told: one that only boots has not."""
        word, since = node.last_word_at, self._silent_at
        return not node.silent_for and word is not None and since is not None and word >= since

    def _lasting(self, action: Action, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
        now = {
            *_out_of_our_reach(snapshot, limits),
            *_advice(snapshot),
            *_undriven(snapshot, limits),
            *_told_wait(action),
            *self._waits_for_the_end(action, snapshot, limits),
        }
        fresh = tuple(sorted(now - self._told))
        self._told = now
        return fresh

    def _waits_for_the_end(self, action: Action, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
        """That machines do not hear of the end: who came for it alone has not known them to be silent at the order."""
        if isinstance(action, EndAttempt) and unreached(action, snapshot, limits):
            self._end_told = True
        told = None if self._end_told else end_unheard(snapshot.state, limits, snapshot.now)
        return (told,) if told is not None else ()


def hang_words(progress: Progress, attempts: tuple[Attempt, ...], limits: Limits) -> str:
    """Return what of a script that stands so is taken for a hang, what is done then, and why it has longer by now."""
    told = "would be taken for a hang, and started again, from a checkpoint where it has one:"
    times = longer_by(attempts)
    least, usual, longest = limits.hang_at_least * times, f"{limits.hang_steps * times:g}", f"{AGAIN * times:g}"
    first = f"no first step within {format_span(start_limit(attempts, limits))}, then none"
    if progress.phase == OUTPUT:
        first, least = "no other step in the output", max(limits.hang_printed, least)
    slow = "; longer now, for the attempt before may have been slow alone" if times > 1 else ""
    steps = f"{usual} times its usual step or {longest} times its longest where that is longer"
    return f"{told} {first} for {format_span(least)}, or {steps}{slow}"


def _how_it_saves(snapshot: Snapshot, policy: CheckpointPolicy | None) -> str | None:
    """Return what an interruption would cost the script that runs; None while nobody can tell."""
    attempt = snapshot.state.attempt
    if attempt is None or (policy is not None and policy.directory is not None):
        return None
    progress = progress_of(attempt, snapshot)
    owner = snapshot.state.owner
    if progress is not None and progress.phase != OUTPUT:
        if owner is not None and attempt.started_at < owner.since:
            return None  # who had it before has said so
        return f"the script saves with gpucloud.resume: {COSTS_A_RESTART}"
    saved = snapshot.checkpoint is not None or snapshot.state.checkpoint is not None
    meant = policy is not None and policy.none
    young = snapshot.now - attempt.started_at < _FIRST_WORD
    if saved or meant or young or not _is_at_work(attempt, snapshot):
        return None
    return f"{NOT_CALLED}: {COSTS_ALL}"


def _is_at_work(attempt: Attempt, snapshot: Snapshot) -> bool:
    parts = [part_of(attempt, node) for node in members_of(attempt, snapshot)]
    return any(part is not None and part.state is RunState.RUNNING for part in parts)


def _decision(snapshot: Snapshot) -> tuple[str, ...]:
    """What the job runs on from now on and why, and once that its deadline will be missed, or no longer will."""
    choice, before = snapshot.capacity_choice, snapshot.state.capacity_decision
    now = choice.capacity_decision if choice is not None else None
    if now == before:
        return ()
    warned = before is not None and before.warning is not None
    if now is None:
        return _unreckoned(snapshot.state) if warned else ()
    turned = before is None or before.mode != now.mode
    kept = f"the deadline can be kept after all: {now.why}" if warned else None
    told = (decision_line(now, snapshot.now) if turned else None, now.warning or kept)
    return tuple(line for line in told if line is not None)


def _unreckoned(state: JobState) -> tuple[str, ...]:
    """That what was told of the deadline holds no longer; not where the job was ended, or its own machine drives it."""
    if (state.status.ended and state.exit_reason is not ExitReason.SUCCEEDED) or (state.owner and state.owner.node):
        return ()
    untold = all(one.total_steps is None for one in state.attempts) and not state.status.ended
    why = ": how much work is left is not known until the script tells its steps" if untold else ""
    done = "the job is done, and " if state.status.ended else ""
    return (f"{done}what was said of the deadline holds no longer{why}",)


def _out_of_our_reach(snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    return tuple(
        f"{n.node.id} does not answer us, but {n.reporter} says that it lives: nothing is done to it"
        for n in vouched_for(snapshot, limits)
    )


def _advice(snapshot: Snapshot) -> tuple[str, ...]:
    return tuple(
        f"the cloud recommends to leave {n.node.id}: an early checkpoint is asked for, the training goes on"
        for n in snapshot.nodes
        if n.status is not None and n.status.rebalance is not None and n.status.notice is None and not is_gone(n)
    )


def _undriven(snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    """Once that a machine which is to drive the job when this supervisor is gone may not, as far as it has tried."""
    return tuple(
        f"{n.node.id} could not drive the job without this process: {in_one_line(n.trial.refused)}"
        for n in snapshot.nodes
        if n.trial is not None and n.trial.refused is not None and n.trial.number == snapshot.state.order_number
        if snapshot.now - n.node.launched_at >= limits.granted
    )


def _told_wait(action: Action) -> tuple[str, ...]:
    return (
        (action.why,)
        if isinstance(action, Wait) and action.why.startswith((PAUSING, AWAITING, DRILL_WAITS, HOMING, IN_USE))
        else ()
    )


# Doing: one action, on the cloud, on nodes or in the state. Intent is written down first; all may be done twice.


@dataclass(slots=True)
class Actor:
    """Carries decisions out for one job."""

    services: Services
    lease: Lease
    bootstrapper: Bootstrapper
    inspector: Inspector
    machine_provisioner: MachineProvisioner
    closing: Closing
    watcher: Watcher
    _announcements: Announcements = field(default_factory=Announcements)
    _shortage: Shortage = field(default_factory=Shortage)

    def act(self, action: Action, snapshot: Snapshot, goal: Goal) -> None:
        """Do it. Errors of the cloud and of nodes come through as GpucloudError."""
        news = self._announcements.news(action, snapshot, self.services.rules.limits, self.services.job.checkpoint)
        limits, directory = self.services.rules.limits, self.services.job.checkpoint.directory
        # It may be us: in another network a laptop has an address that is not let in. To end machines none is needed,
        # and parts that an end has deleted already would be made anew.
        if all_silent(snapshot, limits) and not isinstance(action, TearDown):
            self.machine_provisioner.come_back(snapshot.now)
        line = tell_story(action, snapshot, directory, self._shortage.told_until, limits)
        arms = isinstance(action, Arm)  # nobody is paid until a time that the cloud has not heard of
        self._tell(*news, *(() if arms else self._shortage.told(action, snapshot, goal.nodes, line)))
        self._do(action, snapshot, goal)
        if arms:
            self._tell(*self._shortage.told(action, snapshot, goal.nodes, line))

    def _tell(self, *lines: str | None) -> None:
        for line in lines:
            if line:
                self.watcher.story(line)

    def _do(self, action: Action, snapshot: Snapshot, goal: Goal) -> None:
        if isinstance(action, Replace):
            told = transitions.give_up(self.lease.state, action, snapshot)
            if told != self.lease.state:
                self.lease.write(told)
        if isinstance(action, OnTheCloud):
            self.machine_provisioner.act(action)
        elif isinstance(action, LedgerTransition):
            self._ledger_transition(action, snapshot, goal)
        else:
            self._on_nodes(action, snapshot)

    def begin(self) -> None:
        """Bring the group's free parts up to date: who drives the job, and from where SSH comes, may have changed.

        Machines that are to drive it no longer find nothing to drive, then lose the right to write its state. Only what
        is written after that may be believed again. Those of a job that has ended lose it with their group.
        """
        state, drives = self.lease.state, self.services.order is not None
        taken_back = state.drives_itself and not drives
        if taken_back:
            self.bootstrapper.records.withdraw_order()
        if state.group is not None and state.status.ended:
            return
        if state.group is not None and (drives or taken_back or self.services.moved_to):
            self.machine_provisioner.provision()
        if drives != state.drives_itself:
            self.lease.write(replace(self.lease.state, drives_itself=drives))
        if taken_back:
            self.machine_provisioner.close_armings()

    def _ledger_transition(self, action: LedgerTransition, snapshot: Snapshot, goal: Goal) -> None:  # noqa: C901  (one flat match)
        state = self.lease.state
        match action:
            case ObeyOrder():
                self.lease.write(transitions.obey_order(state, action))
            case CoolDown():
                self.lease.write(transitions.cool_down(state, action, snapshot.now))
            case OpenAttempt():
                self._open(action, snapshot)
            case NoteInterruptions():
                self.lease.write(transitions.note_interruptions(state, action))
            case QuarantineNodes():
                self.lease.write(transitions.quarantine(state, action, snapshot.now))
            case EndAttempt():
                self.lease.write(transitions.order_end(state, action, snapshot.now))
            case Appoint():
                self.lease.write(transitions.appoint(state, action, snapshot.now))
            case Dismiss():
                self.lease.write(transitions.dismiss(state))
            case TakeOver():
                self.lease.write(transitions.take_over(state, snapshot.now))
            case CloseAttempt():
                left = self.closing.bring(action, snapshot)
                closed = transitions.close_attempt(state, action, snapshot.now, left.missing, left.failure)
                self.lease.write(self._with_money(self.closing.home.with_rescued(closed), snapshot, goal))
            case Finish():
                self._keep_failed_setup(action, snapshot)
                state = self.closing.home.with_rescued(state)
                ended = self._with_money(transitions.finish(state, action, snapshot.now), snapshot, goal)
                self.lease.write(transitions.left_behind(ended, self.services.job.outputs))
            case Pause(message=message):
                self.lease.write(transitions.pause(state, message))

    def _with_money(self, state: JobState, snapshot: Snapshot, goal: Goal) -> JobState:
        """Write down of a job that ended at its budget whether enough was left for another start."""
        if state.exit_reason is not ExitReason.BUDGET:
            return state
        used = Used(spent_usd=snapshot.spent_usd - snapshot.unproven_usd, unproven_usd=snapshot.unproven_usd)
        left = has_budget_left(state, goal.budget_usd, used, self.services.rules.prepaid_rule, goal.nodes)
        return replace(state, had_budget_left=left)

    def _keep_failed_setup(self, action: Finish, snapshot: Snapshot) -> None:
        """What a setup wrote is told, and kept before its machine ends, as the output of what came before attempt 1.

        Only where it is what ends the job: one that failed on a machine given up since is no news of a failed script.
        """
        is_the_end = action.reason is ExitReason.USER_ERROR and failed_setup(snapshot) is not None
        failed = self.bootstrapper.failed_setup() if is_the_end else None
        if failed is not None:
            shown, log = failed
            self.watcher.story(shown)
            records = self.services.jobs.records
            records.append_log(BEFORE, 0, records.log_end(BEFORE, 0)[0], DatedPiece(data=log))

    def _open(self, action: OpenAttempt, snapshot: Snapshot) -> None:
        tree = self.bootstrapper.one_tree(action.node_ids)
        if tree is None:
            return  # they are prepared again, with the code as it is now
        port = self.bootstrapper.meeting_port(action.number, action.node_ids)
        if port is None:
            self.services.clock.sleep(self.services.period_s)
            return  # what is seen of the node by then says what to do about it
        self._keep_lock(action)
        state = self.closing.home.with_rescued(self.closing.move_on(self.lease.state, action.node_ids[0], tree))
        self.lease.write(transitions.open_attempt(state, action, port, snapshot.now, tree, self.services.job))

    def _keep_lock(self, action: OpenAttempt) -> None:
        made = {node_id: self.bootstrapper.made_of(node_id) for node_id in action.node_ids}
        locks = {node_id: one.lock for node_id, one in made.items()}
        seconds = {node_id: dict(one.seconds) for node_id, one in made.items()}
        self.services.jobs.records.keep_attempt_lock(action.number, attempt_lock(locks, seconds))

    def _on_nodes(self, action: OnNodes | Idle, snapshot: Snapshot) -> None:
        match action:
            case Prepare(node_ids=node_ids):
                for node_id in node_ids:
                    self.bootstrapper.start(node_id, self.lease.state.gpu)
            case Inspect():
                self.inspector.start(action, snapshot)
            case BringHome(message=message):
                # What has not come when this machine goes is lost, and nobody is left to say so.
                if message is not None:
                    state = self.lease.state
                    lost = self.closing.home.lost(state.attempts)
                    self.lease.write(transitions.pause(state, message, lost))
                self.closing.home.start(snapshot)
            case Tell(node_ids=node_ids):
                self.bootstrapper.tell(node_ids, self.lease.state)
            case StayOn() | Wait() | Done():
                pass
