"""A job's budget: what it has paid for and may still cost, and until when it pays for machines.

    paid_until = now + min(horizon, (budget − spent − reserve) / (nodes × price cap))

Machines are paid for until that time, and it never promises more than the budget: the hard wall. The reserve pays for
what comes after. Machines are launched only where the promise lasts for their start and for the least time of
training: a start that comes to nothing is charged all the same. Nothing here asks anybody: the cloud's schedule and the
node's own timer end the machines at `paid_until` unless it was moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import product

from gpucloud.domain.job.quantities import format_usd, span_of
from gpucloud.domain.money.ledger import ZERO, usd_for
from gpucloud.domain.node.status import LEAVES_AHEAD, LEAVES_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What counts of a budget as used: what the ledger tells, and what was paid beside it that nobody can show.

    `let_go_usd` is what machines may still cost that nobody who supervises can see or end: it pays for nothing else.
    """

    spent_usd: Decimal = ZERO
    unproven_usd: Decimal = ZERO
    let_go_usd: Decimal = ZERO

    @property
    def usd(self) -> Decimal:
        """All of it together."""
        return self.spent_usd + self.unproven_usd + self.let_go_usd

    def __str__(self) -> str:
        unproven = f", {format_usd(self.unproven_usd)} unproven" if self.unproven_usd else ""
        let_go = f", {format_usd(self.let_go_usd)} {LET_GO}" if self.let_go_usd else ""
        return f"{format_usd(self.spent_usd)} spent{unproven}{let_go}"


NOTHING_USED = Used()
LET_GO = "for machines that could not be ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """The money of a job: spent + unproven + let go + left = budget.

    `unproven_usd` is what machines may have cost beside what the ledger tells, while they drove the job: what was paid
    for then counts as used where the cloud lists no machine any more.

    `promised` is what of that the machines may still cost until `off_at`, when they end by themselves unless somebody
    moves that on, at the highest price that they can have, those included that the cloud starts in place of lost ones;
    `usd_per_hour` is what they cost now. `let_go_usd` is what those may cost beside it, until `let_go_until`, that
    nobody who supervises the job can see or end.
    `forecast_usd` is what the whole job will have cost at today's price, None when unknown, and never more than the
    budget pays for; where nobody supervises it, `unattended_until` is when its machines end, which go on until then
    whatever its script does.
    `outside_budget_usd` is what the budget does not count: what was stored, asked of the store, brought home, read
    from other regions, and drills.
    """

    budget_usd: Decimal
    spent_usd: Decimal
    promised_usd: Decimal
    forecast_usd: Decimal | None = None
    is_short: bool = False
    """Whether the budget ends before the job's last step."""
    deadline_in: timedelta | None = None
    """How long until the deadline, where that ends the job before its last step."""
    prepaid_in: timedelta | None = None
    """How long until its machines' time is over, where that is before the last step and nobody buys more."""
    unattended_until: datetime | None = None
    outside_budget_usd: Decimal = ZERO
    unproven_usd: Decimal = ZERO
    let_go_usd: Decimal = ZERO
    let_go_until: datetime | None = None
    usd_per_hour: Decimal = ZERO
    off_at: datetime | None = None
    as_of: datetime | None = None
    """When it was reckoned."""
    kept_usd: Decimal = ZERO
    """What of the rest no training may use: it pays for the last save and the end of all those machines."""
    cap_usd_per_hour: Decimal = ZERO
    """What all those machines cost an hour at the most."""
    leaves: timedelta = timedelta(0)
    """How long before its paid time ends the job is asked to save and leave, as that time is now."""
    leaves_at_most: timedelta = timedelta(0)
    """The same at the most, once that time has been prolonged."""
    leaves_share: float = LEAVES_SHARE
    """Which share of a shorter paid time that is at the most."""
    gain: timedelta = timedelta(0)
    """By less than that, paid time is not prolonged at the end of the budget."""
    ahead_usd: Decimal = ZERO
    """What of the sum that is spent pays for time to come: the least that is charged for a machine, from its launch."""

    @property
    def left_usd(self) -> Decimal:
        """What is not spent, nor promised to machines that were let go; below zero only if a price passed its cap."""
        return self.budget_usd - self.spent_usd - self.unproven_usd - self.let_go_usd

    @property
    def lasts(self) -> timedelta | None:
        """How long the budget pays for training at the rate of now, then it is saved; None for no rate.

        However little is left, what runs goes on: its paid time, at the highest price, is prolonged as long as there is
        anything to pay it of. What is left for a last save is more the longer that takes.
        """
        return self._prolonged.asked_in if self.usd_per_hour else None

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left of the budget that training may use."""
        return self.lasts is not None and self.lasts < timedelta(seconds=1)

    @property
    def ends_at(self) -> datetime | None:
        """When the budget ends that does so before the job's last step; None where it does not, as far as is known.

        Once it is used up, when the machines end by themselves that are being ended; None where that is over, too.
        """
        if not self.is_short or self.lasts is None or self.as_of is None:
            return None
        return self.off_at if self.is_used_up else self.as_of + self.lasts

    def for_job_of(
        self, left: timedelta | None, deadline_at: datetime | None = None, *, buys_time: bool = True
    ) -> Spend:
        """Return the money with what the job will have cost that has so long to its last step; where unknown, without.

        A deadline that comes before ends it then, done or not. Where nobody `buys_time`, as of a job that its own
        machines drive, these are off when what was paid for is over.
        """
        if left is None:
            return self
        prepaid = max(timedelta(0), self.off_at - self.as_of) if not buys_time and self.off_at and self.as_of else None
        if prepaid is not None and prepaid < left:
            return replace(self.for_job_of(prepaid, deadline_at), prepaid_in=prepaid, is_short=False)
        ends = max(timedelta(0), deadline_at - self.as_of) if deadline_at and self.as_of else None
        if ends is not None and ends <= left:
            return replace(self.for_job_of(ends), deadline_in=ends)
        usd, most_usd = self._usd_within(left), max(ZERO, self._usable_usd)
        whole = self.spent_usd + self.let_go_usd + min(usd, most_usd)
        return replace(self, forecast_usd=whole, is_short=usd > most_usd)

    @property
    def _prolonged(self) -> Prolonged:
        return Prolonged(
            usd=self.left_usd - self.kept_usd + self.ahead_usd,
            usd_per_hour=self.usd_per_hour,
            cap_usd_per_hour=self.cap_usd_per_hour,
            paid=self.off_at - self.as_of if self.off_at and self.as_of else timedelta(0),
            leaves=self.leaves,
            leaves_at_most=self.leaves_at_most,
            leaves_share=self.leaves_share,
            gain=self.gain,
        )

    @property
    def _usable_usd(self) -> Decimal:
        leaves_usd = usd_for(self.cap_usd_per_hour, self._prolonged.leaves_then)
        return self.left_usd - self.kept_usd - leaves_usd

    def _usd_within(self, span: timedelta) -> Decimal:
        """Return what the machines that live will have cost after that time, beside what is spent."""
        return max(ZERO, usd_for(self.usd_per_hour, span) - self.ahead_usd)

    def until_off(self) -> Spend:
        """Return the money with what the job will have cost when its machines switch themselves off."""
        if self.off_at is None or self.as_of is None:
            return self
        own_usd = min(self.promised_usd, self._usd_within(self.off_at - self.as_of))
        whole = self.spent_usd + self.let_go_usd + own_usd
        return replace(self, forecast_usd=whole, unattended_until=self.off_at)

    @property
    def all_off_at(self) -> datetime | None:
        """When the last of them ends by itself; None where none may live."""
        return max((at for at in (self.off_at, self.let_go_until) if at is not None), default=None)

    @property
    def free_usd(self) -> Decimal:
        """What of the rest is neither prepaid nor kept aside: it pays for more time when that is over."""
        return max(ZERO, self.left_usd - self.promised_usd - self.kept_usd)

    @property
    def off_usd(self) -> Decimal:
        """What the job will have cost at the most when its machines end by themselves."""
        return self.spent_usd + self.unproven_usd + self.promised_usd + self.let_go_usd


# When a budget ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prolonged:
    """Machines whose paid time is prolonged while there is money: `usd` is all that may pay for time from now on.

    They are `paid` for so long, at their highest price, and asked to save and leave so long before that is over:
    longer, up to the most, the longer their paid time gets. It is prolonged by no less than `gain`, so that they may go
    on that much longer than is said here.
    """

    usd: Decimal
    usd_per_hour: Decimal
    cap_usd_per_hour: Decimal
    paid: timedelta
    leaves: timedelta
    leaves_at_most: timedelta
    gain: timedelta
    leaves_share: float = LEAVES_SHARE

    @property
    def asked_in(self) -> timedelta:
        """How long from now they are asked to save and leave."""
        usd = self.usd - usd_for(self.cap_usd_per_hour, self.leaves_then + self.gain)
        return max(timedelta(0), span_of(float(usd * 3600 / self.usd_per_hour)), self.paid - self.leaves)

    @property
    def unused_usd(self) -> Decimal:
        """What is left then."""
        return self.usd - usd_for(self.usd_per_hour, self.asked_in) if self.usd_per_hour else ZERO

    @property
    def leaves_then(self) -> timedelta:
        """How long before their paid time ends they are asked, as that will be at the end of the money.

        Of each second that is paid in addition `leaves_share` is for the last save, at the highest price.
        """
        if not self.usd_per_hour or self.leaves_at_most <= self.leaves:
            return self.leaves
        trains = span_of(float((self.usd - usd_for(self.cap_usd_per_hour, self.gain)) * 3600 / self.usd_per_hour))
        dearer = float(self.cap_usd_per_hour / self.usd_per_hour) - 1
        grown = (self.leaves + self.leaves_share * (trains - self.paid)) / (1 + self.leaves_share * dearer)
        return min(self.leaves_at_most, max(self.leaves, grown))


# Until when machines are paid for.


_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepaidRule:
    """The lengths that the prepaid rule uses.

    The reserve: a shut-off may come two minutes late, machines take some seconds to end, and where one is lost in this
    time the group starts another, which costs a minute at the least (EC2's shortest charge).
    """

    horizon: timedelta = timedelta(minutes=30)
    reserve: timedelta = timedelta(seconds=210)
    least: timedelta = timedelta(seconds=60)
    """For less training than that no attempt is begun."""
    start: timedelta = timedelta(seconds=60)
    """From a machine's launch until it can train, as it is reckoned with; no less than the cloud's shortest charge."""
    ahead: timedelta = timedelta(0)
    """With less time than this ahead of the shut-off, the cloud starts no machine."""

    @property
    def least_gain(self) -> timedelta:
        """By less than that, paid time is not prolonged at the end of a budget: each time is a call of the cloud's."""
        return min(timedelta(seconds=10), self.horizon / 30)


def reserve_usd(nodes: int, cap_usd_per_hour: Decimal, prepaid_rule: PrepaidRule) -> Decimal:
    """Return what is kept aside for the last save and the teardown of all nodes."""
    return usd_for(cap_usd_per_hour * nodes, prepaid_rule.reserve)


def least_budget_usd(nodes: int, cap_usd_per_hour: Decimal, prepaid_rule: PrepaidRule) -> Decimal:
    """Return the least budget that trains at all: every node's start, its least time of training, and the reserve."""
    return usd_for(cap_usd_per_hour * nodes, prepaid_rule.start + prepaid_rule.least) + reserve_usd(
        nodes, cap_usd_per_hour, prepaid_rule
    )


def prolonged(
    usd: Decimal,
    *,
    nodes: int,
    usd_per_hour: Decimal,
    cap_usd_per_hour: Decimal,
    prepaid_rule: PrepaidRule,
    saves: bool = True,
) -> Prolonged:
    """Return `nodes` machines at that price that are about to start for the sum, as they are paid for until they have.

    Where they save, they are taken to do so as those of which no save was measured yet.
    """
    return Prolonged(
        usd=usd - reserve_usd(nodes, cap_usd_per_hour, prepaid_rule),
        usd_per_hour=usd_per_hour * nodes,
        cap_usd_per_hour=cap_usd_per_hour * nodes,
        paid=prepaid_rule.start,
        leaves=timedelta(0),
        leaves_at_most=LEAVES_AHEAD if saves else timedelta(0),
        gain=prepaid_rule.least_gain,
    )


def paid_until(  # noqa: PLR0913  each is a part of the sum
    now: datetime,
    *,
    left_usd: Decimal,
    nodes: int,
    cap_usd_per_hour: Decimal,
    prepaid_rule: PrepaidRule,
    launched: bool = True,
    coming_usd: Decimal = ZERO,
) -> datetime | None:
    """Return until when `nodes` machines can be paid at their highest price; None when it is not worth a start.

    `left_usd` is the budget less everything spent. The time is `now + horizon` at the latest. Machines that are still
    to be `launched` are paid for their start, too. `coming_usd` is what some of them are charged as soon as they are
    there: kept out of the time, so that it need not come closer, and be told anew, a second after they are asked for.
    """
    spendable = left_usd - reserve_usd(nodes, cap_usd_per_hour, prepaid_rule)
    rate = cap_usd_per_hour * nodes
    if rate <= 0:
        return now + prepaid_rule.horizon
    least = prepaid_rule.least if launched else prepaid_rule.start + prepaid_rule.least
    if spendable < usd_for(rate, least):  # in the same sums as `least_budget_usd`: what that accepts is enough here
        return None
    return now + min(prepaid_rule.horizon, max(least, span_of(float((spendable - coming_usd) * 3600 / rate))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """For how long machines can be paid from when they are there, and what is spent by then, each at the most."""

    lasts: timedelta
    usd: Decimal


def most_prepaid(  # noqa: PLR0913  each is a part of the sum
    caps_usd_per_hour: Iterable[Decimal],
    nodes: Iterable[int],
    *,
    used_usd: Decimal,
    budget_usd: Decimal,
    prepaid_rule: PrepaidRule,
    launched: bool,
    within: timedelta = timedelta(0),
) -> Bound | None:
    """Return what no machines pass that come at one of these prices, and in one of these numbers; None where none can.

    The rule is that of `paid_until`, applied `within` so long from now: a cheaper machine keeps less aside and is paid
    for longer, a dearer one costs more an hour. Where none is `launched` yet, some may come and go before: all of the
    budget may be spent but what is kept aside.
    """
    now, found = datetime.min.replace(tzinfo=timezone.utc), []
    for cap, count in product(tuple(caps_usd_per_hour), tuple(nodes)):
        until = paid_until(
            now,
            left_usd=budget_usd - used_usd,
            nodes=count,
            cap_usd_per_hour=cap,
            prepaid_rule=prepaid_rule,
            launched=launched,
        )
        if until is not None:
            paid_usd = budget_usd - reserve_usd(count, cap, prepaid_rule)
            usd = used_usd + usd_for(cap * count, until - now + within)
            found.append(Bound(lasts=until - now + within, usd=min(usd, paid_usd) if launched else paid_usd))
    return Bound(lasts=max(one.lasts for one in found), usd=max(one.usd for one in found)) if found else None


def may_launch(until: datetime | None, now: datetime, prepaid_rule: PrepaidRule) -> bool:
    """Whether the time until which machines are armed, or can be paid, lies far enough ahead for any to be started."""
    return until is not None and until > now and until - now >= prepaid_rule.ahead


def sooner(armed: datetime | None, until: datetime | None) -> datetime | None:
    """Return `until` where the shut-off that is armed comes noticeably later; None where it may stay."""
    return until if armed is not None and until is not None and armed - until > _SECOND else None
