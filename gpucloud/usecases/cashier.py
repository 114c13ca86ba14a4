"""What a job has cost, may still cost and has left, from its state, its ledger and the market's prices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial

from gpucloud.domain.ledger import ZERO, Charge, Spend, Terms, meter, total, usd_for
from gpucloud.domain.node import GroupView
from gpucloud.domain.state import JobState, NodeLife
from gpucloud.domain.supervision.lives import with_lives
from gpucloud.domain.supervision.prepaid import Wall, paid_until
from gpucloud.ports import MarketData
from gpucloud.usecases.jobstore import JobStore

PAGE = 256
"""How many nodes' bills are copied into one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payable:
    """What is spent, and until when the rest can be promised: for a start, with one more node, for those that run."""

    spent_usd: Decimal
    until: datetime | None
    with_another: datetime | None
    lasts_until: datetime | None


class Cashier:
    """Counts one job's money. Charges of nodes that have ended are in the ledger; the others run.

    What the budget does not count is in the ledger too, and in no sum here but that of `charges`.
    """

    def __init__(self, jobs: JobStore, market: MarketData, terms: Terms | None = None) -> None:
        self._jobs = jobs
        self._market = market
        self._terms = terms or Terms()
        self._billed: dict[str, Decimal] = {}
        self._bills: dict[str, tuple[Charge, ...]] = {}

    def charges(self, state: JobState, now: datetime) -> tuple[Charge, ...]:
        """Return every charge: those in the ledger, and those of nodes not yet in it up to `now`."""
        billed = self._jobs.charges()
        self._billed = _by_node(billed)
        running = (self._meter(life, state, now) for life in state.nodes if life.node_id not in self._billed)
        return (*billed, *(charge for charges in running for charge in charges))

    def settle(self, state: JobState, now: datetime) -> JobState:
        """Write the charges of every node that has ended into the ledger, and return the state that says so."""
        lives = tuple(self._settled(life, state, now) for life in state.nodes)
        self._copy_pages(state.nodes, lives)
        return replace(state, nodes=lives)

    def spend(self, state: JobState, now: datetime, forecast: timedelta | None = None) -> Spend:
        """Return the money now; `forecast` is how long the job is thought to go on."""
        spent = sum((self._cost(life, state, now) for life in state.nodes), ZERO)
        return Spend(
            budget_usd=state.budget_usd,
            spent_usd=spent,
            promised_usd=self._promised(state, state.alive, now),
            forecast_usd=None if forecast is None else spent + self._running_cost(state.alive, now, forecast),
        )

    def payable(self, state: JobState, group: GroupView, wanted: int, now: datetime, wall: Wall) -> Payable:
        """Return until when all machines that there are or soon will be can be promised.

        What the cloud lists now counts, not only what is in the books: `wanted` or the group's level, whichever is
        more, and beside it what is being taken.
        """
        state = replace(state, nodes=with_lives(state.nodes, group.nodes))
        nodes = max(len(state.alive), max(wanted, group.size) + sum(node.detached for node in group.alive))
        spent = self.spend(state, now).spent_usd
        until = partial(paid_until, now, left_usd=state.budget_usd - spent, cap_usd_per_hour=state.dearest_usd_per_hour)
        return Payable(
            spent_usd=spent,
            until=until(nodes=nodes, wall=wall),
            with_another=until(nodes=nodes + 1, wall=wall),
            lasts_until=until(nodes=nodes, wall=replace(wall, least=timedelta(0))),
        )

    def _settled(self, life: NodeLife, state: JobState, now: datetime) -> NodeLife:
        if life.ended_at is None or life.charged:
            return life
        charges = self._meter(life, state, now)
        if self._jobs.bill(life.node_id, charges):
            self._billed[life.node_id] = total(charges)
            self._bills[life.node_id] = charges
        return replace(life, charged=True)

    def _copy_pages(self, before: tuple[NodeLife, ...], lives: tuple[NodeLife, ...]) -> None:
        """Have the bills of so many nodes, in the order of the books, in one object once all of them have ended."""
        settled = {number // PAGE for number, life in enumerate(lives) if life.charged and not before[number].charged}
        for page in sorted(settled):
            members = lives[page * PAGE : (page + 1) * PAGE]
            if len(members) == PAGE and all(life.charged for life in members):
                ids = [life.node_id for life in members]
                bills = {node: self._bills.pop(node, ()) or self._jobs.bill_of(node) for node in ids}
                self._jobs.copy_bills(page, bills)

    def _cost(self, life: NodeLife, state: JobState, now: datetime) -> Decimal:
        """A charge stays as it was billed, whatever prices or attempts become known later."""
        if not life.charged:
            return total(self._meter(life, state, now))
        if life.node_id not in self._billed:
            self._billed = _by_node(self._jobs.charges())
            self._billed.setdefault(life.node_id, ZERO)  # it ended as it began, or by a clock that was behind
        return self._billed[life.node_id]

    def _meter(self, life: NodeLife, state: JobState, now: datetime) -> tuple[Charge, ...]:
        prices = self._market.prices(life.pool, life.launched_at, life.ended_at or now)
        return meter(life, prices, state.attempts, now, self._terms)

    def _promised(self, state: JobState, alive: tuple[NodeLife, ...], now: datetime) -> Decimal:
        if not alive or state.paid_until is None or state.paid_until <= now:
            return ZERO
        return usd_for(state.dearest_usd_per_hour * len(alive), state.paid_until - now)

    def _running_cost(self, alive: tuple[NodeLife, ...], now: datetime, span: timedelta) -> Decimal:
        rates = (self._market.prices(life.pool, now, now)[-1].usd_per_hour for life in alive)
        return usd_for(sum(rates, ZERO), span)


def _by_node(charges: Iterable[Charge]) -> dict[str, Decimal]:
    sums: dict[str, Decimal] = {}
    for charge in charges:
        if charge.node_id:
            sums[charge.node_id] = sums.get(charge.node_id, ZERO) + charge.usd
    return sums
