"""The job's one state object: state, lease and fence at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum

from gpucloud.domain.checkpoint.manifest import Counts, Why
from gpucloud.domain.node.node import EndCause, Fault
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.node.use import UseSpan
from gpucloud.domain.offer import EfaLayout, Pool
from gpucloud.domain.state.event import Event

VERSION = 1
"""Of the state as it is stored; one that was written by another version is neither read nor written."""


class JobStatus(str, Enum):
    """Where a job stands, as users see it."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Whether nothing more will be done for the job."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


class ExitReason(str, Enum):
    """Why an attempt, or the job, ended; what each means stands in one table below."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"
    INTERRUPTED = "interrupted"
    NO_CAPACITY = "no_capacity"
    REFUSED = "refused"  # by the cloud, for a reason that no other pool and no time changes
    LOST = "lost"
    HUNG = "hung"
    BUDGET = "budget"
    DEADLINE = "deadline"
    IDLE = "idle"
    STOPPED = "stopped"
    RESCHEDULED = "rescheduled"
    RESIZED = "resized"
    UNPREPARED = "unprepared"  # no machine that came could be made ready, or was fit

    @property
    def retried(self) -> bool:
        """Whether another attempt follows by itself."""
        return _EXITS[self].retried

    @property
    def by_script(self) -> bool:
        """Whether the script, or `setup:`, is at fault.

        The last lines of the rank that failed are then told, if one did; its exception is the job's message if there is
        no other; `hold` keeps the machines; and `train --again` begins a new run instead of going on with this one.
        """
        return _EXITS[self].by_script

    @property
    def exit_code(self) -> int:
        """The exit code of `gpucloud train` when the job ends for this reason."""
        return _EXITS[self].code

    @property
    def status(self) -> JobStatus:
        """The job's status when it ends for this reason."""
        return _EXITS[self].status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exit:
    """What it means that a job ends for a reason.

    Codes from 1 on are gpucloud's own (6 to 9 are free), from 10 on those of money, time, machines and stores (17 to 19
    are free), from 20 on of the script (22 to 29 are free), from 30 on of what may be left behind. An end by a rule of
    the job file that is none of these, as of idle GPUs, is of the second kind. An error (`domain/errors`) that means
    the same has the same code.
    """

    code: int
    status: JobStatus = JobStatus.FAILED
    retried: bool = False
    by_script: bool = False


_RETRIED = ExitReason.INTERRUPTED, ExitReason.LOST, ExitReason.HUNG, ExitReason.RESCHEDULED, ExitReason.RESIZED
_EXITS = {
    **dict.fromkeys(_RETRIED, _Exit(code=21, retried=True)),  # a run ends so when its attempts are used up
    ExitReason.SUCCEEDED: _Exit(code=0, status=JobStatus.SUCCEEDED),
    ExitReason.USER_ERROR: _Exit(code=20, by_script=True),
    ExitReason.NO_CAPACITY: _Exit(code=11),
    ExitReason.REFUSED: _Exit(code=13),
    ExitReason.BUDGET: _Exit(code=10),
    ExitReason.DEADLINE: _Exit(code=12),
    ExitReason.IDLE: _Exit(code=16, status=JobStatus.STOPPED),  # as the job file wishes
    ExitReason.UNPREPARED: _Exit(code=14),
    ExitReason.STOPPED: _Exit(code=130, status=JobStatus.STOPPED),  # as the user wishes now
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The supervisor that holds the lease; `started` tells a process from a later one with its pid, in one PID `space`.

    `node` is the machine of the job that drives it, empty for one outside; with `leaves` that stays until one does.
    """

    id: str
    host: str
    pid: int
    started: str
    since: datetime
    space: str = ""
    node: str = ""
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node in an attempt, with its node rank."""

    node_id: str
    rank: int
    outcome: Outcome | None = None
    """How its part ended, None while it runs: kept here, because the machine may be gone before the others end."""
    use: tuple[UseSpan, ...] = ()
    """How it used its GPUs over the window of the job's `idle:` policy, while the attempt is open."""
    used_until: datetime | None = None  # when the last sample of that was taken


NOT_THERE = "is not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingOutput:
    """An output of the job file that did not come home, or not whole."""

    path: str
    """As the job file names it; it may be a pattern."""
    why: str
    nearest: str | None = None
    """What there is of a similar name."""
    attempt: int | None = None
    """Whose output it is, where it is lost for good: it counts whatever a later attempt brings home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch on one set of nodes; `first_step` is the first step run, `last_step` the last one seen.

    `port` is where ranks meet. `ending_reason` is why it is being ended, written down first, with when and how firmly.
    `saved_step` is the newest commit that it knew of, `step_seconds` the median of its steps, `pace_s` what one takes
    by the clock with saves and evaluation; `stepped_at` and `last_step_at` are when its first and last step were seen.
    """

    number: int
    members: tuple[Member, ...]
    port: int
    started_at: datetime
    ending_reason: ExitReason | None = None
    ending_at: datetime | None = None
    ordered: Stop = Stop.NO
    first_step: int | None = None
    last_step: int | None = None
    ended_at: datetime | None = None
    reason: ExitReason | None = None
    saved_step: int | None = None
    step_seconds: float | None = None
    pace_s: float | None = None
    stepped_at: datetime | None = None
    last_step_at: datetime | None = None
    total_steps: int | None = None
    killed_at: datetime | None = None  # when its ranks were first told to be killed: what runs long after does not die
    failed_at: datetime | None = None  # since when a member's script is known to have failed
    done_at: datetime | None = None
    """When all members' scripts were known to be done: what is left is to bring their results home."""
    over_at: datetime | None = None  # when the last of its scripts had ended, by their nodes' word; seen may be later
    broken_at: datetime | None = None  # since when some members are over that were not done, while others still work
    unbrought_at: datetime | None = None  # since when its outputs cannot be brought home, nor anywhere else
    outputs_still_at: datetime | None = None  # since when nothing of them has come, while they are being brought
    longest_step_s: float | None = None
    """The longest that a step took which came, the attempt's first left out: a hang is longer."""
    apart_s: float | None = None  # the longest between two of its steps that was seen, where these are its saves
    tree: str = ""
    """The tree of the job's code that all its ranks run, by its hash; outputs are looked for there."""
    missing_outputs: tuple[MissingOutput, ...] = ()  # what did not come home when it ended
    outputs: tuple[str, ...] = ()  # those of the job file that it was started under; none in older states
    outputs_came: bool = False  # whether its outputs were fetched from a machine that the job then lost
    outputs_coming: bool = False  # whether whoever supervises fetches them; what is missing is so if that fails
    counts: Counts | None = None
    """What its steps are, as it told them; None before it told any, and in states of before that was stored."""
    printed_step: int | None = None  # the newest that its output told, where the job file has a pattern for that
    begun_anew: bool = False
    """Whether its script did not go on from the checkpoint that was put back, as its first save shows."""
    outdated: bool = False  # whether the next one runs other code, or otherwise: its total counts until its end alone
    script: str = ""  # what it runs, and how (`script_of`); empty in states of before that was stored
    unsaved: str | None = None  # why its last steps are not saved, of a script that came to its end

    @property
    def ends_for_good(self) -> bool:
        """Whether it was ordered to end and the job ends with it, whatever its ranks still do."""
        return self.ending_reason is not None and not self.ending_reason.retried


class InterruptionKind(str, Enum):
    """How a node was interrupted."""

    NOTICE = "notice"
    LOST = "lost"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One node that was interrupted."""

    node_id: str
    kind: InterruptionKind
    attempt: int | None
    """The attempt that it had a part in; None for one that stood beside, or between two attempts."""
    noticed_at: datetime
    stopped_at: datetime | None = None
    """When training stopped for it: it may be noticed long after. Of a notice it is None until training goes on."""
    resumed_at: datetime | None = None
    """When the attempt after its own made its first step; None of a script that tells no steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A node that the gate refused, or that became unhealthy: why, since when. It is never used again for this job."""

    node_id: str
    why: str
    at: datetime
    may_pass: bool = False
    """Whether the reason may pass, as what others do there now: its host may be taken again, as a new node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageInterval:
    """A node that the job has paid for, from its launch to its end; `charged` once its charge is in the ledger."""

    node_id: str
    pool: Pool
    launched_at: datetime
    ended_at: datetime | None = None
    end_cause: EndCause | None = None
    charged: bool = False
    let_go_until: datetime | None = None  # it counts as running until then: nobody could see it, or end it
    missing_at: datetime | None = None  # since when the cloud lists it no longer, though no end of it is known
    silent_at: datetime | None = None
    """Since when it does not answer, or its agent tells nothing that can be read; None while it does."""
    last_word_at: datetime | None = None
    """When its agent last told something new, to whoever supervised then; None before it ever did."""
    prepared: bool = False  # whether it was ever ready for attempts
    unprepared_at: datetime | None = None
    """Since when it could not be prepared, None once it was, and its agent has read what is wanted of it."""
    given_up: str | None = None  # why it was ended and replaced while the job went on

    @property
    def is_let_go(self) -> bool:
        """Whether it may live, and cost, where nobody sees it or ends it: until its paid time is over."""
        return self.ended_at is None and self.let_go_until is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedBootstrap:
    """A machine that could not be prepared, from the first try to the end of the last; `silent`: it did not answer."""

    node_id: str
    begun_at: datetime
    over_at: datetime
    silent: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """A pool that is excluded until `until`: it refused, `tries` times by now, first at `first_at`."""

    pool: Pool
    first_at: datetime
    until: datetime
    tries: int
    fault: Fault
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The pool whose machines are asked for beside those that work, to take over from them; since when."""

    pool: Pool
    cap_usd_per_hour: Decimal
    at: datetime


class Shortfall(str, Enum):
    """What there is too little of to keep the deadline."""

    TIME = "time"
    MONEY = "money"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityDecision:
    """What a job with a deadline is to run on (the policy's word for it), since when, and why, in one line.

    `shortfall` is why the deadline will be missed, None where it can be kept, and `warning` says so. `at` is the time
    that the sums in its words are of: later than `since` where it turned out while the job ran on the same.
    """

    mode: str
    since: datetime
    why: str
    shortfall: Shortfall | None = None
    warning: str | None = None
    at: datetime | None = None
    deadline_at: datetime | None = None  # the deadline that it was made for; None in older states

    @property
    def decided_at(self) -> datetime:
        """Of when its sums are."""
        return self.at or self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """The newest committed checkpoint: its step, or which save it is, its manifest's SHA-256, and what it was for."""

    step: int
    sha256: str
    counts: Counts = Counts.STEPS
    why: Why = Why.DUE
    saved_at: datetime | None = None  # when it was committed, by its store's clock; None in older states

    def __str__(self) -> str:
        """As people are told of it: by its number."""
        return self.counts.named(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What happened to a job, all that must outlive its supervisor. Written whole, by compare-and-swap only.

    What is wanted of it stands in its `Order`; `order_number` is that of the newest one that was acted on. An ended
    job still has machines until it is `torn_down`, unless its order wants them kept. `images` pins the machine image
    of each region; `pool_at` is when the job turned to its pool, `efa` the layouts of EFA interfaces that its group
    is made for; `gpu` is the model that the job pays for, if it pays for one; `forgiven` is how many of the
    `quarantined` there were when the user had the job go on. `drives_itself`: its machines were told to. `drilled` is
    the attempt that a drill took a machine of, `drill_refused` why the cloud took none, `left_usd_per_hour` the
    highest price of machines that may still live in pools that the job has left; `capacity_decision` is None without
    a deadline to keep. `tags` are those of the job file that it began with. `enough_at` is since when a job on a
    range of nodes has had enough for its next attempt, and not all.
    """

    job: str
    pool: Pool
    cap_usd_per_hour: Decimal
    version: int = VERSION
    order_number: int = 0
    lease_s: float = 15.0
    epoch: int = 0
    seq: int = 0
    nonce: str = ""
    owner: Owner | None = None
    status: JobStatus = JobStatus.WAITING
    exit_reason: ExitReason | None = None
    exit_code: int | None = None
    message: str | None = None
    pool_at: datetime | None = None
    efa: tuple[EfaLayout, ...] = (EfaLayout(),)
    cooldowns: tuple[Cooldown, ...] = ()
    group: str | None = None
    failed_bootstraps: tuple[FailedBootstrap, ...] = ()  # what could not be prepared since a new machine last could
    looked_at: datetime | None = None  # when somebody last looked at the job's machines
    short_at: datetime | None = None  # since when the group has had some machines, and fewer than are needed
    bare_at: datetime | None = None  # since when the group has been to have machines, and has had none
    images: tuple[tuple[str, str], ...] = ()
    paid_until: datetime | None = None
    attempts: tuple[Attempt, ...] = ()
    interruptions: tuple[Interruption, ...] = ()
    nodes: tuple[UsageInterval, ...] = ()
    gpu: str | None = None
    quarantined: tuple[Quarantine, ...] = ()
    forgiven: int = 0
    checkpoint: CheckpointRef | None = None
    reopened_after: int = 0
    drilled: int | None = None
    drill_refused: str | None = None
    torn_down: bool = False
    drives_itself: bool = False
    ended_at: datetime | None = None
    tags: tuple[tuple[str, str], ...] = ()
    successor: Successor | None = None
    left_usd_per_hour: Decimal = Decimal(0)
    capacity_decision: CapacityDecision | None = None
    enough_at: datetime | None = None
    had_budget_left: bool = False
    """Whether a job that ended at its budget had enough for another start: its machines' time was not prolonged."""
    began_at: datetime | None = None  # when the newest start to train was ordered of those that found it not at it
    budget_mark: int = 0  # how many percent are spent that are told (`happened.MARKS`), and of which budget
    budget_mark_of: Decimal | None = None
    pending_events: tuple[Event, ...] = ()  # told by this state or one before, and perhaps not put yet

    @property
    def dearest_usd_per_hour(self) -> Decimal:
        """The price that none of the job's machines can pass, those to come and those that leave included."""
        coming = self.successor.cap_usd_per_hour if self.successor is not None else Decimal(0)
        return max(self.cap_usd_per_hour, self.left_usd_per_hour, coming)

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that has not ended, if any."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].reason is None else None

    @property
    def script_failed(self) -> bool:
        """Whether the job ended because its script or its setup is at fault."""
        return self.exit_reason is not None and self.exit_reason.by_script

    @property
    def failed_at(self) -> datetime | None:
        """When the job ended because its script or its setup is at fault; None for any other end."""
        return self.ended_at if self.script_failed else None

    @property
    def setup_failed(self) -> bool:
        """Whether the job ended by its setup's own error: nothing has run since it was begun, or begun again."""
        return self.exit_reason is ExitReason.USER_ERROR and len(self.attempts) <= self.reopened_after

    @property
    def missing_outputs(self) -> tuple[MissingOutput, ...]:
        """What did not come home of the outputs of the last attempt, and of those before what is lost for good."""
        return tuple(o for a in self.attempts for o in a.missing_outputs if o.attempt or a is self.attempts[-1])

    @property
    def alive(self) -> tuple[UsageInterval, ...]:
        """The machines of which no end is known, and that were not let go."""
        return tuple(one for one in self.nodes if one.ended_at is None and not one.is_let_go)
