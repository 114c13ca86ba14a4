"""What a job would rent: the offers that do what it asks, that the account may rent and that can keep its limits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.feasibility import refuse_what_cannot_be_kept
from gpucloud.domain.job import Job
from gpucloud.domain.ledger import ZERO, Terms, with_beside
from gpucloud.domain.offer import Offer
from gpucloud.domain.plan import Plan, fitting, make_plan, quota_too_small
from gpucloud.domain.supervision.prepaid import Wall
from gpucloud.ports import Account, Clock, MarketData


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans jobs at one market's prices, within what the account may rent.

    `changeover` is what a launch is taken to cost a job in time, as long as none was measured.
    """

    market: MarketData
    account: Account | None
    clock: Clock
    wall: Wall
    terms: Terms
    changeover: timedelta

    def plan(self, job: Job) -> Plan:
        """Return the plan of a new run; nothing is written.

        Raises PlanRefused, NoCapacity (no offer, or no quota for any), BudgetTooSmall.
        """
        offers = self.allowed(job, self.offers(job))
        try:
            plan = make_plan(job, offers, self.clock.now(), self.wall, spent_usd=ZERO)
        except PlanRefused:
            # The whole work wants more than a start: the larger sum is the one to name.
            if found := fitting(job, offers):
                refuse_what_cannot_be_kept(job, found, self.changeover, self.wall)
            raise
        refuse_what_cannot_be_kept(job, plan.offers, self.changeover, self.wall)
        return plan

    def offers(self, job: Job) -> tuple[Offer, ...]:
        """Return the market's offers, at the price of a node with what it has beside."""
        return with_beside(self.market.offers(job.resources), self.terms)

    def allowed(self, job: Job, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
        """Return the offers that the account's quotas hold; NoCapacity, naming the quota, when they hold none."""
        if self.account is None:
            return offers
        ranked = fitting(job, offers)
        rooms = {offer.pool: self.account.headroom(offer) for offer in ranked}
        held = tuple(o for o in ranked if rooms[o.pool].holds(o.vcpus * job.resources.nodes))
        if ranked and not held:
            raise quota_too_small(ranked[0], job.resources.nodes, rooms[ranked[0].pool])
        return held or offers  # nothing fits: the plan says why
