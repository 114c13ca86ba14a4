"""A job that drives itself: the order that its machines go by, which jobs can, and what is known of such machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import Cloud, Job, Market
from gpucloud.domain.money.ledger import ZERO, Charge, Terms, usd_for
from gpucloud.domain.offer import EfaLayout, Pool
from gpucloud.domain.state.order import Order, keeps
from gpucloud.domain.state.state import JobState, Successor, UsageInterval
from gpucloud.domain.supervision.snapshot import Limits, Rules

ORDER_VERSION = 3
_LONGEST_S = 3600.0  # between two passes or two writes: a supervisor outside has seconds

USUAL_TIME = timedelta(hours=8)
"""For how long a job drives itself where nobody says."""

TAKES_OVER = timedelta(minutes=1)
"""Within so long one of its machines has the job that nobody holds: a lease of 15 s is over, or given back, and drivers
look every few seconds, or half a minute after an error."""
_END_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveOrder:
    """All that a machine needs to supervise the job `name` as a supervisor outside would, within its own group.

    What is wanted of the job stands in its `Order`, which the machine reads too.

    It holds the cluster's private SSH key: the object is for its owner's eyes (mode 0600 in a folder), and for the
    machines of this one cluster, whose own code could read it there and open no other machine with it. `tree` is the
    job's code, `package` our zip, both keys below the store; `tree_name` is how the code's folder is called. `records`
    is the embedded cloud's folder, empty elsewhere. `on_demand` is what types of its machines cost on demand in its
    region, as it is known outside: machines may not ask, and of most regions have a bound alone.
    """

    version: int
    name: str
    cluster: str
    group: str
    job: Job
    store: str
    region: str | None
    tree: str
    tree_name: str
    package: str
    package_sha256: str
    rules: Rules
    terms: Terms
    period_s: float
    flush_s: float
    node_python: str
    power_off: tuple[str, ...] = ()
    records: str = ""
    on_demand: tuple[tuple[str, Decimal], ...] = ()
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """Why a job cannot drive itself, and what to do about it."""

    why: str
    hint: str


def unkept(job: Job, market: Market) -> str | None:
    """Return what a supervisor outside does for the job, and its machines on that market cannot; None where nothing.

    Machines may end each other and buy none: no policy can be asked what to change to.
    """
    if job.deadline is None or job.deadline_policy is None or market is not Market.SPOT:
        return None
    return (
        f"while its machines drive it, nobody changes over to machines on demand for its deadline of"
        f" {format_span(job.deadline)}: it keeps spot machines, and may be late. A supervisor that stays, or"
        f" `resources: {{market: on_demand}}`, keeps it"
    )


def hands_over(state: JobState, unattended: timedelta | None, quiet: timedelta) -> bool:
    """Whether one of its machines is about to take the job that nobody holds, and whose state is `quiet` for so long.

    `unattended` is what the newest order says: None takes the job back from its machines.
    """
    driven = state.drives_itself and unattended is not None and not state.status.ended
    return driven and bool(state.alive) and quiet < TAKES_OVER


def waited_for(state: JobState, order: Order, quiet: timedelta) -> timedelta:
    """Return how long machines that drive the job may take until one of them has it, or they have ended with it.

    Nothing where none of them will: the job is left, or was taken back, or its machines stay.
    """
    if not state.status.ended:
        return TAKES_OVER - quiet if hands_over(state, order.unattended, quiet) else timedelta(0)
    return _END_WITHIN if state.drives_itself and not keeps(order, state) else timedelta(0)


def makes_itself_fit(state: JobState, since: datetime, limits: Limits, now: datetime) -> bool:
    """Whether a machine that was launched under the order given then may still make itself fit to drive the job."""
    return any(one.launched_at >= since and now - one.launched_at < limits.controller for one in state.alive)


def order_key(cluster: str) -> str:
    """Return the key of the cluster's order."""
    return f"clusters/{cluster}/drive.json"


def parse_order(text: str | bytes) -> DriveOrder:
    """Return the order. Raises Malformed."""
    order = from_json(DriveOrder, text)
    if order.version != ORDER_VERSION:
        raise Malformed(f"an order of version {order.version}; this gpucloud knows {ORDER_VERSION}")
    if not all(0 < seconds <= _LONGEST_S for seconds in (order.period_s, order.flush_s)):
        raise Malformed("an order whose passes have no length, or one of hours")
    rates = (
        getattr(one, one_field.name)
        for one in order.terms.rates
        for one_field in fields(one)
        if one_field.name != "region"
    )
    sums = (*(usd for _, usd in order.on_demand), *rates)
    if min(sums, default=0) < 0 or order.terms.disk_gib < 0:
        raise Malformed("an order with a price below nothing")
    return order


def unable(job: Job, store: str, *, code_fits: bool) -> Unable | None:
    """Return why the job's machines cannot drive it: what they would need is with the caller only. None if they can."""
    outside = "leave --unattended out: a supervisor outside then drives it"
    if job.cloud.traits.owned:
        return Unable(why="own hosts are not refilled by any cloud", hint=outside)
    if job.cloud is Cloud.LOCAL and store.startswith("s3://"):
        return Unable(why="machines of the embedded fleet have no credentials for S3", hint="store: a folder")
    if job.secrets:
        named = ", ".join(job.secrets)
        return Unable(why=f"secrets are not in the store, and a later machine needs {named}", hint=outside)
    own = next((source for source, _ in job.data if not source.startswith("s3://")), None)
    if own is not None:
        return Unable(why=f"data: {own} lies on this machine", hint="put it into S3: data: {s3://bucket/prefix: …}")
    if not code_fits:
        size = LARGEST_CODE_BYTES >> 20
        return Unable(why=f"the code is larger than {size} MiB", hint="name what is not needed in .gpucloudignore")
    return None


# What is known of machines that drive their job without their word: what the user's side armed, the cloud lists.
#
# While a job drives itself its state and a part of its ledger are written by its own machines. What they say may raise
# the sum and never lower it: the user's side writes down each shut-off that it arms, and for that time the job has cost
# at least what the cloud lists. Machines are forgotten by the list some time after their end: longer ago than that,
# time for which the list shows no machine counts as paid in full. Where its machines come from and what they may cost
# is no machine's to say either: none of them may turn to another pool. What was spent before they drove is bounded by
# the user's own bills, and by the machines that had none when the shut-off was armed.


ARMINGS_VERSION = 1
LISTED = timedelta(minutes=15)
"""For so long after its end a machine is listed by every cloud."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """What of a job's state its machines have no say in, as the user's side had it: each field is one of `JobState`.

    Where they come from and what they may cost; whose word is over when, and which order the user's side acted on last.
    """

    pool: Pool
    cap_usd_per_hour: Decimal
    group: str | None
    efa: tuple[EfaLayout, ...]
    images: tuple[tuple[str, str], ...]
    gpu: str | None
    successor: Successor | None
    left_usd_per_hour: Decimal
    lease_s: float
    order_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arming:
    """So many machines at most were paid until `until`, at no more than the cap, from `at` on or the next arming's.

    `unbilled` are the machines that had no bill on the user's side then: those that were alive. `listed` are those that
    the cloud listed then, where it was asked because the user's side took the job back: their lives are known for good.
    """

    version: int = ARMINGS_VERSION
    at: datetime
    machines: int
    cap_usd_per_hour: Decimal
    until: datetime
    rented: Rented
    unbilled: tuple[UsageInterval, ...] = ()
    listed: tuple[UsageInterval, ...] | None = None


def arming(
    state: JobState, *, at: datetime, machines: int, until: datetime, listed: tuple[UsageInterval, ...] | None = None
) -> Arming:
    """Return the arming for the job as its state stands on the user's side; none drive it any more for 0 machines."""
    rented = Rented(**{one.name: getattr(state, one.name) for one in fields(Rented)})
    # What machines wrote of each other while they drove is no word of the user's side when it takes the job back.
    unbilled = tuple(interval for interval in state.nodes if not interval.charged) if machines else ()
    cap = state.dearest_usd_per_hour
    return Arming(
        at=at, machines=machines, cap_usd_per_hour=cap, until=until, rented=rented, unbilled=unbilled, listed=listed
    )


def witnessed(armings: Iterable[Arming]) -> tuple[UsageInterval, ...]:
    """Return the lives that the cloud listed when the user's side took the job back: of each machine as told last.

    One that lived then is known up to then alone.
    """
    intervals: dict[str, UsageInterval] = {}
    for one in sorted(armings, key=lambda one: one.at):
        intervals |= _as_listed_then(one)
    return tuple(intervals.values())


def _as_listed_then(one: Arming) -> dict[str, UsageInterval]:
    return {interval.node_id: replace(interval, ended_at=interval.ended_at or one.at) for interval in one.listed or ()}


def told_since_alive(armings: Iterable[Arming]) -> dict[str, UsageInterval]:
    """Return by id the lives as the list told them last, of machines that were alive at no arming since.

    One that lived then is known up to then alone.
    """
    told: dict[str, UsageInterval] = {}
    for one in sorted(armings, key=lambda one: one.at):
        for interval in one.unbilled:
            told.pop(interval.node_id, None)
        told |= _as_listed_then(one)
    return told


def most_machines(state: JobState, nodes: int, listed: int = 0) -> int:
    """Return of how many machines an arming tells: those that the job wants, twice where others take over, or has."""
    return max(nodes * (2 if state.successor is not None else 1), len(state.alive), listed)


def as_armed(state: JobState, armings: Iterable[Arming]) -> JobState:
    """Return the state as it may be believed, by the armings in order: while machines drive their job, as it was armed.

    They may write all of it. Another pool or a lower cap would be paid for by nobody's leave; a job that seems torn
    down, without a group or at rest would be left alone with its machines; a lease without an end would keep the user
    from it, and an order that seems acted on, from what it asks for.
    """
    newest = newest_of(armings)
    if newest is None or newest.machines == 0:
        return state
    rented = {one.name: getattr(newest.rented, one.name) for one in fields(Rented)}
    return replace(state, **rented, drives_itself=True, torn_down=False)


def as_armed_at_least(state: JobState, newest: Arming | None) -> JobState:
    """Return the state with what may live at the least: what was armed last for machines that drive the job.

    They wrote until when they are paid, and who they are: that may raise what is promised to them, and never lower it.
    """
    if newest is None or newest.machines == 0:
        return state
    told = {one.node_id for one in state.nodes}
    until = max(state.paid_until or newest.until, newest.until)
    return replace(
        state, paid_until=until, nodes=(*state.nodes, *(one for one in newest.unbilled if one.node_id not in told))
    )


def rebuilt(job: str, newest: Arming) -> JobState:
    """Return the state of a job that its machines left in no readable state, as far as the user's side knows it."""
    rented = {one.name: getattr(newest.rented, one.name) for one in fields(Rented)}
    return JobState(job=job, **rented, nodes=newest.unbilled, paid_until=newest.until, drives_itself=True)


def newest_of(armings: Iterable[Arming]) -> Arming | None:
    """Return the last of the armings in order; None where there is none."""
    *_, newest = (None, *armings)
    return newest


def tells_of(newest: Arming | None, wanted: Arming) -> bool:
    """Whether the newest arming tells of as many machines already, and of those."""
    return newest is not None and newest.machines >= wanted.machines and newest.rented == wanted.rented


def unproven_usd(
    armings: Iterable[Arming],
    listed: Iterable[tuple[datetime, datetime]],
    listed_charges: Iterable[Charge],
    told: Iterable[Charge],
    now: datetime,
) -> Decimal:
    """Return what the job may have cost beside what its ledger tells.

    `listed` is from when to when each machine that the cloud lists lived, `listed_charges` what that costs; `told` are
    the charges of the ledger, of which those below zero count for nothing. Within each arming the larger sum counts.
    """
    intervals, sums, ledger, every = tuple(listed), tuple(listed_charges), tuple(told), tuple(armings)
    looks = [now, *(one.at for one in every if one.listed is not None)]
    return sum(
        (
            _lacking(one, end, intervals, sums, ledger, min(look for look in looks if look >= end))
            for one, end in _windows(every, now)
        ),
        ZERO,
    )


def earlier_usd(
    armings: Iterable[Arming], lived: Mapping[str, tuple[Charge, ...]], told: Iterable[Charge], now: datetime
) -> Decimal:
    """Return what the job may have cost beside what its ledger tells of the time before its machines drove it.

    `lived` is what each machine costs that was without a bill when a shut-off was armed, by its id. Of none of them a
    machine's word may lower that: not its bill, nor that it was never there.
    """
    windows, ledger = _windows(armings, now), tuple(told)
    least: dict[str, Decimal] = {}
    for number, (one, _) in enumerate(windows):
        for node_id in (interval.node_id for interval in one.unbilled):
            before = partial(_before, one.at, windows[:number])
            seen = sum(map(before, lived.get(node_id, ())), ZERO)
            billed = sum((before(charge) for charge in ledger if charge.node_id == node_id), ZERO)
            least[node_id] = max(least.get(node_id, ZERO), seen - billed)
    return sum(least.values(), ZERO)


def _before(at: datetime, windows: Iterable[tuple[Arming, datetime]], charge: Charge) -> Decimal:
    """Return what of the charge falls before that time, and into none of the windows."""
    within = sum((_within(charge, one.at, min(end, at)) for one, end in windows), ZERO)
    return _within(charge, charge.start, min(charge.end, at)) - within


def _windows(armings: Iterable[Arming], now: datetime) -> list[tuple[Arming, datetime]]:
    """Each arming with its end: its own, the next one's beginning, or now."""
    inorder = sorted(armings, key=lambda one: one.at)
    following = [*(one.at for one in inorder[1:]), now]
    return [(one, min(one.until, after, now)) for one, after in zip(inorder, following, strict=True)]


def _lacking(
    arming: Arming,
    end: datetime,
    intervals: tuple[tuple[datetime, datetime], ...],
    sums: tuple[Charge, ...],
    ledger: tuple[Charge, ...],
    looked_at: datetime,
) -> Decimal:
    """`looked_at` is when the cloud was asked first after the end: it listed all that had ended not long before."""
    seen = sum((_within(charge, arming.at, end) for charge in sums), ZERO)
    forgotten = min(end, looked_at - LISTED)
    paid = arming.machines * max(timedelta(0), forgotten - arming.at)
    shown = sum((_overlap(interval, (arming.at, forgotten)) for interval in intervals), timedelta(0))
    least = seen + usd_for(arming.cap_usd_per_hour, max(timedelta(0), paid - shown))
    return max(ZERO, least - sum((_within(charge, arming.at, end) for charge in ledger), ZERO))


def _within(charge: Charge, start: datetime, end: datetime) -> Decimal:
    """Return what of the charge falls into that time; all charges are even over theirs."""
    whole = charge.end - charge.start
    if charge.usd <= 0 or whole <= timedelta(0):
        return ZERO
    part = _overlap((charge.start, charge.end), (start, end))
    return charge.usd * Decimal(part / timedelta(microseconds=1)) / Decimal(whole / timedelta(microseconds=1))


def _overlap(one: tuple[datetime, datetime], other: tuple[datetime, datetime]) -> timedelta:
    return max(timedelta(0), min(one[1], other[1]) - max(one[0], other[0]))
