"""What a decision is made from: the goal, the rules, and everything that was seen at one tick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum

from gpucloud.domain.checkpoint.protection import Saving, saves_nothing
from gpucloud.domain.job.code import is_name
from gpucloud.domain.job.spec import CheckpointPolicy, Cloud, IdlePolicy, Market, OnNotice, Policy
from gpucloud.domain.market.learned import Tables
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.node import GroupView, Node, PeerReport
from gpucloud.domain.node.status import Status
from gpucloud.domain.node.use import GpuUse
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.state.order import BudgetChange, Order, Until
from gpucloud.domain.state.state import Attempt, CapacityDecision, CheckpointRef, ExitReason, JobState, MissingOutput

_SSH_PORT = 22


class Homecoming(str, Enum):
    """How far the outputs of an attempt that is over are on their way home."""

    NO = "no"
    ON_THE_WAY = "on the way"
    FAILED = "failed"  # it is tried again in a moment
    DONE = "done"  # or there are none, or none any more


def waits(attempt: Attempt) -> bool:
    """Whether its outputs lie where it has run, for a later attempt to bring them with its own."""
    is_settled = attempt.missing_outputs or attempt.outputs_came
    return attempt.reason is not None and attempt.reason.retried and not is_settled


def is_awaited(attempt: Attempt, pool: Pool) -> bool:
    """Whether outputs of the job's last attempt are worth a try when it has ended: nobody has brought them.

    Of one that others would have followed. Of one that ended the job it was tried; a host of the user's own is there
    after that, too, and may answer by now.
    """
    if attempt.reason is None or attempt.outputs_came:
        return False
    return attempt.reason.retried or (pool.market is Market.OWNED and are_left(attempt))


def left_on_hosts(state: JobState) -> tuple[tuple[str, str], ...]:
    """Return where results that did not come home lie on the user's own hosts: nodes, each with a path there."""
    return tuple((one.members[0].node_id, f"code/{one.tree}") for one in _with_left(state))


def outputs_on_hosts(state: JobState) -> tuple[MissingOutput, ...]:
    """Return which results those are, each with where it lies: nothing else says so once the job is deleted."""
    missing = ((attempt.number, one) for attempt in _with_left(state) for one in attempt.missing_outputs)
    return tuple(one for number, one in missing if one.attempt == number)


def _with_left(state: JobState) -> tuple[Attempt, ...]:
    left = (one for one in state.attempts if are_left(one) and not one.outputs_came and is_name(one.tree))
    return tuple(left) if state.pool.market is Market.OWNED else ()


def are_left(attempt: Attempt) -> bool:
    """Whether outputs of it did not come home."""
    return any(one.attempt == attempt.number for one in attempt.missing_outputs)


def missing_outputs(state: JobState, *, supervised: bool) -> tuple[MissingOutput, ...]:
    """Return what did not come home; what whoever supervises is fetching is on its way, and not lost so far."""
    coming = {one.number: one.members[0].node_id for one in state.attempts if supervised and one.outputs_coming}

    def told(one: MissingOutput) -> MissingOutput:
        if one.attempt not in coming:
            return one
        return replace(one, why=f"of attempt {one.attempt} is being brought from {coming[one.attempt]}")

    return tuple(map(told, state.missing_outputs))


def where_they_lie(node: Node, tree: str) -> str | None:
    """Return where what was written on that tree stays, whatever becomes of the job; None where the machine goes."""
    if node.pool.market is not Market.OWNED or not is_name(tree):
        return None
    port = f":{node.port}" if node.port != _SSH_PORT else ""
    return f"{node.user}@{node.address}{port}, in ~/{node.root}/code/{tree}"


def place_of(node_id: str, known: Callable[[str], Node | None]) -> str:
    """Return what nodes on one disk have in common."""
    node = known(node_id)
    return node.place if node is not None else node_id


def asked_of(attempts: Sequence[Attempt], outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return which outputs the last attempt's script was to make; `outputs` are those of the job's order of now.

    Those of the job file that it was started under, and where the script is the same one, those of now too.
    """
    last = attempts[-1] if attempts else None
    if last is None or not last.outputs:
        return outputs
    return last.outputs if last.outdated else tuple(dict.fromkeys((*last.outputs, *outputs)))


class Readiness(str, Enum):
    """How far a node's bootstrap is."""

    NO = "no"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is wanted of the job at this pass: its order, to whoever supervises it (`goal_of`).

    `number` is the order's, `budget_usd` what the job may cost in all, `budget_changes` how that came about, `end` why
    the user wants the job to end. `first_at` is when the run's first order was given, `began_at` when this supervisor
    began. `self_driving`: it runs on a machine of the job, which may buy no time. `within_rights`: its cloud lets that
    machine neither move the shut-off nor give a machine up before it is interrupted. `give_up` is how many times its
    undisturbed cost a newly saved step may cost, None for whatever it costs. `saves_alone`: its script keeps a
    directory of checkpoints, and its ranks agree with nobody on a step to save; `saves_unasked`: nor do they hear that
    they should. `policy` is how the deadline is kept, None where there is none to keep or nothing to choose from;
    `tables` are the learned policy's, `work` is the job file's. `least_nodes`: the fewest it trains on (0: all).
    """

    nodes: int
    budget_usd: Decimal
    number: int = 0
    budget_changes: tuple[BudgetChange, ...] = ()
    end: ExitReason | None = None
    least_nodes: int = 0
    until: Until = Until.FINISHED
    keep: bool = False
    hold: timedelta | None = None
    drill: bool = False
    drills_spot: bool = False
    """Whether its cloud takes no machine for a drill but spot machines."""
    first_at: datetime | None = None
    deadline_at: datetime | None = None
    idle: IdlePolicy | None = None
    began_at: datetime | None = None
    self_driving: bool = False
    within_rights: bool = False
    give_up: float | None = CheckpointPolicy().give_up
    saves_alone: bool = False
    saves_unasked: bool = False
    uses_library: bool = False
    """Whether its script imports gpucloud.resume, as far as its code tells."""
    has_outputs: bool = False
    saves_nothing: bool = False
    """Whether its script saves nothing, as its job file says, or as far as its code tells."""
    policy: Policy | None = None
    tables: Tables | None = None
    work: timedelta | None = None

    @property
    def is_range(self) -> bool:
        """Whether an attempt may have fewer machines than are asked for."""
        return 0 < self.least_nodes < self.nodes

    def fewest(self, market: Market) -> int:
        """Return the fewest machines that an attempt in that market has: where a deadline is kept on demand, all."""
        whole = self.policy is not None and market is Market.ON_DEMAND
        return self.least_nodes if self.is_range and not whole else self.nodes

    @property
    def buys_time(self) -> bool:
        """Whether it prolongs paid time, and so may wait for cheaper machines: not one that wants machines now, nor a
        machine of the job.
        """
        return self.until is Until.FINISHED and not self.self_driving


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long to wait for what, before believing the worst.

    `gang`: for the rest of the machines, while some are there already. `bare`: for a first machine of a pool that gives
    none and does not say why; such a pool is one that refuses. `patience`: for any machine, where all pools refuse.
    `boot`: for a machine's host key. `quarantines`: bad nodes in a row, after which it is the pool that is bad;
    `bad_pools`: bad pools in a row, after which it is none of the machines. `alone`: for a silent machine of which
    nobody can tell, because there is no other that answers, or it cannot say, and for one whose agent tells nothing
    though it was prepared again. `hang_at_least`, `hang_steps`: without a step, `hang_steps` in median steps; doubled
    with every hang in a row. `stacks`: for ranks to tell where they are. `soon`: an attempt that ends so soon and saved
    nothing new is followed by a pause, `pause` at first, doubled each time up to `pause_longest`. `backoff_attempts`,
    `backoff_paid`: attempts and machine time from which on the cost of a newly saved step is judged. `start`: for a
    script's first step after `resume.init`; doubled as a hang's is, twice. `changeover`: from a launch to the first new
    step, until the job's own starts say. `insist`: as `cooldown`, for machines on demand that a deadline needs.
    """

    silent: timedelta = timedelta(seconds=3)
    settle: timedelta = timedelta(seconds=1)
    save: timedelta = timedelta(seconds=60)
    upload: timedelta = timedelta(0)
    """After `save`, for what a script left in its directory to reach the store; others upload as they save."""
    hang_at_least: timedelta = timedelta(seconds=60)
    hang_steps: float = 5.0
    hang_printed: timedelta = timedelta(minutes=10)
    """As `hang_at_least`, where steps are read from what the script prints."""
    fruitless_attempts: int = 5
    bootstrap_tries: int = 2
    boot: timedelta = timedelta(minutes=10)
    drill_at: float = 0.4
    drill_blind: timedelta = timedelta(seconds=30)
    """After how long a script that tells no step is drilled all the same."""
    drill_patience: timedelta = timedelta(minutes=10)
    """As `drill_blind`, where its code shows that it will tell them."""
    gang: timedelta = timedelta(seconds=120)
    bare: timedelta = timedelta(minutes=10)
    ask_again: timedelta = timedelta(seconds=10)
    cooldown: timedelta = timedelta(minutes=5)
    cooldown_longest: timedelta = timedelta(minutes=30)
    patience: timedelta = timedelta(hours=1)
    quarantines: int = 3
    bad_pools: int = 2
    alone: timedelta = timedelta(minutes=10)
    stacks: timedelta = timedelta(seconds=10)
    soon: timedelta = timedelta(minutes=2)
    pause: timedelta = timedelta(seconds=5)
    pause_longest: timedelta = timedelta(minutes=5)
    backoff_attempts: int = 5
    backoff_paid: timedelta = timedelta(minutes=10)
    start: timedelta = timedelta(minutes=30)
    changeover: timedelta = timedelta(minutes=12)
    insist: timedelta = timedelta(minutes=1)
    results: timedelta = timedelta(minutes=2)  # for outputs, of paid time that nobody prolongs, or paid twice
    homing: timedelta = timedelta(minutes=10)
    """For outputs that cannot be brought anywhere: so long their machines' time is renewed for it."""
    in_use: timedelta = timedelta(minutes=2)
    """For a GPU that others use to be free, before an attempt: looked at every `ask_again`. Then another is taken."""
    granted: timedelta = timedelta(minutes=2)
    """For a right that was given to be there: the cloud tells its parts of it one after the other."""
    controller: timedelta = timedelta(minutes=20)
    """For a machine to show that it can drive its job: it boots, and makes itself fit for that, before it can try."""

    @property
    def leave(self) -> timedelta:
        """For an attempt to end by itself once it was asked to; then it is killed."""
        return self.save + self.upload

    @property
    def overdue(self) -> timedelta:
        """For an end that was ordered to be obeyed: what did not hear of it by then, the cloud has to end."""
        return 2 * self.leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The lengths that decisions use."""

    prepaid_rule: PrepaidRule = field(default_factory=PrepaidRule)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveTrial:
    """What came of a machine's try to do what driving the job needs, under the order of that number.

    `refused` is why it may not, None where it may. Its job's code could write the same: nobody but the job itself would
    be harmed by that.
    """

    number: int
    refused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node as the cloud lists it and as it answers.

    `silent_for` is zero when it answered at this tick; `mute_for` is for how long it has answered and its agent told
    nothing new that can be read, zero while that may be chance. `told` is whether its agent has read what we want of
    it, or that is on its way, and `heard` whether it said so; `refused` is why the gate refused it. `trial` is whether
    it can drive the job, as far as it has tried; looked at only while somebody is to leave the job to its machines.
    """

    node: Node
    readiness: Readiness = Readiness.NO
    error: str | None = None
    status: Status | None = None
    silent_for: timedelta = timedelta(0)
    mute_for: timedelta = timedelta(0)
    last_word_at: datetime | None = None
    """When its agent last told this supervisor something new; None before it did: what others heard is in the state."""
    told: bool = False
    heard: bool = False
    refused: str | None = None
    setup_failed: str | None = None
    """What of the job's setup failed there twice, in one line."""
    peer_report: PeerReport = PeerReport.NOTHING
    """What a second witness says of it while it is silent."""
    reporter: str = ""
    """Who that is, as a message names it."""
    trial: DriveTrial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """A node whose GPUs others use: who, and at which look that was found first."""

    node_id: str
    why: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The look at nodes before attempt `number`: over or not, and who is to take no part, `(node id, why)` each."""

    number: int
    node_ids: tuple[str, ...]
    done: bool
    bad: tuple[tuple[str, str], ...] = ()
    in_use: tuple[InUse, ...] = ()
    """Those whose GPUs others use, which may end: they are looked at again."""
    over_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChoice:
    """What the job is to run on now, where its machines are to come from (None while waiting), and why.

    In `Mode.BOTH` the offer is that of the spot machines, which boot beside those on demand.
    `spare` is what time a change of what works would leave over; None where the deadline has no say in it.
    """

    mode: Mode
    offer: Offer | None
    capacity_decision: CapacityDecision
    spare: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a decision needs, the time included.

    `payable_until` is what the budget can promise now for the goal's nodes, or those alive if they are more
    (money.budget.paid_until); None: not worth a start. `payable_with_another` is the same with one more machine.
    `wanted_end` is why the user, from this terminal or another, wants the job to end. `failed_for` is how long ago the
    first member of the attempt was seen to have failed, `uneven_for` how long some have been over and were not done
    while others work, `short_for` how long the group has had some machines, but fewer than an attempt needs;
    `enough_at` is since when it has had enough for one, and not all that it may have. `candidates` are the offers that
    the job takes and the budget can start, best first; looked up only when the job's pool is cooling down, or a
    deadline is to be kept. `capacity_choice` is what the job is to run on then; `payable_with_successor` is as
    `payable_with_another`, with the machines beside that are to take over, None too where none are. `use` is how well
    the attempt uses its GPUs over the window of `Goal.idle`, None without that policy or without GPUs. `inspects`: the
    job's nodes have GPUs and are looked at before every attempt; `inspection` is the last look. `spent_usd` is what the
    job has cost up to now. `lasts_until` is as `payable_until`, for machines that run: also where it is too short for a
    start.
    """

    now: datetime
    state: JobState
    group: GroupView
    nodes: tuple[NodeSnapshot, ...] = ()
    payable_until: datetime | None = None
    payable_with_another: datetime | None = None
    wanted_end: ExitReason | None = None
    checkpoint: CheckpointRef | None = None
    failed_for: timedelta | None = None
    uneven_for: timedelta | None = None
    failed_bootstraps: int = 0
    candidates: tuple[Offer, ...] = ()
    short_for: timedelta | None = None
    inspects: bool = False
    inspection: Inspection | None = None
    use: GpuUse | None = None
    spent_usd: Decimal = Decimal(0)
    unproven_usd: Decimal = Decimal(0)
    """What of `spent_usd` nobody can show to have been paid, or not."""
    lasts_until: datetime | None = None
    capacity_choice: CapacityChoice | None = None
    payable_with_successor: datetime | None = None
    enough_at: datetime | None = None
    homecoming: Homecoming = Homecoming.DONE
    outputs_still_at: datetime | None = None
    """Since when nothing of the outputs has come, None where nobody brings them now."""

    @property
    def saved(self) -> CheckpointRef | None:
        """The newest checkpoint: what this look has found, else what the state knows."""
        return self.checkpoint or self.state.checkpoint


# What a job's order means to whoever supervises it; the only place where a `Goal` is made.


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervising:
    """Who supervises a job.

    `node` is the machine of the job that does, empty for a process outside. `leaves`: a process outside that stays only
    until the machines drive the job; `began_at` is when it began, by the store's clock. `saving` is how the
    job's script saves, as far as it knows.
    """

    node: str = ""
    leaves: bool = False
    began_at: datetime | None = None
    saving: Saving = Saving.UNKNOWN


OUTSIDE = Supervising()
"""A process outside that stays for as long as there is something to do."""


def goal_of(order: Order, who: Supervising) -> Goal:
    """Return what the order means to that supervisor.

    Machines may end each other and buy none, so that no policy is theirs; on AWS a drill is another role's.
    """
    job, on_machine = order.resolved, bool(who.node)
    aws, kept = job.cloud is Cloud.AWS, job.checkpoint.directory
    return Goal(
        nodes=job.resources.nodes,
        budget_usd=order.budget_usd,
        number=order.number,
        budget_changes=order.budget_changes,
        end=order.end,
        least_nodes=job.resources.least_nodes,
        until=Until.LAUNCHED if who.leaves else order.until,
        keep=order.keep,
        hold=order.hold if order.unattended is None and not on_machine else None,
        drill=order.drill and not (on_machine and aws),
        drills_spot=aws,
        first_at=order.first_at,
        deadline_at=order.deadline_at,
        idle=job.idle,
        began_at=who.began_at,
        self_driving=on_machine,
        within_rights=on_machine and aws,
        give_up=job.checkpoint.give_up,
        saves_alone=kept is not None,
        has_outputs=bool(job.outputs),
        uses_library=who.saving is Saving.RESUME,
        saves_nothing=saves_nothing(job, who.saving),
        saves_unasked=kept is not None and kept.on_notice is OnNotice.NONE,
        policy=None if on_machine else job.deadline_policy,
        work=None if on_machine else job.work,
    )
