"""Another budget for a job: wished for by anybody, taken up by whoever supervises it, or here when nobody does."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_UP, Decimal

from gpucloud.domain.state import JobState
from gpucloud.domain.supervision.budget import Standing, least_to_lower_to, shut_off, taken_up
from gpucloud.domain.supervision.seen import Rules
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.lease import Lease

_CENT = Decimal("0.01")


def standing(asker: Asker, state: JobState) -> Standing:
    """Return what the money rule needs of a job, as it is seen from any terminal."""
    now = asker.clock.now()
    spent = Cashier(asker.jobs, asker.market, asker.terms).spend(state, now).spent_usd
    alive = len(asker.listed(state).alive)
    members = len(state.attempts[-1].members) if state.attempts else 1
    return Standing(now=now, spent_usd=spent, alive=alive, needed=max(alive, members))


def take_up_here(asker: Asker, lease: Lease, rules: Rules) -> JobState:
    """Take up what is wished for, with the lease that nobody else holds; return the state then.

    Where the shut-off comes closer, the cloud has it before the state says so.
    """
    state, wishes = lease.state, asker.jobs.request().budgets
    seen = standing(asker, state)
    changed = taken_up(state, wishes, seen, rules)
    until = shut_off(changed, seen, rules)
    if state.group is not None and seen.alive and state.paid_until is not None and until < state.paid_until:
        lease.confirm()
        asker.group.arm(state.group, until)
        changed = replace(changed, paid_until=until)
    lease.write(changed)
    asker.jobs.take_up(tuple(wish.id for wish in wishes))
    return lease.state


def least_usd(asker: Asker, state: JobState, rules: Rules) -> str:
    """Return the least sum that the budget can be lowered to now, in USD, rounded up to cents."""
    least = least_to_lower_to(state, standing(asker, state), rules)
    return f"{least.quantize(_CENT, ROUND_UP):f}"
