"""The plan: what will be rented, what it costs at the most, shown before money moves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.errors import BudgetTooSmall, NoCapacity, PlanRefused
from gpucloud.domain.job import Cloud, Job
from gpucloud.domain.offer import Offer, rank
from gpucloud.domain.prepaid import Wall, least_budget_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen offer for `nodes` nodes, the runners-up, and the ceiling: no run can cost more than the budget.

    `paid_for` is how long the budget lasts at today's price; `paid_for_at_cap` at the highest price.
    """

    job: str
    nodes: int
    workers: int
    offer: Offer
    others: tuple[Offer, ...]
    usd_per_hour: Decimal
    cap_usd_per_hour: Decimal
    budget_usd: Decimal
    worst_usd: Decimal
    paid_for: timedelta
    paid_for_at_cap: timedelta
    made_at: datetime


def make_plan(job: Job, offers: tuple[Offer, ...], now: datetime, wall: Wall, *, spent_usd: Decimal) -> Plan:
    """Return the plan for the job: the cheapest offer that does what it asks.

    Raises PlanRefused, NoCapacity (nothing matches) or BudgetTooSmall (naming the least sum).
    """
    _refuse_what_is_not_offered(job)
    ranked = rank(offers, job.resources)
    if not ranked:
        raise NoCapacity(*_nothing_matches(job, offers))
    best, nodes = ranked[0], job.resources.nodes
    left = job.budget_usd - spent_usd
    least = least_budget_usd(nodes, best.cap_usd_per_hour, wall)
    if left < least:
        raise BudgetTooSmall(
            f"{left:.4f} USD are left of the budget; {nodes} × {best.pool} need at least {least:.4f} USD",
            hint=f"budget: {job.budget_usd - left + least:.2f} USD, or fewer nodes",
        )
    return Plan(
        job=job.name,
        nodes=nodes,
        workers=nodes * job.resources.gpus,
        offer=best,
        others=ranked[1:4],
        usd_per_hour=best.usd_per_hour * nodes,
        cap_usd_per_hour=best.cap_usd_per_hour * nodes,
        budget_usd=job.budget_usd,
        worst_usd=job.budget_usd,
        paid_for=_lasts(left, best.usd_per_hour * nodes),
        paid_for_at_cap=_lasts(left, best.cap_usd_per_hour * nodes),
        made_at=now,
    )


def _lasts(usd: Decimal, usd_per_hour: Decimal) -> timedelta:
    return timedelta(hours=float(usd / usd_per_hour)) if usd_per_hour else timedelta(days=365)


def _refuse_what_is_not_offered(job: Job) -> None:
    if job.cloud is not Cloud.LOCAL:
        raise PlanRefused(
            f"cloud: {job.cloud.value} is not in this version", hint="cloud: local runs the embedded fleet"
        )
    if job.resources.gpu or job.resources.vram_gib is not None:
        raise PlanRefused(
            "the embedded fleet has no GPUs: its nodes are CPU processes on this machine",
            hint="leave out `gpu` and `vram_gib`; `gpus` is the number of workers on each node",
        )
    if job.data:
        raise PlanRefused("`data` is not in this version", hint="put small data beside the code")


def _nothing_matches(job: Job, offers: tuple[Offer, ...]) -> tuple[str, ...]:
    slots = sorted({offer.gpus for offer in offers})
    zones = sorted({offer.pool.zone for offer in offers})
    wanted = job.resources
    return (
        f"no offer has {wanted.gpus} workers a node, market {wanted.market.value}"
        f"{', regions ' + ', '.join(wanted.regions) if wanted.regions else ''};"
        f" there are {', '.join(map(str, slots))} in {', '.join(zones)}",
    )
