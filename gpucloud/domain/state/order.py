"""What the user wants of a job: one numbered order; and who may say it, by whose signature it bears.

`control/order.json` holds it, signed. Whoever supervises the job reads it at every pass and goes by the newest; what
happened stands in `JobState`, which says the number of the order that was acted on last.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum

from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.job.spec import Cloud, Job, Market
from gpucloud.domain.node.node import fleet_of
from gpucloud.domain.state.state import ExitReason, JobState, JobStatus

VERSION = 1

# Ends that a new run follows, on the machines of the ended one where these are held; after any other end the same job
# goes on from its checkpoint.
CLOSED = tuple(reason.exit_code for reason in ExitReason if reason is ExitReason.SUCCEEDED or reason.by_script)


class Until(str, Enum):
    """How far a job is to go.

    LAUNCHED is in no order: it is how far a process stays that leaves the job to its machines.
    """

    LAUNCHED = "launched"  # machines there that need nobody outside
    READY = "ready"  # machines up and prepared
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """Another budget that was ordered: by which order and whom, when, from what to what."""

    number: int
    by: str
    at: datetime
    old_usd: Decimal
    new_usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that the user wants of one run of a job; every field of it stands here and nowhere else."""

    version: int = VERSION
    number: int
    """Rises by one with every order for the run."""
    store: str
    """The URL of the store that it is for: an order that was copied elsewhere counts for nothing."""
    job: str
    """The run's name."""
    base: str
    """The name in the job file, of which this is run `run`."""
    run: int
    by: str
    """User and host that gave it."""
    at: datetime
    """When, by the store's clock."""
    first_at: datetime
    """When the run's first order was given: its deadline counts from then."""
    host: str
    """Which gpucloud home gave it: paths in `resolved` mean something there alone."""
    resolved: Job
    """The job as its file said when it was started last, with what the command line added."""
    spec_sha256: str
    """Of the job file; empty in an order that stands in for one that nobody could read."""
    file_budget_usd: Decimal
    """The budget that the job file named at the last start."""
    budget_usd: Decimal
    code_sha256: str = ""
    """The tree that attempts run, in `control/code`; empty where it is too large to be kept there."""
    until: Until = Until.FINISHED
    end: ExitReason | None = None
    """Why the user wants the job to end; None while it is to go on."""
    keep: bool = False
    drill: bool = False
    hold: timedelta | None = None
    """For how long the machines stay up for a mended script when it fails by its own error; None for not at all."""
    unattended: timedelta | None = None
    """For how long the job's own machines drive it; None where a supervisor outside does."""
    deadline_at: datetime | None = None
    budget_changes: tuple[BudgetChange, ...] = ()

    @property
    def is_stand_in(self) -> bool:
        """Whether it was given in place of one that nobody could read: it knows of the job what its end takes alone."""
        return not self.spec_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An order as it is stored: its JSON as one string, whose UTF-8 bytes are signed, and by which key.

    Key and signature are empty where nobody signs. An end by somebody whose word does not count keeps the key of the
    order before, without a signature: it proves nothing, and tells whose run it was.
    """

    order: str
    key: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The very bytes that the signature is of."""
        return self.order.encode()

    @property
    def signature_bytes(self) -> bytes:
        """The signature; empty for what is none."""
        try:
            return base64.b64decode(self.signature, validate=True)
        except (ValueError, binascii.Error):
            return b""


def sealed(order: Order, key: str = "", signature: bytes = b"") -> Envelope:
    """Return the envelope of the order; `signature` is of the bytes that `sealed(order).signed` gives."""
    return Envelope(order=to_json(order), key=key, signature=base64.b64encode(signature).decode())


def opened(envelope: Envelope) -> Order:
    """Return the order in the envelope, whoever signed it. Raises Malformed."""
    return from_json(Order, envelope.order)


def followed(order: Order, by: str, at: datetime) -> Order:
    """Return the order as the next one, given by somebody now."""
    return replace(order, number=order.number + 1, by=by, at=at)


def with_budget(order: Order, usd: Decimal) -> Order:
    """Return the order with another budget, and who changed it; the same one for the same budget."""
    if usd == order.budget_usd:
        return order
    change = BudgetChange(number=order.number, by=order.by, at=order.at, old_usd=order.budget_usd, new_usd=usd)
    return replace(order, budget_usd=usd, budget_changes=(*order.budget_changes, change))


def run_of(base: str, name: str) -> int | None:
    """Return which run of the job `base` one of that name would be: 1, then 2 for `base-2`, …; None for none of it."""
    if name == base:
        return 1
    number = re.fullmatch(re.escape(base) + r"-(\d{1,9})", name, re.ASCII)
    return int(number[1]) if number is not None else None


def is_of_another_file(order: Order, job: Job, spec_sha256: str, *, is_there: bool, is_strangers: bool = False) -> bool:
    """Whether another job file than the job's began the run; `is_there`: that one is here, beside the job's own.

    Paths mean something on one machine alone, and a file that is gone was moved: then what it said tells. A stranger's
    may be a clone of the same, at the same path.
    """
    if is_strangers or order.resolved.source == job.source:
        return is_strangers
    return is_there or (order.spec_sha256 != spec_sha256 and order.resolved.run != job.run)


def undrillable(job: Job, *, drives_itself: bool, has_role: bool = False) -> str | None:
    """Return why none of the job's machines can be taken for a drill; None if one can, and may come.

    `has_role`: the role for it stands where the job goes, as an earlier job has had it made.
    """
    if job.cloud is not Cloud.AWS:
        return None
    if not job.resources.market.allows(Market.SPOT):
        return f"{_SPOT_ALONE}, and `market: {job.resources.market.value}` has none"
    own = "subnets" if job.aws.subnets else "instance_profile" if job.aws.instance_profile and not has_role else None
    if own is not None:
        return f"AWS takes a machine by a role that gpucloud makes, and beside `aws: {{{own}: …}}` it makes none"
    return "on AWS, machines that drive their job have no right to take one" if drives_itself else None


_SPOT_ALONE = "AWS takes spot machines alone"


def undrilled(order: Order, state: JobState) -> str | None:
    """Return why the drill of a job that has succeeded did not take place; None where it did, or none was wanted."""
    went_on = state.drilled is not None and any(attempt.number > state.drilled for attempt in state.attempts)
    if not order.drill or state.exit_reason is not ExitReason.SUCCEEDED or went_on:
        return None
    if state.drilled is not None:
        return f"{UNDRILLED}: the script came to its end as a machine was being taken, and no attempt went on after it"
    drives_itself, aws = order.unattended is not None, order.resolved.cloud is Cloud.AWS
    # For want of a role AWS itself refuses it, once it is asked.
    why = state.drill_refused or undrillable(order.resolved, drives_itself=drives_itself, has_role=True)
    if why is None and aws and not any(interval.pool.market is Market.SPOT for interval in state.nodes):
        why = f"{_SPOT_ALONE}, and the job had none"
    return f"{UNDRILLED}: {why or _ended_too_soon(state)}"


UNDRILLED = "the drill did not take place"


def _ended_too_soon(state: JobState) -> str:
    told = any(attempt.first_step is not None for attempt in state.attempts)
    return "the script came to its end too soon" if told else "the script was over before it told a step"


def without_drill_done(order: Order, state: JobState) -> Order:
    """Return the order to give again by who goes on under it: a drill that took place is wanted no second time."""
    return replace(order, drill=order.drill and state.drilled is None)


def is_same_request(one: Order, other: Order) -> bool:
    """Whether both want the same, whoever gave them when."""
    return replace(one, number=other.number, by=other.by, at=other.at, host=other.host) == other


def keeps(order: Order, state: JobState) -> bool:
    """Whether the machines of a job that succeeded are to stay up until their paid time is over."""
    return order.keep and order.end is None and state.exit_reason is ExitReason.SUCCEEDED


def to_wind_up(order: Order, before: Order, ran: Order) -> Order:
    """Return the order of a start that tears down first what is left of a run: what it asks is of the run after that.

    What goes on is compared with what `ran`.
    """
    asked_before = replace(order, hold=None, keep=False, drill=before.drill, file_budget_usd=before.file_budget_usd)
    return replace(asked_before, resolved=ran.resolved, spec_sha256=ran.spec_sha256)


def held_until(order: Order, state: JobState) -> datetime | None:
    """Return until when machines of a job whose script or setup failed stay up for a mended one; None for not at all.

    Machines that drive their job end with it: nobody is there who mends it.
    """
    if order.hold is None or order.end is not None or order.unattended is not None:
        return None
    return state.failed_at + order.hold if state.failed_at is not None else None


def is_finished(state: JobState) -> bool:
    """Whether the run lacks its teardown at the most. One whose script or setup failed goes on after it, mended."""
    return state.exit_code in CLOSED and not (state.script_failed and state.torn_down)


def is_to_end(state: JobState, end: ExitReason | None) -> bool:
    """Whether a job is to end, and has not ended yet: by `end` of its newest order, or as its attempt was told."""
    wanted = end is not None or (state.attempt is not None and state.attempt.ends_for_good)
    return wanted and not (state.status.ended and state.torn_down)


def is_closed(order: Order, state: JobState) -> bool:
    """Whether the next `train` starts a new run at once, instead of going on with this one or tearing it down first."""
    return is_finished(state) and (state.torn_down or keeps(order, state))


def begins_anew(
    order: Order, state: JobState, *, again: bool, deadline: timedelta | None = None, now: datetime | None = None
) -> bool:
    """Whether a start begins a new run after this one: asked to, also where this one could go on.

    `deadline` is the job file's now. That is after a script that failed, which may have saved nonsense, and past a
    deadline, which is no later for trying again. What was stopped, or ran out of money or machines, goes on before it:
    CI asks for `--again` at every start.
    """
    late = deadline is not None and now is not None and now >= order.first_at + deadline
    over = state.script_failed or state.exit_reason is ExitReason.DEADLINE or late
    return is_closed(order, state) or (again and state.torn_down and over)


class Onward(Enum):
    """How a run goes on that there is already, where that deserves a word."""

    HELD = "held"  # its script failed, and machines were held for the mended one
    MENDED = "mended"  # its script failed, and nothing is left of it but its state
    RAN = "ran"  # it has succeeded with what a start would run now, and lacks its teardown alone
    UNASKED = "unasked"  # a new run was asked for, and is none that can begin after this one


def onward_of(state: JobState, *, reopens: bool, again: bool) -> Onward | None:
    """Return how a start goes on with the run; `reopens`: on machines that were held for a mended script."""
    if reopens:
        return Onward.HELD
    if state.script_failed and state.torn_down:
        return Onward.MENDED
    return Onward.UNASKED if again and state.attempts and not is_finished(state) else None


def repeats_at_a_cost(job: Job, before: JobState | None) -> bool:
    """Whether a new run would pay again for what has succeeded: somebody is to say that it is meant so."""
    return before is not None and before.status is JobStatus.SUCCEEDED and job.cloud is Cloud.AWS and not job.trial


# What may be done here with a job that is known from a store, by who signed what is wanted of it.
#
# Whoever can write to a store, the job's own machines among them, can put anything there. So nothing is started by what
# lies in a store unless somebody whom the reader trusts signed it; what nobody signed can be shown and ended.


OWN = "own"
"""How the user's own key is called in lists; nobody else's may be."""
_CLOCKS_DIFFER = timedelta(minutes=5)  # orders are given by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something is not done, and what would change that."""

    why: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OrderMark:
    """The newest order of a run that was seen here: when the run's first one was given, and its number."""

    first_at: datetime
    number: int


def mark_of(order: Order) -> OrderMark:
    """Return the order's own mark."""
    return OrderMark(first_at=order.first_at, number=order.number)


def is_ahead(order: Order, now: datetime) -> bool:
    """Return whether an order says that it was given in the future: every later one would count as put back."""
    return max(order.first_at, order.at) > now + _CLOCKS_DIFFER


def refuse_order(
    order: Order, *, signed_by: str | None, seen: OrderMark | None, key: str = "", ahead: bool = False
) -> Refusal | None:
    """Return why an order of a store is not acted on here, None if it may be; to end a job needs nobody's word.

    `key` is the fingerprint of the key that signed it, as its envelope says. `ahead`: it says that it was given in the
    future, and the own key did not sign it.
    """
    if order.end is not None:
        return None
    if signed_by is None:
        return Refusal(
            why=f"order {order.number} for {order.job}, by {order.by[:80]!r} as it says, is signed by nobody you trust"
            f" ({_named(key)})",
            hint="gpucloud keys add NAME KEY trusts a key; `gpucloud train FILE --adopt` gives an order of your own",
        )
    if signed_by != OWN and (what := unusable(order)) is not None:
        return Refusal(why=f"order {order.number} for {order.job}: {what}", hint="`gpucloud train FILE` gives your own")
    if ahead:
        return Refusal(
            why=f"order {order.number} for {order.job}, signed by {signed_by}, says that it was given in the future",
            hint="is that machine's clock right? `gpucloud train FILE` gives an order of your own",
        )
    if seen is not None and mark_of(order) < seen:
        return Refusal(
            why=f"order {order.number} for {order.job} is older than order {seen.number}, which was here before:"
            " somebody put it back",
            hint="`gpucloud train FILE` gives a newer one",
        )
    return None


def _named(key: str) -> str:
    """Whoever wrote the envelope wrote this too: what is no fingerprint is not told."""
    return f"the key is {key}" if re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", key) else "by no key"


def end_alone(order: Order) -> Order:
    """Return what counts of an order to end a job that is unsigned or was put back: that it ends, for nothing.

    A budget would pay for machines until the end is through, and machines that were to be kept would stay.
    """
    nothing = Decimal(0)
    return replace(order, end=ExitReason.STOPPED, budget_usd=nothing, keep=False, drill=False, budget_changes=())


def unusable(order: Order) -> str | None:
    """Return what of an order no job file can say: a program here could take it for an option. None for a good one."""
    job, said = order.resolved, []
    for host in (host for cloud in Cloud for host in job.hosts_on(cloud)):
        said += [host.address, host.user, host.private_address, host.interface]
        hops = [hop.strip() for hop in host.jump.split(",")] if host.jump is not None else []
        said += [*hops, *(hop.rpartition("@")[2] for hop in hops)]
    for word in (*said, job.aws.user, job.aws.image, job.image):
        if word is not None and not re.fullmatch(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*", word):
            return f"{word!a:.80} is no name or address"
    trees = (order.code_sha256, job.own_code_sha256)
    wrong = next((tree for tree in trees if not re.fullmatch(r"([0-9a-f]{64})?", tree)), None)
    return f"{wrong!a:.80} is no tree of code" if wrong is not None else None


def refuse_elsewhere(order: Order, *, has_file: bool) -> Refusal | None:
    """Return why an order that was given elsewhere, or by another person, is not acted on here; None if it may be.

    What it names of the machine that gave it means something else here. `has_file`: the job file is here too, and what
    it names of this machine is its reader's own word.
    """
    job = order.resolved
    if job.cloud is Cloud.LOCAL:
        what = "runs on the embedded fleet of another machine"
    elif has_file:
        return None
    elif not order.code_sha256:
        what = "takes its code from a folder of another machine"
    elif job.cloud.traits.owned:
        what = "logs in to its hosts with keys of another machine"
    elif job.secrets:
        what = f"needs {', '.join(job.secrets)} of another machine's environment"
    elif any(not source.startswith("s3://") for source, _ in job.data):
        what = "takes its data from a folder of another machine"
    else:
        return None
    hint = "have its job file here, or go on where it was started; `gpucloud train FILE` gives an order of your own"
    return Refusal(why=f"{order.job} {what}", hint=hint)


def is_own_group(group: str | None, job: str) -> bool:
    """Return whether a group is the job's own: machines can write a job's state, and name another's group there."""
    return group is None or group.rpartition("/")[2] == f"gpucloud-{job}"


def ending_cloud(job: str, group: str | None, *, in_s3: bool, is_here: bool) -> Cloud | Refusal:
    """Return the cloud on which a job of a store that nobody signed may be ended from here, or why it is not.

    Its machines are told by the name of their group, which is the job's: no other group is touched on such a word.
    `is_here`: this machine's embedded fleet has that group.
    """
    region = (group or "").rpartition("/")[0] if fleet_of(group) is None else ""
    if not is_own_group(group, job):
        return Refusal(
            why=f"{job} names the group {group!r:.80}, which is not its own", hint="gpucloud gc lists strays"
        )
    if in_s3 and (group is None or region):
        return Cloud.AWS
    if not in_s3 and (group is None or is_here):
        return Cloud.LOCAL
    return Refusal(
        why=f"{job} runs on machines that only its owner reaches", hint=f"gpucloud down {job}, where it was started"
    )
