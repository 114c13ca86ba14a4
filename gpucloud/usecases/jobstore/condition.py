"""How a job stands, in the words of every line about it: whether it trains, who sees to it, what its machines say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.checkpoint.protection import COSTS_ALL, NOT_CALLED, first_save
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import CheckpointPolicy
from gpucloud.domain.node.status import DONE, OUTPUT, UNTOLD, Progress, Status
from gpucloud.domain.state.state import Attempt, CheckpointRef, JobState
from gpucloud.domain.supervision.membership import unit_of


class ConditionKind(Enum):
    """What goes on with a job now, in so far as what is done about it depends on that."""

    TRAINING = "training"
    UNSUPERVISED = "unsupervised"  # training
    SILENT = "silent"  # nobody supervises, and no machine that runs its attempt answers
    HANDING_OVER = "handing_over"  # one of its machines is about to supervise it, whether it trains or not
    TRAINED = "trained"  # and not wound up
    WAITING = "waiting"  # for machines
    STARTING = "starting"  # its machines are there, and no attempt has begun on them yet
    LEFT = "left"  # nobody supervises, and nothing trains: no attempt, or one whose machines are off, or that has ended
    HELD = "held"  # its script failed, and its machines wait for the mended one
    KEPT = "kept"  # it succeeded, and its machines stay up for a look at them
    ENDING = "ending"  # over, and something is left: machines, the node group, or results in its store
    ENDED = "ended"


class Condition(str, Enum):
    """What goes on with a job now, as text (`WORDS`) and JSON tell it: the cases of each kind."""

    TRAINING = "training"
    UNHEARD = "training_unheard"  # somebody supervises, whom none of the machines that run its attempt answers
    ENDING_ATTEMPT = "ending_attempt"  # its attempt was told to end for good
    ENDING_UNHEARD = "ending_attempt_unheard"  # both
    UNSUPERVISED = "training_unsupervised"
    SILENT = "silent"  # none of its machines answers
    ATTEMPT_SILENT = "attempt_silent"  # none of those that run its attempt; another one answers
    ATTEMPT_BROKEN = "attempt_broken"  # nobody supervises, and a machine of its attempt is off
    HANDING_OVER = "handing_over"
    TRAINED = "trained"  # its results are not home yet
    WINDING_UP = "winding_up"  # without outputs: somebody ends it
    NOT_WOUND_UP = "not_wound_up"  # so, and nobody does
    WAITING = "waiting"
    WAITING_FOR_MORE = "waiting_for_more"  # some are there
    STARTING = "starting"  # they are ready
    PREPARING = "preparing"  # they are made ready
    LEFT = "waiting_unsupervised"
    FAILED_THERE = "failed_unsupervised"  # its script has failed by its own error
    PREPARED = "prepared"  # machines are ready, and have no attempt
    HELD = "held"
    KEPT = "kept"
    ENDING = "ending"  # somebody ends what is left
    NOT_TORN_DOWN = "not_torn_down"  # nobody does
    IN_STORE = "results_in_store"  # so, and all that is left are results in its store
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of a job that is over, and for what its machines are there."""

    torn_down: bool = False
    held: bool = False
    kept: bool = False


def condition_of(
    *,
    ended: bool,
    open_attempt: bool,
    trained: bool,
    supervised: bool,
    machines: int,
    left: Left = Left(),
) -> ConditionKind:
    """Return what kind of condition a job is in, its machines taken at their last word.

    An attempt whose machines are all gone trains nowhere, whatever the state says. `trained`: all its ranks are done,
    and nothing has to be paid for again.
    """
    if ended:
        return _of_ended(machines, left)
    if open_attempt and trained:
        return ConditionKind.TRAINED
    if open_attempt and (machines or supervised):
        return ConditionKind.TRAINING if supervised else ConditionKind.UNSUPERVISED
    return ConditionKind.WAITING if supervised else ConditionKind.LEFT


def _of_ended(machines: int, left: Left) -> ConditionKind:
    if machines and left.held:
        return ConditionKind.HELD
    if machines and left.kept:
        return ConditionKind.KEPT
    return ConditionKind.ENDED if left.torn_down and not machines else ConditionKind.ENDING


USUAL = {
    ConditionKind.TRAINING: Condition.TRAINING,
    ConditionKind.UNSUPERVISED: Condition.UNSUPERVISED,
    ConditionKind.SILENT: Condition.SILENT,
    ConditionKind.HANDING_OVER: Condition.HANDING_OVER,
    ConditionKind.TRAINED: Condition.TRAINED,
    ConditionKind.WAITING: Condition.WAITING,
    ConditionKind.STARTING: Condition.STARTING,
    ConditionKind.LEFT: Condition.LEFT,
    ConditionKind.HELD: Condition.HELD,
    ConditionKind.KEPT: Condition.KEPT,
    ConditionKind.ENDING: Condition.ENDING,
    ConditionKind.ENDED: Condition.ENDED,
}
"""Of each kind, what is told where nothing more is known."""

WORDS = {
    Condition.TRAINING: "training",
    Condition.UNHEARD: "training, no machine answers",
    Condition.ENDING_ATTEMPT: "ending its attempt",
    Condition.ENDING_UNHEARD: "ending its attempt, no machine answers",
    Condition.UNSUPERVISED: "TRAINING, NOBODY SUPERVISES",
    Condition.SILENT: "NO MACHINE ANSWERS, NOBODY SUPERVISES",
    Condition.ATTEMPT_SILENT: "NO MACHINE OF ITS ATTEMPT ANSWERS, NOBODY SUPERVISES",
    Condition.ATTEMPT_BROKEN: "A MACHINE OF ITS ATTEMPT IS OFF, NOBODY SUPERVISES",
    Condition.HANDING_OVER: "handing over to its machines",
    Condition.TRAINED: "trained, its results are not home yet",
    Condition.WINDING_UP: "trained, being wound up",
    Condition.NOT_WOUND_UP: "trained, not wound up",
    Condition.WAITING: "waiting for machines",
    Condition.WAITING_FOR_MORE: "waiting for more machines",
    Condition.STARTING: "starting",
    Condition.PREPARING: "preparing its machines",
    Condition.LEFT: "waiting, nobody supervises",
    Condition.FAILED_THERE: "its script has failed, nobody supervises",
    Condition.PREPARED: "prepared, nothing trains on it",
    Condition.HELD: "failed, machines held",
    Condition.KEPT: "succeeded, machines kept",
    Condition.ENDING: "ending its machines",
    Condition.NOT_TORN_DOWN: "not torn down",
    Condition.IN_STORE: "its results are in its store",
    Condition.ENDED: "",
}
"""Of a job that is over, but for machines that stay up for its user, these come after its status."""


# What its machines have said of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStanding:
    """What a node said when it was asked; `status` is None when it did not answer."""

    node_id: str
    status: Status | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A machine that tells its supervisor nothing, and since when nobody has heard it."""

    node_id: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The newest step that counts: of the attempt that trains, else the one that the next attempt goes on after."""

    step: int
    total_steps: int | None = None
    counts: Counts = Counts.STEPS
    at: datetime | None = None
    """When a node told it; None for one that a node tells now, and for one of no time: it is saved, or the last."""
    is_saved: bool = False
    """Whether it is known from the job's store."""
    is_done: bool = False
    """Whether the script called `run.done()` there."""

    def __str__(self) -> str:
        """As people are told of it: its number, of how many, and why none comes after it where any could."""
        total = f" of {self.total_steps}" if self.total_steps else ""
        early = ", where its script called run.done()" if self.is_done and self.step < (self.total_steps or 0) else ""
        return f"{self.counts.named(self.step)}{total}{early}"


def from_where(checkpoint: CheckpointRef | None) -> str:
    """Return from where an attempt begins that finds this checkpoint, in words."""
    return str(checkpoint) if checkpoint is not None else "the beginning"


def kept_to(
    attempt: Attempt, attempts: tuple[Attempt, ...], checkpoint: CheckpointRef | None, *, succeeded: bool
) -> int | None:
    """Return the last of the attempt's steps that counts, one before its first where none does; None where all do.

    A later attempt begins after what is known to be saved, or at the first step: what a script prints first may be any.
    As long as none has begun that tells its steps, the next goes on after the checkpoint.
    """
    if attempt.first_step is None or attempt.last_step is None:
        return None
    later = tuple(one for one in attempts if one.number > attempt.number)
    is_last = attempt.reason is None or (succeeded and not later)
    if any(one.begun_anew for one in later) or (not is_last and _saved_nothing(attempt, attempts, checkpoint)):
        return attempt.first_step - 1
    saved = {one.saved_step for one in attempts if one.saved_step is not None} | {0}
    begun = [one.first_step - 1 for one in later if one.first_step is not None]
    kept = [step for step in begun if step in saved]
    if not begun and ((not is_last and not succeeded) or (is_last and attempt.unsaved is not None)):
        kept = [checkpoint.step if checkpoint is not None else 0]
    least = min(kept, default=attempt.last_step)
    return max(least, attempt.first_step - 1) if least < attempt.last_step else None


def _saved_nothing(attempt: Attempt, attempts: tuple[Attempt, ...], checkpoint: CheckpointRef | None) -> bool:
    """Whether nothing of the job is saved, or the attempt has told steps where saves are counted from the first on."""
    if checkpoint is None:
        return all(one.saved_step is None for one in attempts)
    return checkpoint.counts is Counts.SAVES and unit_of(attempt, checkpoint) is Counts.STEPS


def heard_at(state: JobState) -> datetime | None:
    """Return when the node of rank 0, which tells the steps, was heard last; None where the state does not know.

    It is the node's word that counts, and not the look of a supervisor, who may have heard nothing.
    """
    first = state.attempt.members[0].node_id if state.attempt is not None else None
    return next((interval.last_word_at for interval in state.nodes if interval.node_id == first), None)


def silences(state: JobState) -> tuple[Silence, ...]:
    """Return which machines of the open attempt tell their supervisor nothing."""
    members = {member.node_id for member in state.attempt.members} if state.attempt is not None else set()
    return tuple(
        Silence(node_id=interval.node_id, since=min(interval.silent_at, interval.last_word_at or interval.silent_at))
        for interval in state.alive
        if interval.node_id in members and interval.silent_at is not None
    )


# Whether it tells steps, and what of its work is saved.


_LAUNCHES_FOR = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """How the job saves by an order of that time: an attempt from before it may have another policy."""

    policy: CheckpointPolicy
    since: datetime | None = None


def nothing_saved(
    saves: Saves,
    attempts: Sequence[Attempt],
    progress: Progress | None,
    checkpoint: CheckpointRef | None,
    now: datetime,
    *,
    heard: bool,
) -> str | None:
    """Return that the attempts have saved nothing, and when the last one will, or why it does not; None otherwise.

    So also of a script that tells no steps, once it has run for a while. `heard`: whether the machine of rank 0 tells
    how its script stands; `progress` is that.
    """
    attempt, policy = attempts[-1], saves.policy
    if policy.none or saved_words(progress, checkpoint) or any(one.saved_step for one in attempts):
        return None
    step = progress.step if progress and progress.phase != UNTOLD else attempt.printed_step or attempt.last_step
    young = step is None and may_tell(attempt, tuple(attempts), now)
    if step == 0 or young or (progress and progress.phase == DONE):
        return None
    yet, folder = "nothing is saved yet", policy.directory
    is_older = saves.since is not None and attempt.started_at < saves.since
    if folder is not None:
        first = f"the first save is due once its script has a whole checkpoint in {folder.path}"
        return yet if attempt.ends_for_good or is_older else f"{yet}: {first}"
    if progress is None and not heard and step is None:
        return None  # nobody knows whether it uses the library
    if progress.phase == OUTPUT if progress else heard or attempt.printed_step is not None:
        return "nothing is saved" if attempt.ends_for_good else f"nothing is saved: {NOT_CALLED}; {COSTS_ALL}"
    is_over = (policy.every is not None and now - attempt.started_at >= policy.every) or (
        policy.every_steps is not None and (step or 0) >= policy.every_steps
    )  # it may be under way, or have failed
    due = first_save(policy) if not (attempt.ends_for_good or is_older or is_over) else None
    return f"{yet}: the first save is due {due}" if due else yet


def in_short(unsaved: str) -> str:
    """Return that nothing is saved without when the first save is due, or why there is none."""
    return unsaved.partition(":")[0]


def saved_words(progress: Progress | None, checkpoint: CheckpointRef | None) -> str | None:
    """Return what is saved, by the store and by the word of rank 0's machine, which may be older, or newer."""
    if progress is not None and (told := progress.committed_step):
        is_newer = checkpoint is None or (progress.counts is checkpoint.counts and told > checkpoint.step)
        if is_newer or progress.counter_drop is not None:
            return f"{progress.counts.named(told)} is saved"
    return f"{checkpoint} is saved" if checkpoint is not None else None


def untold_words(attempt: Attempt, attempts: Sequence[Attempt], now: datetime) -> str:
    """Return how an open attempt stands that has told no step: it starts, or its script tells none in any attempt."""
    known = "no step yet" if may_tell(attempt, attempts, now) else "tells no steps"
    return f"running for {format_span(now - attempt.started_at)}, {known}"


def may_tell(attempt: Attempt, attempts: Sequence[Attempt], now: datetime) -> bool:
    """Whether a step may still come of an open attempt that has told none."""
    return now - attempt.started_at < _LAUNCHES_FOR or any(map(tells_steps, attempts))


def tells_steps(attempt: Attempt) -> bool:
    """Whether its script has told steps, and not its saves alone."""
    unsaved = attempt.counts is not Counts.SAVES and attempt.last_step not in (None, attempt.saved_step)
    return unsaved or attempt.step_seconds is not None or attempt.printed_step is not None
