"""How a job's script saves, what an interruption costs it so, and the trial that shows whether it resumes exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.checkpoint.manifest import Commit
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import CheckpointPolicy, Cloud, Job, MarketPolicy, OnNotice


class Saving(str, Enum):
    """How it saves."""

    RESUME = "resume"  # with gpucloud.resume
    DIRECTORY = "directory"  # by itself, into the job file's `checkpoint: {directory: …}`
    NONE = "none"  # not at all, and the job file says so
    NOTHING = "nothing"  # not at all, as far as can be seen
    UNKNOWN = "unknown"


NEVER = (Saving.NONE, Saving.NOTHING)
"""What an interruption takes back to the beginning."""

OTHERWISE = (*NEVER, Saving.DIRECTORY)
"""Of which gpucloud does not say how often it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What was found in a job's code: the script that `run` names, and where `gpucloud.resume` is imported."""

    script: str | None
    reached: bool = False
    """Whether the script, or what it imports of the code, does."""
    elsewhere: str | None = None
    """Another file that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a script saves, and what it is called."""

    saving: Saving
    row: str
    """For a plan: how it saves, and what an interruption costs."""
    script: str = "this script"
    outputs: tuple[str, ...] = ()
    lost: str = ""
    """For a plan: what of its work goes with its machines, and what is left; empty where outputs come home."""

    @property
    def warning(self) -> str | None:
        """Why it should not be trained like this on machines that may be interrupted; None where it may be."""
        if self.saving is not Saving.NOTHING:
            return None
        return f"{self.script} does not save: {COSTS_ALL}"


COSTS_A_RESTART = "an interruption costs a restart, and without notice the steps since the last save"
"""What an interruption costs a script that saves with gpucloud.resume."""

NOT_CALLED, COSTS_ALL = "the script has not called gpucloud.resume so far", "an interruption starts it at the beginning"
"""Why nothing is known to be saved of a script that runs, and what an interruption costs it then."""

COMES_HOME = (
    "when the job ends, from the machine of rank 0, and when that is interrupted,"
    " as much as its notice leaves time for; without one, what was written there goes with it"
)
"""Of outputs."""

_AT_ONCE = (
    "; it saves nothing, and is ended in time for that: at once at a notice, and up to 1 min before the budget ends"
)
_HALFWAY = (
    "; if it does not use gpucloud.resume, it is ended in time for that: halfway through a notice,"
    " and up to 30 s before the budget ends"
)
ENDED_FOR_OUTPUTS = {**dict.fromkeys(NEVER, _AT_ONCE), Saving.UNKNOWN: _HALFWAY}
"""When a script is ended that would go on until its machine goes, and its outputs with it."""

NOTHING_COMES_HOME = "what the script writes goes with its machines; name it in `outputs:`"
"""Of a job file that names no outputs."""


def none_came_home(policy: CheckpointPolicy | None, name: str, *, saved: bool) -> str:
    """Return what has gone with the machines of a script that has done its work: all, or all but its checkpoints.

    `policy` is None where nobody knows it.
    """
    stay = f"; {checkpoints_stay(policy, name)}" if saved and policy is not None else ""
    return f"{'no file' if saved else 'nothing'} has come home: {NOTHING_COMES_HOME}{stay}"


def checkpoints_stay(policy: CheckpointPolicy, name: str = "JOB") -> str:
    """Return where checkpoints are, and what takes them out, for whom files of the script's are lost."""
    way = "--export FILE` gives the weights" if policy.directory is None else "--pull FOLDER` brings one"
    return f"checkpoints stay in the job's store, `gpucloud checkpoints {name} {way}"


REMEDY = (
    "four lines of gpucloud.resume in the script; or `checkpoint: {directory: …}` for what it saves by itself;"
    " or `checkpoint: none` where it is meant so"
)


def saves_nothing(job: Job, saving: Saving) -> bool:
    """Whether a script that saves so begins anew on other machines: what policies are told, live and in a plan."""
    return job.checkpoint.none or saving in NEVER


def protection_of(job: Job, code: Code) -> Protection:
    """Return how the job's script saves; its own word, once it runs, counts more."""
    saving, row = _saving(job, code)
    lost = ""
    if not job.outputs and not job.trial:
        unknown = saving is Saving.UNKNOWN
        stay = "what gpucloud.resume saves stays in its store" if unknown else checkpoints_stay(job.checkpoint)
        no_file = f"no file comes home: {NOTHING_COMES_HOME}; {stay}"
        lost = f"NOTHING comes home: {NOTHING_COMES_HOME}" if saving in NEVER else no_file
    return Protection(saving=saving, row=row, script=code.script or "this script", outputs=job.outputs, lost=lost)


def _saving(job: Job, code: Code) -> tuple[Saving, str]:
    kept = job.checkpoint.directory
    if code.reached:
        return Saving.RESUME, f"by gpucloud.resume; {COSTS_A_RESTART}"
    if kept is not None:
        told = f"asked by {kept.on_notice.value} at a notice, and " if kept.on_notice is not OnNotice.NONE else ""
        without = " without one" if told else ""
        return Saving.DIRECTORY, f"{told}what is whole in {kept.path}/; an interruption{without} costs the work since"
    if job.checkpoint.none:
        return Saving.NONE, f"nothing, as the job file says; {COSTS_ALL}"
    if code.script is not None and code.elsewhere is None:
        return Saving.NOTHING, f"NOTHING: {COSTS_ALL}"
    why = "no script of the code folder is named in `run`"
    if code.elsewhere is not None:
        why = f"{code.elsewhere} uses gpucloud.resume, and it may be that {code.script or 'the command'} uses it"
    return Saving.UNKNOWN, f"not known before it runs: {why}"


def what_saves_first(policy: CheckpointPolicy | None, *, ended: bool) -> str:
    """Return what makes a job's first checkpoint, and when, as far as its order tells; of an ended one, what had to."""
    if policy is not None and policy.none:
        return "its job file says `checkpoint: none`: its script saves nothing"
    if policy is not None and policy.directory is not None:
        path = policy.directory.path
        had = f"its script had no whole checkpoint in {path}"
        return had if ended else f"the first is there once its script has a whole checkpoint in {path}"
    if policy is None or ended:
        return "a script saves with gpucloud.resume, or into the job file's `checkpoint: {directory: …}`"
    first = first_save(policy) or "within seconds of its start, once a step is done"
    return f"a script with gpucloud.resume saves first {first}; without it nothing of this job is saved"


def first_save(policy: CheckpointPolicy) -> str | None:
    """Return when gpucloud.resume saves first by that policy; None where it chooses that itself."""
    if policy.every is not None:
        return f"{format_span(policy.every)} after its script's start"
    return f"at step {policy.every_steps}" if policy.every_steps is not None else None


def must_be_meant(job: Job, protection: Protection) -> bool:
    """Whether somebody is to say that it is meant so: machines that cost money and may be interrupted."""
    interruptible = job.cloud is Cloud.AWS and job.resources.market is not MarketPolicy.ON_DEMAND
    return protection.saving is Saving.NOTHING and interruptible and not job.trial


# A trial of resuming: the same few steps twice, the second time killed in the middle, and what differs then.


LOSSES = "losses"
"""Under this name each rank's own part of a trial's checkpoint has the loss of every step so far; null: not told."""

Losses = Mapping[int, Sequence[float | None]]
"""By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run of so many steps; killed once after `killed_at` of them, None: undisturbed."""

    steps: int
    killed_at: int | None = None

    def __str__(self) -> str:
        """As `GPUCLOUD_TRIAL` says it to the script."""
        return str(self.steps) if self.killed_at is None else f"{self.steps}:{self.killed_at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint holds, by readable names, each with what tells it from another: sums, or text."""

    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """The first step, from 1, whose loss was not the same in both runs, and the first rank where it was not."""

    step: int
    rank: int
    calm: float | None
    killed: float | None


class Outcome(str, Enum):
    """What a trial showed; the value is what programs read."""

    EQUAL = "equal"
    DIFFERENT = "different"  # only after the resume
    NOT_DETERMINISTIC = "not_deterministic"  # before it already
    NOT_RESUMED = "not_resumed"  # the script ended before it was killed
    FAILED = "failed"  # one of the runs did not come to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a trial showed: `step` is the last saved one, or the first of those that differs, in `parts`.

    `compared` is how many parts there were in all. Steps are saved now and then, a loss has every one of them.
    """

    outcome: Outcome
    step: int
    resumed_from: int | None
    compared: int = 0
    parts: tuple[str, ...] = ()
    loss: LossGap | None = None


def read_trial(text: str) -> Trial | None:
    """Return the trial that a script is to be; None for empty text. UsageError for other words."""
    steps, _, killed_at = text.partition(":")
    if not text:
        return None
    if not steps.isdigit() or not (killed_at or "1").isdigit():
        raise UsageError(f"GPUCLOUD_TRIAL={text!r} is no trial", hint="set it to 8, or to 8:5, or not at all")
    return Trial(steps=int(steps), killed_at=int(killed_at) if killed_at else None)


def differences(one: Content, other: Content) -> tuple[str, ...]:
    """Return the names of all that differs, or is in one of them only."""
    names = sorted({*one.parts, *other.parts})
    return tuple(name for name in names if one.parts.get(name) != other.parts.get(name))


def first_gap(calm: Losses, killed: Losses) -> LossGap | None:
    """Return where the losses begin to differ, in any bit; None where they do not."""
    gaps = (
        LossGap(step=step, rank=rank, calm=one, killed=other)
        for rank in sorted(calm.keys() & killed.keys())
        for step, (one, other) in enumerate(zip(calm[rank], killed[rank], strict=False), start=1)
        if repr(one) != repr(other)  # a loss that is no number equals itself
    )
    return min(gaps, key=lambda gap: (gap.step, gap.rank), default=None)


def judged(step: int, parts: tuple[str, ...], gap: LossGap | None, resumed_from: Commit | None) -> Outcome:
    """Return what it means that these parts differ at that step, the first where any do, and the losses from theirs."""
    if resumed_from is None:
        return Outcome.NOT_RESUMED
    firsts = [*([step] if parts else []), *([gap.step] if gap is not None else [])]
    if not firsts:
        return Outcome.EQUAL
    return Outcome.NOT_DETERMINISTIC if min(firsts) <= resumed_from.step else Outcome.DIFFERENT
