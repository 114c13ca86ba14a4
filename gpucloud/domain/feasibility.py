"""Whether a job can keep its deadline and its budget at all: asked before anything is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import ROUND_UP, Decimal

from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job import Job, Market, MarketPolicy
from gpucloud.domain.offer import Offer
from gpucloud.domain.policy.net import advised_span_s, least_budget_usd, least_span_s
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.quantities import format_span, format_usd, written_span
from gpucloud.domain.supervision.prepaid import Wall, reserve_usd
from gpucloud.domain.work import work_of

_CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job needs, in time and money: its work, and what each change of machines costs it.

    `fallback` is on what it finishes when spot machines cannot: None where nothing may be had on demand.
    """

    work: timedelta
    changeover: timedelta
    offer: Offer
    fallback: Offer | None


def needs_of(job: Job, offers: Sequence[Offer], changeover: timedelta) -> Needs | None:
    """Return what the job needs on the first of these offers; None where nobody knows how much work it is.

    It falls back on the cheapest machines on demand; of the same type, where the work is another one on others.
    """
    offer = offers[0]
    work = work_of(job, offer)
    if work is None:
        return None
    on_demand = [other for other in offers if other.pool.market is Market.ON_DEMAND]
    alike = [other for other in on_demand if other.pool.instance_type == offer.pool.instance_type]
    chosen = on_demand if work.on_any_gpu else alike
    fallback = min(chosen, key=lambda other: other.usd_per_hour, default=None)
    return Needs(work=work.span, changeover=changeover, offer=offer, fallback=fallback)


def task_of(job: Job, needs: Needs) -> Task:
    """Return the job as policies are told of it; without anything on demand, what it could cost there at the most."""
    on_demand = needs.fallback.usd_per_hour if needs.fallback is not None else needs.offer.cap_usd_per_hour
    return Task(
        work_s=needs.work.total_seconds(),
        span_s=math.inf if job.deadline is None else job.deadline.total_seconds(),
        changeover_s=needs.changeover.total_seconds(),
        on_demand_usd_per_hour=float(on_demand),
        nodes=job.resources.nodes,
        least_nodes=job.resources.least_nodes,
        begins_anew=job.checkpoint.none,
    )


def refuse_what_cannot_be_kept(job: Job, offers: Sequence[Offer], changeover: timedelta, wall: Wall) -> None:
    """Raise PlanRefused for a deadline or a budget that cannot be kept: the hint is the number that must move.

    Spot machines may be tried only with R0 ≥ C0 + 2d; on demand one start d is enough. Where a job with a deadline may
    finish on demand, it must be able to, and both hold together only with cap ≥ k·(C0 + d) + p·d and what is kept
    aside for the last save. (Wu et al., "Can't Be Late", NSDI 2024; work C0, deadline R0, changeover d, prices k on
    demand and p spot.) A job of which nobody knows how much work it is finds out.
    """
    if _must_end(job) and all(offer.pool.market is Market.SPOT for offer in offers):
        raise PlanRefused(
            "the deadline needs machines on demand for when spot is not enough, and none may be rented",
            hint="gpucloud quota show, or `market: spot`, which waits for spot and promises nothing",
        )
    needs = needs_of(job, offers, changeover)
    if needs is None:
        return
    if job.deadline is not None:
        _refuse_the_deadline(job, needs, job.deadline)
    least = least_usd(job, needs, wall).quantize(_CENT, ROUND_UP)
    if job.budget_usd < least:
        falls_back = _must_end(job) and needs.offer.pool.market is Market.SPOT and needs.fallback is not None
        machines = f"{job.resources.nodes} × {needs.offer.pool}"
        ending = needs.fallback.pool if falls_back and needs.fallback is not None else None
        other = "no `work:`, to train as far as it goes"
        costs = f"cost at least {format_usd(least)} on {machines}"
        if ending is not None:  # spot machines may do for less: it is the deadline that wants the sum
            other = "`market: spot`, which may miss the deadline"
            costs = f"on {machines} may cost {format_usd(least)}, when the deadline has it end on {ending}"
        raise PlanRefused(
            f"{format_span(needs.work)} of work {costs}; the budget is {format_usd(job.budget_usd)}",
            hint=f"budget: {least:f} USD, or {other}",
        )


def least_usd(job: Job, needs: Needs, wall: Wall) -> Decimal:
    """Return the least sum with which the job can come to its end at today's prices."""
    nodes, last = job.resources.nodes, needs.offer
    hours = (needs.work + needs.changeover) / timedelta(hours=1)
    usd = float(needs.offer.usd_per_hour) * nodes * hours
    if _must_end(job) and needs.offer.pool.market is Market.SPOT and needs.fallback is not None:
        last = needs.fallback
        usd = least_budget_usd(task_of(job, needs), float(needs.offer.usd_per_hour))
    return Decimal(str(usd)) + reserve_usd(nodes, last.cap_usd_per_hour, wall)


def _must_end(job: Job) -> bool:
    """Whether the job goes on demand rather than miss its deadline."""
    return job.deadline is not None and job.resources.market is MarketPolicy.AUTO


def _refuse_the_deadline(job: Job, needs: Needs, deadline: timedelta) -> None:
    tried = needs.offer.pool.market is Market.SPOT
    least = timedelta(seconds=least_span_s(task_of(job, needs))) if tried else needs.work + needs.changeover
    if deadline >= least:
        return
    advised = timedelta(seconds=advised_span_s(least.total_seconds()))
    starts = "two starts" if tried else "a start"
    raise PlanRefused(
        f"{format_span(needs.work)} of work with {starts} of {format_span(needs.changeover)} take"
        f" {format_span(least)}, and the deadline is after {format_span(deadline)}",
        hint=f"deadline: {written_span(advised)}, or more or faster machines"
        + ("; `market: on_demand` needs one start only" if tried and deadline >= needs.work + needs.changeover else ""),
    )
