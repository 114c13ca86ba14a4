"""What a job has cost, may still cost and has left; the ledger beside the bill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import ROUND_UP, Decimal
from functools import partial

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule, Spend, Used, paid_until, reserve_usd
from gpucloud.domain.money.costs import Billed
from gpucloud.domain.money.ledger import ZERO, Charge, Terms, by_node, meter, total, usd_for
from gpucloud.domain.node.node import GroupView
from gpucloud.domain.state.state import JobState, UsageInterval
from gpucloud.domain.supervision.budget import Standing
from gpucloud.domain.supervision.self_driving import Arming, earlier_usd, told_since_alive, unproven_usd, witnessed
from gpucloud.domain.supervision.strays import as_listed, may_live_to
from gpucloud.ports import BillingData, MarketData
from gpucloud.usecases.jobstore.jobstore import JobStore

_RECKONED_FOR = timedelta(seconds=60)
_CLOCKS_DIFFER = timedelta(hours=1)
_LONGEST = timedelta(days=366)
"""No span in a job file is longer: a machine may have written that it is paid for centuries."""
_PLACES = Decimal("0.00000001")
_SAME = Decimal("0.000001")
"""USD. Charges are rounded, and two ways to sum them up differ by less: nothing is unproven then."""
PAGE = 256
"""How many nodes' bills are copied into one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payable:
    """What is used, and until when the rest can be promised: for a start, with one more node, for those that run."""

    used: Used
    until: datetime | None
    with_another: datetime | None
    lasts_until: datetime | None


class SpendTracker:
    """Counts one job's money. Charges of nodes that have ended are in the ledger; the others run.

    What the budget does not count is in the ledger too, and in no sum here but that of `charges`.
    """

    def __init__(self, jobs: JobStore, market: MarketData, terms: Terms | None = None) -> None:
        self._jobs = jobs
        self._market = market
        self._terms = terms or Terms()
        self._billed: dict[str, Decimal] = {}
        self._bills: dict[str, tuple[Charge, ...]] = {}
        self._unproven: tuple[datetime, Decimal] | None = None

    def charges(self, state: JobState, now: datetime) -> tuple[Charge, ...]:
        """Return every charge: those in the ledger, and those of nodes not yet in it up to `now`."""
        billed = self._jobs.charges()
        self._billed = by_node(billed)
        running = (
            self._meter(interval, state, now) for interval in state.nodes if interval.node_id not in self._billed
        )
        return (*billed, *(charge for charges in running for charge in charges))

    def settle(self, state: JobState, now: datetime) -> JobState:
        """Write the charges of every node that has ended into the ledger, and return the state that says so."""
        intervals = tuple(self._settled(interval, state, now) for interval in state.nodes)
        self._copy_pages(state.nodes, intervals)
        return replace(state, nodes=intervals)

    def spent_usd(self, state: JobState, now: datetime) -> Decimal:
        """Return what the job has cost up to now."""
        return sum((self._cost(interval, state, now) for interval in state.nodes), ZERO)

    def unproven_usd(self, state: JobState, listed: GroupView, now: datetime) -> Decimal:
        """Return what machines may have cost beside that while they drove the job; reckoned anew once a minute."""
        if self._unproven is None or not timedelta(0) <= now - self._unproven[0] < _RECKONED_FOR:
            self._unproven = (now, self._reckon(state, listed, now))
        return self._unproven[1]

    def used(self, state: JobState, listed: GroupView, now: datetime) -> Used:
        """Return what counts of the budget as used: what the state, the cloud's list and the armings tell."""
        state = as_listed(state, listed, now)
        spent_usd, unproven_usd = self.spent_usd(state, now), self.unproven_usd(state, listed, now)
        return Used(spent_usd=spent_usd, unproven_usd=unproven_usd, let_go_usd=self._let_go_usd(state, now))

    def standing(self, state: JobState, listed: GroupView, wanted: int, now: datetime) -> Standing:
        """Return what the money rule needs of the job that asks for so many machines, as anybody sees it."""
        used, alive = self.used(state, listed, now), listed.most_alive
        return Standing(now=now, spent_usd=used.usd, alive=alive, needed=max(alive, wanted))

    def spend(
        self,
        state: JobState,
        listed: GroupView,
        now: datetime,
        budget_usd: Decimal,
        prepaid_rule: PrepaidRule,
        unproven_usd: Decimal = ZERO,
    ) -> Spend:
        """Return the money now, under that budget.

        What may still be spent is that of all machines that there can be at once: the cloud starts those that are
        missing from the group's level whenever it can. The user's own hosts are never off.
        """
        cap, nodes = state.dearest_usd_per_hour, max(len(state.alive), listed.most_alive)
        ends = nodes and state.pool.market is not Market.OWNED
        off_at = state.paid_until if ends and state.paid_until and state.paid_until > now else None
        return Spend(
            budget_usd=budget_usd,
            spent_usd=self.spent_usd(state, now),
            kept_usd=ZERO if state.status.ended else reserve_usd(nodes, cap, prepaid_rule),
            promised_usd=usd_for(cap * nodes, off_at - now) if off_at is not None else ZERO,
            unproven_usd=unproven_usd,
            let_go_usd=self._let_go_usd(state, now),
            let_go_until=max((until for one in state.nodes if (until := _reckoned_to(one, now))), default=None),
            usd_per_hour=self._rate(state.alive, now),
            ahead_usd=self._ahead(state.alive, now),
            cap_usd_per_hour=cap * nodes,
            gain=prepaid_rule.least_gain,
            as_of=now,
            off_at=off_at,
        )

    def payable(
        self,
        state: JobState,
        group: GroupView,
        wanted: int,
        now: datetime,
        budget_usd: Decimal,
        prepaid_rule: PrepaidRule,
    ) -> Payable:
        """Return until when all machines that there are or soon will be can be promised.

        What the cloud lists now counts, not only what is in the state: `wanted` or the group's level, whichever is
        more, and beside it what is being interrupted. Where there are none yet, their start is to be paid for as well.
        """
        state = as_listed(state, group, now)
        nodes = max(len(state.alive), group.most_alive + max(0, wanted - group.size))
        used = self.used(state, group, now)
        cap, launched = state.dearest_usd_per_hour, bool(state.alive or group.most_alive)
        until = partial(paid_until, now, left_usd=budget_usd - used.usd, cap_usd_per_hour=cap)
        least = usd_for(cap, self._terms.minimum)
        coming_usd = least * max(0, nodes - len(state.alive))  # asked for, and not listed yet
        return Payable(
            used=used,
            until=until(
                nodes=nodes,
                prepaid_rule=prepaid_rule,
                launched=launched,
                coming_usd=coming_usd,
            ),
            with_another=until(nodes=nodes + 1, prepaid_rule=prepaid_rule, coming_usd=coming_usd + least),
            lasts_until=until(nodes=nodes, prepaid_rule=replace(prepaid_rule, least=timedelta(0))),
        )

    def _reckon(self, state: JobState, listed: GroupView, now: datetime) -> Decimal:
        armings = () if self._jobs.on_machine else self._jobs.armings()
        if not armings:
            return ZERO
        told_intervals = {interval.node_id: interval for interval in witnessed(armings)}
        intervals = {
            **told_intervals,
            **{one.node_id: one for one in as_listed(replace(state, nodes=()), listed, now).nodes},
        }
        charges = [
            charge
            for interval in intervals.values()
            for charge in self._meter(interval, replace(state, attempts=()), now)
        ]
        spans = [(interval.launched_at, interval.ended_at or now) for interval in intervals.values()]
        told = self.charges(state, now)
        # A bill of a machine that the state does not tell of, or tells another story of, was paid all the same.
        untold = max(ZERO, total(charge for charge in told if charge.node_id) - self.spent_usd(state, now))
        lived = self._lived(armings, state, listed, now)
        lacking = unproven_usd(armings, spans, charges, told, now) + earlier_usd(armings, lived, told, now)
        return _sum_of(untold + lacking)

    def _lived(
        self, armings: tuple[Arming, ...], state: JobState, listed: GroupView, now: datetime
    ) -> dict[str, tuple[Charge, ...]]:
        """Return what each machine costs that had no bill when a shut-off was armed: as it stood then and is listed.

        One that the list has forgotten ended as the list told when the job was taken back, unless it was alive when a
        shut-off was armed after that.
        """
        told = [interval for one in armings for interval in one.unbilled]
        # What was told first is from before they drove.
        known = {interval.node_id: interval for interval in reversed(told)}
        until = max(one.until for one in armings)
        found = as_listed(replace(state, nodes=tuple(known.values()), paid_until=until), listed, now).nodes
        still = {node.id for node in listed.nodes}
        after = told_since_alive(armings)
        lived = (one if one.node_id in still else after.get(one.node_id, one) for one in found)
        return {interval.node_id: self._meter(interval, replace(state, attempts=()), now) for interval in lived}

    def _settled(self, interval: UsageInterval, state: JobState, now: datetime) -> UsageInterval:
        if interval.ended_at is None or interval.charged:
            return interval
        charges = self._meter(interval, state, now)
        if self._jobs.bill(interval.node_id, charges):
            self._billed[interval.node_id] = total(charges)
            self._bills[interval.node_id] = charges
        return replace(interval, charged=True)

    def _copy_pages(self, before: tuple[UsageInterval, ...], intervals: tuple[UsageInterval, ...]) -> None:
        """Have the bills of so many nodes, in the order of the state, in one object once all of them have ended."""
        settled = {
            number // PAGE
            for number, interval in enumerate(intervals)
            if interval.charged and not before[number].charged
        }
        for page in sorted(settled):
            members = intervals[page * PAGE : (page + 1) * PAGE]
            if len(members) == PAGE and all(interval.charged for interval in members):
                ids = [interval.node_id for interval in members]
                bills = {node: self._bills.pop(node, ()) or self._jobs.bill_of(node) for node in ids}
                self._jobs.copy_bills(page, bills)

    def _cost(self, interval: UsageInterval, state: JobState, now: datetime) -> Decimal:
        """A charge stays as it was billed, whatever prices or attempts become known later."""
        if not interval.charged:
            return total(self._meter(interval, state, now))
        if interval.node_id not in self._billed:
            self._billed = by_node(self._jobs.charges())
            self._billed.setdefault(interval.node_id, ZERO)  # it ended as it began, or by a clock that was behind
        return self._billed[interval.node_id]

    def _meter(self, interval: UsageInterval, state: JobState, now: datetime) -> tuple[Charge, ...]:
        """An end in the future was seen by nobody: a machine wrote it, and a bill of centuries could not be read."""
        if interval.ended_at is not None:
            interval = replace(interval, ended_at=min(interval.ended_at, now + _CLOCKS_DIFFER))
        prices = self._market.prices(interval.pool, interval.launched_at, interval.ended_at or now)
        return meter(interval, prices, state.attempts, now, self._terms)

    def _let_go_usd(self, state: JobState, now: datetime) -> Decimal:
        """Return what machines that were let go may still cost: the embedded fleet's prices to come are known."""
        found = ((one, until) for one in state.nodes if (until := _reckoned_to(one, now)) is not None)
        return sum((self._until_usd(interval, until, now) for interval, until in found), ZERO)

    def _until_usd(self, interval: UsageInterval, until: datetime, now: datetime) -> Decimal:
        prices = self._market.prices(interval.pool, interval.launched_at, until)
        whole, so_far = (meter(replace(interval, ended_at=end), prices, (), now, self._terms) for end in (until, now))
        return total(whole) - total(so_far)

    def _ahead(self, alive: tuple[UsageInterval, ...], now: datetime) -> Decimal:
        """Return what is charged already of the time to come: of each machine that is younger than the least time."""
        young = [interval for interval in alive if interval.launched_at + self._terms.minimum > now]
        spans = (interval.launched_at + self._terms.minimum - now for interval in young)
        return sum((usd_for(self._rate((one,), now), span) for one, span in zip(young, spans, strict=True)), ZERO)

    def _rate(self, alive: tuple[UsageInterval, ...], now: datetime) -> Decimal:
        """Return what the machines cost an hour now, with their disks and addresses."""
        hourly = (self._market.prices(interval.pool, now, now)[-1].usd_per_hour for interval in alive)
        return sum(hourly, self._terms.extras_usd_per_hour * len(alive))


def _reckoned_to(interval: UsageInterval, now: datetime) -> datetime | None:
    """Return until when what one that was let go may cost is reckoned; None for any other, and once that is over."""
    until = may_live_to(interval, now)
    return min(until, now + _LONGEST) if until is not None else None


def _sum_of(unproven_usd: Decimal) -> Decimal:
    """Return the sum as money is written, rounded up; nothing for what comes of rounding."""
    return ZERO if unproven_usd < _SAME else unproven_usd.quantize(_PLACES, ROUND_UP)


# The ledger beside the cloud's own bill, which costs money to ask for: asked once a day, and kept in the store.


FRESH = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Asks for one job's bill."""

    jobs: JobStore
    billing: BillingData

    def billed(self, charges: tuple[Charge, ...], now: datetime) -> Billed:
        """Return the cloud's figures since the first charge: those kept, while they are less than a day old.

        UsageError when the job has cost nothing yet.
        """
        if not charges:
            raise UsageError(f"{self.jobs.job} has cost nothing yet: there is nothing to compare")
        kept = self.jobs.billed()
        if kept is not None and now - kept.asked_at < FRESH:
            return kept
        found = self.billing.of_job(self.jobs.job, min(charge.start for charge in charges), now)
        self.jobs.keep_billed(found)
        return found
