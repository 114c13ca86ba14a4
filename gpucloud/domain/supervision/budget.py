"""Another budget for a job that runs: what it may be lowered to, and what follows for the shut-off."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.ledger import usd_for
from gpucloud.domain.state import BudgetChange, BudgetWish, JobState
from gpucloud.domain.supervision.action import ChangeBudget
from gpucloud.domain.supervision.prepaid import least_budget_usd, reserve_usd, sooner
from gpucloud.domain.supervision.seen import Rules, Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the money rule needs of a job: spent so far, machines alive, and how many it needs to go on."""

    now: datetime
    spent_usd: Decimal
    alive: int
    needed: int


def change_budget(seen: Seen, nodes: int, rules: Rules) -> ChangeBudget | None:
    """Take up what was wished for the budget since the last pass, in its order; the last one that may be stands."""
    if not seen.budget_wishes:
        return None
    alive = len(seen.group.alive)
    standing = Standing(now=seen.now, spent_usd=seen.spent_usd, alive=alive, needed=max(nodes, alive))
    changed = taken_up(seen.state, seen.budget_wishes, standing, rules)
    until = shut_off(changed, standing, rules) if alive or seen.group.size else None
    return ChangeBudget(
        changes=changed.budget_changes[len(seen.state.budget_changes) :],
        budget_usd=changed.budget_usd,
        until=sooner(seen.group.armed_until, until),
        taken=tuple(wish.id for wish in seen.budget_wishes),
    )


def taken_up(state: JobState, wishes: Iterable[BudgetWish], standing: Standing, rules: Rules) -> JobState:
    """Return the state with every wish written into it that it does not know yet; one that cannot be is refused."""
    for wish in wishes:
        if any(change.id == wish.id for change in state.budget_changes):
            continue
        refused = refusal(state, wish.usd, standing, rules)
        change = BudgetChange(
            id=wish.id, by=wish.by, at=standing.now, old_usd=state.budget_usd, new_usd=wish.usd, refused=refused
        )
        budget = state.budget_usd if refused else wish.usd
        state = replace(state, budget_usd=budget, budget_changes=(*state.budget_changes, change))
    return state


def refusal(state: JobState, usd: Decimal, standing: Standing, rules: Rules) -> str | None:
    """Return why the budget cannot be that, naming the least sum; None when it can. Raising it always can."""
    least = least_to_lower_to(state, standing, rules)
    if usd >= state.budget_usd or usd >= least:
        return None
    cents = Decimal(math.ceil(least * 100)) / 100
    return f"{usd} USD is less than what is spent and what saving and ending costs: at least {cents:.2f} USD"


def least_to_lower_to(state: JobState, standing: Standing, rules: Rules) -> Decimal:
    """Return the least budget of the job now: what is spent, the time for a last save, and the reserve.

    Without machines, it is what a start costs at the least; for a job that has ended, what it has cost.
    """
    cap, wall = state.dearest_usd_per_hour, rules.wall
    if standing.alive:
        saving = usd_for(cap * standing.alive, min(rules.limits.save, wall.least))
        return standing.spent_usd + saving + reserve_usd(standing.alive, cap, wall)
    if state.status.ended:
        return standing.spent_usd
    return standing.spent_usd + least_budget_usd(standing.needed, cap, wall)


def shut_off(state: JobState, standing: Standing, rules: Rules) -> datetime:
    """Return until when the budget pays for the machines that are alive, a start worth it or not.

    Unlike `prepaid.paid_until` it is never None: machines that live must be ended at some time.
    """
    cap, nodes, wall = state.dearest_usd_per_hour, max(standing.alive, 1), rules.wall
    rate = cap * nodes
    if rate <= 0:
        return standing.now + wall.horizon
    left = state.budget_usd - standing.spent_usd - reserve_usd(nodes, cap, wall)
    seconds = max(0.0, float(left * 3600 / rate))
    return standing.now + min(wall.horizon, timedelta(seconds=seconds))


def used_up(state: JobState) -> str:
    """Return what to say when a job ends at its budget: the sum, what is kept, and how it goes on."""
    saved = f"step {state.checkpoint.step} is saved" if state.checkpoint else "nothing is saved"
    return (
        f"the budget of {plain_usd(state.budget_usd)} USD is used up, {saved}:"
        f" gpucloud train {state.job} --budget {plain_usd(2 * state.budget_usd)}USD goes on from there"
    )


def plain_usd(usd: Decimal) -> str:
    """Return the sum as a person writes it: at least two places, no zeros behind them."""
    text = f"{usd.normalize():f}"
    whole, _, places = text.partition(".")
    return f"{whole}.{places.ljust(2, '0')}" if places else whole
