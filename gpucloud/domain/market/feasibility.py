"""Whether a job can keep its deadline and its budget at all, asked before anything is made; and what it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import ROUND_UP, Decimal

from gpucloud.domain.checkpoint.protection import Saving, saves_nothing
from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job.quantities import format_span, format_usd, written_span
from gpucloud.domain.job.spec import Job, Market, MarketPolicy
from gpucloud.domain.market.outcome import Summary
from gpucloud.domain.market.plan import affordable
from gpucloud.domain.market.policies import NOTHING, Mode, Observation, Reason, Task, ZoneState
from gpucloud.domain.market.policy import decide, least_span_s
from gpucloud.domain.market.scenario import changeover_words, restart_within
from gpucloud.domain.market.sizing import work_of
from gpucloud.domain.money.budget import PrepaidRule, least_budget_usd, reserve_usd
from gpucloud.domain.money.ledger import ZERO, usd_for
from gpucloud.domain.offer import Offer

_CENT = Decimal("0.01")
_ANY_SUM = Decimal(10**9)
_UNSAVED = "; that is of a script that saves, as this one does not"
_HOPELESS = 10  # a budget within which fewer than one replay in so many comes to its end

Foresee = Callable[["Needs", Decimal], Summary | None]
"""What replays of a job come to within such a budget; None where none comes to an end."""


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


def task_of(job: Job, needs: Needs, saving: Saving) -> Task:
    """Return the job as policies are told of it; without anything on demand, what it could cost there at the most."""
    return Task(
        work_s=needs.work.total_seconds(),
        span_s=math.inf if job.deadline is None else job.deadline.total_seconds(),
        changeover_s=needs.changeover.total_seconds(),
        on_demand_usd_per_hour=float(last_offer_usd(needs)),
        nodes=job.resources.nodes,
        least_nodes=job.resources.least_nodes,
        saves_nothing=saves_nothing(job, saving),
    )


def refuse_what_cannot_be_kept(
    job: Job,
    offers: Sequence[Offer],
    changeover: timedelta,
    prepaid_rule: PrepaidRule,
    foresee: tuple[Foresee, Callable[[Needs], bool]] | None = None,
    *,
    saving: Saving = Saving.RESUME,
) -> None:
    """Raise PlanRefused for a deadline or a budget that cannot be kept: the hint is the number that must move.

    Spot machines may be tried only with R0 ≥ C0 + 2d; on demand one start d is enough. Where a job with a deadline may
    finish on demand, it must be able to, and both hold together only with cap ≥ k·(C0 + d) + p·d and what is kept
    aside for the last save. (Wu et al., "Can't Be Late", NSDI 2024; work C0, deadline R0, changeover d, prices k on
    demand and p spot.) A budget that does not surely suffice may do, as machines interrupted early may be free:
    `foresee` tells, where such machines are known, and whether the job is too long for any replay. A script that
    begins anew may need more time on spot machines alone (`saving`). A job of which nobody knows how much work it is
    finds out.
    """
    if _must_end(job) and all(offer.pool.market is Market.SPOT for offer in offers):
        raise PlanRefused(
            "the deadline needs machines on demand for when spot is not enough, and none may be rented",
            hint="gpucloud quota show, or `market: spot`, which waits for spot and promises nothing",
        )
    needs = needs_of(job, offers, changeover)
    if needs is None:
        _refuse_what_no_start_fits(job, offers[0], changeover)
        return
    if job.deadline is not None:
        _refuse_the_deadline(job, needs, job.deadline, saving)
    least = max(least_usd(job, needs, prepaid_rule), _start_usd(job, needs.offer, prepaid_rule))
    least = least.quantize(_CENT, ROUND_UP)
    start_usd = min(_start_usd(job, one, prepaid_rule) for one in offers)
    if job.budget_usd >= least or least <= start_usd:  # `make_plan` refuses what pays for no start
        return
    work = _work_words(job, needs)
    if _must_end(job) and needs.offer.pool.market is Market.SPOT and needs.fallback is not None:
        # Spot machines may do for less: it is the deadline that wants the sum.
        spot = _does_on_spot(job, offers, changeover, prepaid_rule, foresee, saving)
        raise PlanRefused(
            f"{work} may cost {format_usd(least)}, when the deadline has it end on {needs.fallback.pool};"
            f" the budget is {format_usd(job.budget_usd)}",
            hint=_one_of(f"budget: {least:f} USD", *(["`market: spot`, which may miss the deadline"] if spot else [])),
        )
    if foresee is None:
        raise PlanRefused(
            f"{work} needs {format_usd(least)}, {_with_parts(needs)}; the budget is {format_usd(job.budget_usd)}",
            hint=_one_of(f"budget: {least:f} USD", *_as_far_as_it_goes(job, start_usd)),
        )
    _refuse_what_hardly_ends(job, needs, prepaid_rule, *foresee, _as_far_as_it_goes(job, start_usd))


def on_demand_usd(job: Job, needs: Needs) -> Decimal:
    """Return what the job costs on demand at the most, where nothing interrupts it."""
    return usd_for(last_offer_usd(needs) * job.resources.nodes, needs.work + needs.changeover)


def is_safer_on_demand(job: Job, needs: Needs, spot: Summary | None) -> bool:
    """Whether the job, begun on spot machines, comes to no end or costs no less than on demand, whatever its budget."""
    if needs.offer.pool.market is not Market.SPOT:
        return False
    return spot is None or spot.is_mostly_unfinished or spot.mean_usd >= on_demand_usd(job, needs)


def begins_on_demand_for(
    job: Job, offers: Sequence[Offer], needs: Needs, left_usd: Decimal, saving: Saving
) -> Reason | None:
    """Return why the job's policy first asks for machines on demand, were every spot machine to be had; None if not.

    `left_usd` is what there is for training. It is what a supervisor asks of the policy at its first look.
    """
    spot = [offer for offer in offers if offer.pool.market is Market.SPOT]
    policy = job.deadline_policy
    if policy is None or needs.fallback is None or not spot:
        return None
    task = task_of(job, needs, saving)
    zones = (
        ZoneState(zone=str(offer.pool), up=True, age_s=0.0, usd_per_hour=float(offer.usd_per_hour)) for offer in spot
    )
    observation = Observation(
        work_left_s=task.work_s,
        time_left_s=task.span_s,
        holding=NOTHING,
        zones=tuple(zones),
        money_left_usd=float(left_usd),
    )
    choice = decide(policy, task, observation)
    return choice.reason if choice.mode is Mode.ON_DEMAND else None


def least_usd(job: Job, needs: Needs, prepaid_rule: PrepaidRule) -> Decimal:
    """Return the least sum that surely pays for the job, at today's prices and with no machine for nothing."""
    nodes, last, tried_usd = job.resources.nodes, needs.offer, ZERO
    if _must_end(job) and needs.offer.pool.market is Market.SPOT and needs.fallback is not None:
        last, tried_usd = needs.fallback, usd_for(needs.offer.usd_per_hour * nodes, needs.changeover)
    usd = usd_for(last.usd_per_hour * nodes, needs.work + needs.changeover)
    return usd + tried_usd + reserve_usd(nodes, last.cap_usd_per_hour, prepaid_rule)


def paid_for_by_least(
    job: Job, offers: tuple[Offer, ...], changeover: timedelta, prepaid_rule: PrepaidRule
) -> tuple[Offer, ...]:
    """Return those of the offers that the least sum can start, from the job's budget on, that also pays for the job.

    A larger sum starts more of them, and the first of these is what the job is then planned on.
    """
    starts = sorted({max(job.budget_usd, _start_usd(job, one, prepaid_rule)) for one in offers})
    for start_usd, more_usd in zip(starts, (*starts[1:], None), strict=True):
        payable = affordable(offers, job.resources.nodes, start_usd, prepaid_rule)
        needs = needs_of(job, payable, changeover)
        least = least_usd(job, needs, prepaid_rule) if needs is not None else start_usd
        if more_usd is None or max(start_usd, least).quantize(_CENT, ROUND_UP) < more_usd:
            return payable
    return offers


def last_offer_usd(needs: Needs) -> Decimal:
    """Return what a machine costs an hour on which nothing interrupts the job: its spot machine, where none does."""
    return needs.fallback.usd_per_hour if needs.fallback is not None else needs.offer.cap_usd_per_hour


def _start_usd(job: Job, offer: Offer, prepaid_rule: PrepaidRule) -> Decimal:
    return least_budget_usd(job.resources.nodes, offer.cap_usd_per_hour, prepaid_rule)


def _must_end(job: Job) -> bool:
    """Whether the job goes on demand rather than miss its deadline."""
    return job.deadline is not None and job.resources.market is MarketPolicy.AUTO


def _refuse_what_no_start_fits(job: Job, offer: Offer, changeover: timedelta) -> None:
    """Raise PlanRefused where the deadline comes before the first step of machines that are rented for it."""
    if job.deadline is None or job.deadline >= changeover or offer.pool.market is Market.OWNED:
        return
    raise PlanRefused(
        f"a changeover, from the launch of machines to their first new step, takes {format_span(changeover)}, and the"
        f" deadline is after {format_span(job.deadline)}: nothing would come of what is rented",
        hint=f"deadline: {written_span(changeover)}, and the time that the work takes",
    )


_FIRST_LOOK = 5 / 12
"""Of a changeover: network and group are made before a policy looks for the first time (5 min, where it takes 12)."""


def _refuse_the_deadline(job: Job, needs: Needs, deadline: timedelta, saving: Saving) -> None:
    tried = needs.offer.pool.market is Market.SPOT
    least = timedelta(seconds=least_span_s(task_of(job, needs, saving))) if tried else needs.work + needs.changeover
    if deadline >= least:
        return
    first = _FIRST_LOOK * needs.changeover if tried else timedelta(0)
    made = f" ({format_span(first)} of it for network and group)" if tried else ""
    once = tried and deadline >= needs.work + needs.changeover
    of = _UNSAVED if saving is Saving.NOTHING and not _must_end(job) else ""
    lost = changeover_words(needs.changeover, restart_within(needs.changeover), two=tried)
    raise PlanRefused(
        f"{format_span(needs.work)} of work and {lost} take"
        f" {format_span(least)}, and the deadline is after {format_span(deadline)}",
        hint=f"deadline: {written_span(least + first)}{made}, or more or faster machines"
        + ("; `market: on_demand` needs one changeover only" if once else of),
    )


def _refuse_what_hardly_ends(
    job: Job,
    needs: Needs,
    prepaid_rule: PrepaidRule,
    foresee: Foresee,
    is_too_long: Callable[[Needs], bool],
    otherwise: tuple[str, ...],
) -> None:
    """Raise PlanRefused where hardly a replay ends within the budget; names a sum that nine in ten end within."""
    any_sum = foresee(needs, _ANY_SUM)
    kept_usd = reserve_usd(job.resources.nodes, needs.offer.cap_usd_per_hour, prepaid_rule)
    work = _work_words(job, needs)
    safe_usd = (on_demand_usd(job, needs) + kept_usd).quantize(_CENT, ROUND_UP)
    safe = f"{format_usd(safe_usd)} at the most, {_with_parts(needs)}"
    if needs.fallback is not None and is_safer_on_demand(job, needs, any_sum):  # it is begun there: `Planner.plan`
        if job.budget_usd >= safe_usd:
            return
        raise PlanRefused(
            f"{work} would be better done on demand, for {safe}: spot machines are expected"
            f" to cost no less; the budget is {format_usd(job.budget_usd)}",
            hint=_one_of(f"budget: {safe_usd:f} USD", *otherwise),
        )
    within = foresee(needs, job.budget_usd - kept_usd) if any_sum is not None else None
    if any_sum is not None and _ended(within) * _HOPELESS >= any_sum.windows:
        return
    least, ends, ways = None, "ends in no replay, whatever its budget", []
    if any_sum is None and is_too_long(needs):
        ends = "begins anew whenever its machines go, and takes longer than what is recorded of spot machines can show"
    if any_sum is not None:
        ends = f"ends within {format_usd(job.budget_usd)} in {_ended(within)} of {any_sum.windows} replays"
        ends += f", and in {_ended(any_sum)} whatever its budget" if any_sum.p90_usd is None else ""
    if any_sum is not None and any_sum.p90_usd is not None:
        least = max(any_sum.p90_usd + kept_usd, _start_usd(job, needs.offer, prepaid_rule))
        least = least.quantize(_CENT, ROUND_UP)
        ends += f", and within {format_usd(least)} in nine of ten, with {format_usd(kept_usd)} kept aside"
        ends += ", however long it takes" if job.deadline is not None else ""
        ways.append(f"budget: {least:f} USD")
    if least is None or safe_usd < least:
        ends += f"; on demand, where nothing interrupts it, it needs {safe}"
        ways.append(f"`resources: {{market: on_demand}}` with {safe_usd:f} USD")
    raise PlanRefused(f"{work} {ends}", hint=_one_of(*ways, *otherwise))


def _does_on_spot(
    job: Job,
    offers: Sequence[Offer],
    changeover: timedelta,
    prepaid_rule: PrepaidRule,
    foresee: tuple[Foresee, Callable[[Needs], bool]] | None,
    saving: Saving,
) -> bool:
    """Whether the job is accepted as it is on spot machines alone."""
    spot = tuple(offer for offer in offers if offer.pool.market is Market.SPOT)
    spot = affordable(spot, job.resources.nodes, job.budget_usd, prepaid_rule)
    if not spot:
        return False
    alone = replace(job, resources=replace(job.resources, market=MarketPolicy.SPOT))
    try:
        refuse_what_cannot_be_kept(alone, spot, changeover, prepaid_rule, foresee, saving=saving)
    except PlanRefused:
        return False
    return True


def _as_far_as_it_goes(job: Job, start_usd: Decimal) -> tuple[str, ...]:
    """Return the way of a job that says nothing of its work, however it does; none where it cannot pay for a start."""
    if job.budget_usd < start_usd:
        return ()
    tokens = "`tokens:` in `model:`" if job.model is not None and job.model.tokens is not None else ""
    none = f"neither `work:` nor {tokens}" if job.work is not None and tokens else f"no {tokens or '`work:`'}"
    return (f"{none}, to train as far as it goes",)


def _one_of(*ways: str) -> str:
    return f"{', '.join(ways[:-1])}, or {ways[-1]}" if ways[1:] else "".join(ways)


def _ended(found: Summary | None) -> int:
    return found.windows - found.unfinished if found is not None else 0


def _with_parts(needs: Needs) -> str:
    return f"with a changeover of {format_span(needs.changeover)} and what is kept aside for its end"


def _work_words(job: Job, needs: Needs) -> str:
    return f"{format_span(needs.work)} of work on {job.resources.nodes} × {needs.offer.pool}"
