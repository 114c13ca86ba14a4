"""What is said of a job: one frozen value, rendered elsewhere, and how it comes from its state and its machines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from gpucloud.domain.checkpoint.layouts import Additions
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.job.spec import CheckpointPolicy
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.money.ledger import Charge, total
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.node.status import DONE, EXCUSED, OUTPUT, UNTOLD, AttemptStatus, Outcome, Progress, RunState
from gpucloud.domain.state.state import (
    Attempt,
    CapacityDecision,
    CheckpointRef,
    Cooldown,
    ExitReason,
    Interruption,
    JobState,
    JobStatus,
    MissingOutput,
    Quarantine,
    UsageInterval,
)
from gpucloud.domain.supervision.budget import LimitEnd, Resumption
from gpucloud.domain.supervision.membership import unit_of
from gpucloud.domain.supervision.snapshot import Limits, missing_outputs
from gpucloud.domain.supervision.strays import resumed, stopped_at
from gpucloud.domain.supervision.transitions import as_told, lost_with_machines
from gpucloud.usecases.jobstore.condition import (
    USUAL,
    Condition,
    ConditionKind,
    Left,
    NodeStanding,
    Reached,
    Silence,
    condition_of,
    heard_at,
    kept_to,
    silences,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A job as users see it; only `status` of one job and `watch` ask its nodes."""

    job: str
    """What means that run on a command line: a first run's own name means a newer one there."""
    name: str
    """What its store calls it."""
    status: JobStatus
    exit_reason: ExitReason | None
    exit_code: int | None
    message: str | None
    supervisor: str | None
    attempts: tuple[Attempt, ...]
    interruptions: tuple[Interruption, ...]
    checkpoint: CheckpointRef | None
    spend: Spend
    paid_until: datetime | None
    nodes: tuple[Node, ...]  # those that are alive
    charges: tuple[Charge, ...]  # all so far
    stops: tuple[datetime, ...] = ()  # when training stopped for each of its interruptions
    intervals: tuple[UsageInterval, ...] = ()  # the lives of all its machines, those that are off too
    cooldowns: tuple[Cooldown, ...]
    quarantined: tuple[Quarantine, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    standing: tuple[NodeStanding, ...] = ()  # of nodes that were asked
    from_there: str = ""  # what a command begins with that is about its machines: one of the home that alone sees them
    backoff: tuple[str, ...] = ()  # how it stands with interruptions that come thick
    signed_by: str | None = None
    """Whose trusted key signed the order in force: a name of `gpucloud keys`, `own`, None for nobody's."""
    capacity_decision: CapacityDecision | None = None
    """What one with a deadline runs on."""
    missing_outputs: tuple[MissingOutput, ...] = ()  # of the last attempt
    started_at: datetime | None = None  # when its first order was given
    ordered_at: datetime | None = None  # when its newest order was given
    ended_at: datetime | None = None
    held_until: datetime | None = None
    """Until when its machines wait for a mended script; None where they do not."""
    kept_until: datetime | None = None
    """Until when the machines of one that succeeded stay up for a look at them; None where they do not."""
    setup_failed: bool = False
    """Whether it ended by its setup's own error, so that a mended setup is what its machines wait for."""
    torn_down: bool = False
    least_nodes: int = 1
    """How many machines an attempt takes at the least."""
    resumption: Resumption = field(default_factory=Resumption)
    """What it goes on with once it has ended."""
    limit_end: LimitEnd | None = None
    """What its message says, in parts, where its budget or its deadline ended it."""
    owned: bool = False  # its machines are the user's own hosts: nobody pays for them, and nothing switches them off
    rehearses: bool = False  # it is one of the short runs of `--verify-resume`
    last_supervisor: str | None = None  # who held it last, where nobody does
    written_at: datetime | None = None  # when its state was written last, by the store's clock
    heard_at: datetime | None = None
    """When the node that tells its steps was heard last, as far as its supervisor wrote that down."""
    deadline_at: datetime | None = None  # when it ends, done or not; None without a deadline
    looked_at: datetime | None = None  # when the report was made, by the same clock
    drives_itself: bool = False
    buys_time: bool = True
    """Whether a process sees to it that prolongs its machines' paid time: they cannot themselves."""
    ends: bool = False
    """Whether it is to end: its newest order says so, or its attempt was told to end for good."""
    spec_sha256: str = ""
    """Of the job file that its newest order is of."""
    hands_over: bool = False
    """Whether nobody holds it, and one of its machines is about to take it."""
    fits_first: bool = False  # whether that one still makes itself fit for it
    outputs: tuple[str, ...] = ()
    """What its order wants brought home from its machines when it has trained."""
    additions: Additions = field(default_factory=Additions)
    """What its script gets beside where a checkpoint was put back."""
    prepared: bool = False
    """Whether all of its machines are ready for an attempt, as far as its state says."""
    silences: tuple[Silence, ...] = ()
    """Its attempt's machines that told its supervisor nothing when its state was written last."""
    saves: CheckpointPolicy | None = None  # as its newest order says; None where that is not known
    base: str = ""  # the name that its job file has
    run: int = 1  # which run of that name it is, from 1
    superseded: bool = False  # a later run of the same job is known: it is what the same command goes on with
    home: str | None = ""
    """Where its last attempt's outputs came home here, empty where none did; None where its job file is not here."""
    lost_file: str | None = None
    """What FILE is in a command that needs its job file, where that is gone or another job's by now."""
    has_stored_outputs: bool = False
    """Whether outputs of one that is over are in its store alone: they found no room where they belong."""
    nobody_answers: bool = False
    """Whether its supervisor hears none of its machines, those beside its attempt included."""
    limits: Limits = field(default_factory=Limits)
    """How long its supervisor waits for what."""

    @property
    def buyer(self) -> str | None:
        """The job whose own machines drive it, and so buy no time; None where a process does that can."""
        return None if self.buys_time or self.status.ended else self.job

    @property
    def awaits(self) -> str:
        """What machines that are held wait for to be mended."""
        return "setup" if self.setup_failed else "script"

    @property
    def died_unheard(self) -> bool:
        """Whether all machines of its open attempt are off, and nobody has seen to that."""
        alone = self.supervisor is None and not self.status.ended
        return alone and self.open_attempt is not None and not self._machines_of(self.open_attempt)

    @property
    def ran_out(self) -> bool:
        """Whether nothing runs any more of its open attempt on machines that live, and nobody has seen to that."""
        # By the word of those that answer: what runs on one that does not has no more peers once a rank has failed.
        attempt = self.open_attempt
        if attempt is None or self.supervisor is not None or self.status.ended or self._is_trained(attempt):
            return False
        parts, asked = self._parts(), self._asked
        told = [parts.get(one.node_id) for one in asked if one.status is not None]
        over = bool(told) and all(part is not None and part.state is RunState.EXITED for part in told)
        done = all(part is not None and part.outcome is Outcome.DONE for part in told)
        return over and not (done and len(told) < len(asked))

    @property
    def has_failed_there(self) -> bool:
        """Whether nobody supervises it, and its script has failed by its own error: whoever takes it next ends it."""
        # Not where a machine is off, or does not answer: its ranks may have failed for that.
        outcomes = {part.outcome for part in self._parts().values()}
        whole = self.ran_out and not self.lost_machines and not self.unanswered
        return whole and Outcome.FAILED in outcomes and EXCUSED.isdisjoint(outcomes)

    @property
    def lost_machines(self) -> bool:
        """Whether a machine of its open attempt is off."""
        return self.open_attempt is not None and self._machines_of(self.open_attempt) < len(self.open_attempt.members)

    @property
    def to_come(self) -> tuple[str, ...]:
        """Outputs that may come home yet: from the machine of rank 0, or the store of one that drives itself."""
        first = {attempt.members[0].node_id for attempt in self.attempts[-1:]}
        return self.outputs if self.drives_itself or self.owned or any(node.id in first for node in self.nodes) else ()

    @property
    def ever_outputs(self) -> tuple[str, ...]:
        """The outputs of its job file, and of those that its attempts were started under."""
        return tuple(dict.fromkeys((*self.outputs, *(path for one in self.attempts for path in one.outputs))))

    @property
    def condition(self) -> Condition:
        """How it stands, as its state and those of its nodes tell that were asked."""
        kind, alone = self.kind, self.supervisor is None
        match kind:
            case ConditionKind.TRAINING:
                found = self._trains
            case ConditionKind.UNSUPERVISED if self.lost_machines:
                found = Condition.ATTEMPT_BROKEN
            case ConditionKind.SILENT if len(self.unanswered) < len(self.standing):
                found = Condition.ATTEMPT_SILENT
            case ConditionKind.TRAINED if not self.to_come:
                found = Condition.NOT_WOUND_UP if alone else Condition.WINDING_UP
            case ConditionKind.WAITING if self.nodes:
                found = Condition.WAITING_FOR_MORE
            case ConditionKind.STARTING if not self.prepared:
                found = Condition.PREPARING
            case ConditionKind.LEFT if self.has_failed_there:
                found = Condition.FAILED_THERE
            case ConditionKind.LEFT if self.prepared and not self.ran_out:
                found = Condition.PREPARED
            case ConditionKind.ENDING if alone:
                found = Condition.IN_STORE if self.has_stored_outputs else Condition.NOT_TORN_DOWN
            case _:
                found = USUAL[kind]
        return found

    @property
    def _trains(self) -> Condition:
        attempt = self.open_attempt
        ends = attempt is not None and attempt.ends_for_good
        if attempt is not None and len(self.silent) == len(attempt.members):
            return Condition.ENDING_UNHEARD if ends else Condition.UNHEARD
        return Condition.ENDING_ATTEMPT if ends else Condition.TRAINING

    @property
    def kind(self) -> ConditionKind:
        """What kind of condition it is in: what is done about it depends on that."""
        attempt = self.open_attempt
        found = condition_of(
            ended=self.status.ended,
            open_attempt=attempt is not None,
            trained=attempt is not None and self._is_trained(attempt),
            supervised=self.supervisor is not None,
            machines=len(self.nodes) if self.status.ended or attempt is None else self._machines_of(attempt),
            left=Left(torn_down=self.torn_down, held=self.held_until is not None, kept=self.kept_until is not None),
        )
        if found is ConditionKind.WAITING and len(self.nodes) >= self.least_nodes:
            return ConditionKind.STARTING
        if found is ConditionKind.UNSUPERVISED and attempt is not None:
            silent = bool(self._asked) and all(one.status is None for one in self._asked)
            found = ConditionKind.SILENT if silent else ConditionKind.LEFT if self.ran_out else found
        if found is ConditionKind.ENDED and self.has_stored_outputs:
            return ConditionKind.ENDING
        nobody = found in (ConditionKind.UNSUPERVISED, ConditionKind.SILENT, ConditionKind.LEFT)
        return ConditionKind.HANDING_OVER if nobody and self.can_be_handed_over else found

    @property
    def can_be_handed_over(self) -> bool:
        """Whether one of its machines is about to take it: of those asked, one has to answer, or makes itself fit."""
        fits = {one.node_id for one in self.intervals if self.fits_first and not one.prepared}
        return self.hands_over and not (self.standing and len({*self.unanswered} - fits) == len(self.standing))

    @property
    def is_unheard(self) -> bool:
        """Whether nobody can tell how its open attempt stands: none of the machines that run it says anything."""
        unheard = (Condition.UNHEARD, Condition.ENDING_UNHEARD, Condition.SILENT, Condition.ATTEMPT_SILENT)
        return self.condition in unheard

    @property
    def silent(self) -> tuple[Silence, ...]:
        """The attempt's machines that whoever supervises it does not hear; a moment without a word is no silence."""
        if self.supervisor is None or self.looked_at is None:
            return ()
        return tuple(one for one in self.silences if self.looked_at - one.since >= self.limits.silent)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The machines that were asked and do not answer."""
        return tuple(one.node_id for one in self.standing if one.status is None)

    @property
    def over_at(self) -> datetime | None:
        """When the ranks of its open attempt had ended, where all have; None where nobody knows."""
        attempt, parts = self.open_attempt, self._parts().values()
        if attempt is None or not (self.kind is ConditionKind.TRAINED or self.ran_out):
            return None
        spans = [part.over_s for part in parts if part.over_s is not None]
        heard = self.looked_at - span_of(min(spans)) if self.looked_at and spans and len(spans) == len(parts) else None
        return attempt.over_at or heard or attempt.done_at

    @property
    def told_at(self) -> datetime | None:
        """When a node last said what is known of the open attempt: no later than its state was written."""
        return min((at for at in (self.heard_at, self.written_at) if at is not None), default=None)

    @property
    def progress(self) -> Progress | None:
        """How far rank 0's script is in the open attempt, where its node was asked: its steps are the job's."""
        return self.first_part.shown if self.first_part is not None else None

    @property
    def counted(self) -> Progress | None:
        """The same as attempts are counted: in saves, where the script's checkpoints tell no step."""
        return self.first_part.counted if self.first_part is not None else None

    @property
    def counts(self) -> Counts:
        """What its attempts are counted in, as its newest checkpoint says; before there is one, as its nodes do."""
        told = self.checkpoint or self.counted
        return told.counts if told is not None else Counts.STEPS

    def unit_of(self, attempt: Attempt) -> Counts:
        """Return what an attempt's steps are."""
        return unit_of(attempt, self.checkpoint)

    @property
    def printed(self) -> tuple[tuple[str, float], ...]:
        """Other numbers that the script prints, by the job file's patterns: of the first rank's node."""
        part = self.first_part
        return part.readings.values if part is not None and part.readings is not None else ()

    @property
    def first_part(self) -> AttemptStatus | None:
        """What the machine of rank 0 tells of the open attempt, where it was asked."""
        return self._parts().get(self.open_attempt.members[0].node_id) if self.open_attempt is not None else None

    @property
    def reached(self) -> Reached | None:
        """The newest step that counts; None before the first. What was trained and lost does not."""
        progress, attempt, saved = self.progress, self.open_attempt, self.checkpoint
        last = self.attempts[-1] if self.status is JobStatus.SUCCEEDED and self.attempts else None
        if last is not None and last.last_step is not None and last.unsaved is None:
            return Reached(step=last.last_step, total_steps=last.total_steps, counts=self.unit_of(last))
        left = attempt is not None and not self._machines_of(attempt) and not self._is_trained(attempt)
        if self.status.ended or attempt is None or self.ran_out or left:
            total = attempt.total_steps if attempt is not None else None
            if saved is None:
                return None
            return Reached(step=saved.step, total_steps=total, counts=saved.counts, is_saved=True)
        if progress is not None and progress.phase != UNTOLD:
            told = Counts.STEPS if progress.phase == OUTPUT else progress.counts
            # A node's word may be older than what it has saved since; a script below its first step has begun anew.
            goes_on = saved is not None and saved.counts is told and progress.step >= progress.first_step
            step = max(progress.step, saved.step) if saved is not None and goes_on else progress.step
            return Reached(step=step, total_steps=progress.total_steps, counts=told, is_done=progress.phase == DONE)
        unit = self.unit_of(attempt)
        by_output = self.supervisor is not None and progress is None and attempt.printed_step is not None
        if by_output and (unit is Counts.SAVES or attempt.last_step is None):
            return Reached(step=attempt.printed_step or 0, at=self.told_at)
        if attempt.last_step is not None:
            kept = saved.step if saved is not None and saved.counts is unit else 0
            step = max(attempt.last_step, kept)
            alone = self.supervisor is None and kept == step
            at = None if alone or progress is not None else self.told_at
            return Reached(step=step, total_steps=attempt.total_steps, counts=unit, at=at, is_saved=alone)
        return Reached(step=saved.step, counts=saved.counts, is_saved=True) if saved else None

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt that has not ended, if any."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].reason is None else None

    def kept_to(self, attempt: Attempt) -> int | None:
        """Return the last of the attempt's steps that counts, one before its first for none; None where all do."""
        over = self.ran_out or (self.died_unheard and self.kind is not ConditionKind.TRAINED)
        attempt = replace(attempt, reason=attempt.reason or (ExitReason.LOST if over else None))
        return kept_to(attempt, self.attempts, self.checkpoint, succeeded=self.status is JobStatus.SUCCEEDED)

    def _machines_of(self, attempt: Attempt) -> int:
        """Return how many of the attempt's machines live: one that came in place of another runs nothing of it."""
        members = {member.node_id for member in attempt.members}
        return sum(node.id in members for node in self.nodes)

    @property
    def _asked(self) -> tuple[NodeStanding, ...]:
        """The machines that run the open attempt, as far as they were asked."""
        members = {member.node_id for member in self.open_attempt.members} if self.open_attempt is not None else ()
        return tuple(one for one in self.standing if one.node_id in members)

    def _parts(self) -> dict[str, AttemptStatus]:
        """Return what asked nodes tell of the open attempt, by their ids; what they tell of an earlier one is over."""
        number = self.open_attempt.number if self.open_attempt is not None else None
        told = ((one.node_id, one.status.attempt) for one in self._asked if one.status is not None)
        return {node_id: part for node_id, part in told if part is not None and part.attempt == number}

    def _is_trained(self, attempt: Attempt) -> bool:
        """By the nodes' own word where nobody supervises: else who does knows, and tells all who ask the same."""
        parts = self._parts() if self.supervisor is None else {}
        told = {node_id: part.outcome for node_id, part in parts.items()}
        return all((told.get(member.node_id) or member.outcome) is Outcome.DONE for member in attempt.members)


def report(
    state: JobState, spend: Spend, charges: tuple[Charge, ...], group: GroupView, supervisor: str | None
) -> JobReport:
    """Return the report on a job's state."""
    return JobReport(
        job=state.job,
        name=state.job,
        status=JobStatus.RUNNING if state.attempt is not None and not state.status.ended else state.status,
        exit_reason=state.exit_reason,
        exit_code=state.exit_code,
        message=state.message,
        supervisor=supervisor,
        attempts=state.attempts,
        interruptions=state.interruptions,
        stops=tuple(stopped_at(one, state) for one in state.interruptions),
        checkpoint=state.checkpoint,
        spend=replace(spend, outside_budget_usd=total(charge for charge in charges if not charge.kind.in_budget)),
        paid_until=state.paid_until,
        nodes=group.alive,
        from_there="" if supervisor is not None else group.from_there,
        charges=charges,
        intervals=state.nodes,
        cooldowns=() if state.status.ended else state.cooldowns,
        quarantined=state.quarantined,
        tags=state.tags,
        capacity_decision=None if state.status.ended else state.capacity_decision,
        missing_outputs=missing_outputs(state, supervised=supervisor is not None),
        drives_itself=state.drives_itself,
        prepared=bool(state.alive) and all(interval.prepared for interval in state.alive),
        ended_at=state.ended_at,
        setup_failed=state.setup_failed,
        torn_down=state.torn_down,
        heard_at=heard_at(state),
        silences=silences(state),
        nobody_answers=bool(state.alive) and all(interval.silent_at is not None for interval in state.alive),
    )


def with_answers(report: JobReport, standing: tuple[NodeStanding, ...]) -> JobReport:
    """Return the report with what its nodes say now: the steps that they tell of are the open attempt's."""
    report = without_lost_outputs(replace(report, standing=standing))
    shown, progress = report.progress, report.counted
    if shown is not None and report.looked_at is not None:
        past = resumed(report.interruptions, report.stops, report.attempts[-1], shown, report.looked_at)
        report = replace(report, interruptions=past)
    if progress is None or progress.step < progress.first_step:
        return report
    attempt = replace(as_told(report.attempts[-1], progress), total_steps=progress.total_steps)
    return replace(report, attempts=(*report.attempts[:-1], attempt))


def without_lost_outputs(report: JobReport) -> JobReport:
    """Return the report that says which outputs were on machines that are off by now, and that nobody brought home.

    Machines that drive their job may have put them into its store.
    """
    trained = report.kind is ConditionKind.TRAINED and report.supervisor is None
    left = report.died_unheard and report.owned  # a host is there when its time is over, too
    if not left and (report.to_come or not (report.died_unheard or trained)):
        return report
    attempt, host = report.attempts[-1], report.attempts[-1].members[0].node_id
    why = lost_with_machines(attempt) if report.died_unheard else f"lost with {host}, the machine of rank 0"
    if left:
        why = f"is not home yet: `gpucloud down {report.job}` brings it from {host}, if that answers"
    lost = (MissingOutput(path=path, why=why, attempt=None if left else attempt.number) for path in report.outputs)
    return replace(report, missing_outputs=tuple(dict.fromkeys((*report.missing_outputs, *lost))))
