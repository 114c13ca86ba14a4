"""Another budget for a job: an order like any other, in force once the cloud has the shut-off that it pays for."""

from __future__ import annotations

from dataclasses import replace

from gpucloud.domain.money.prepaid import sooner
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.budget import Standing, in_cents, least_to_lower_to, shut_off
from gpucloud.domain.supervision.seen import Rules
from gpucloud.domain.supervision.self_driving import arming, most_machines
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.lease import Lease
from gpucloud.usecases.money.spend import SpendTracker


def standing(asker: Asker, state: JobState) -> Standing:
    """Return what the money rule needs of a job, as it is seen from any terminal."""
    tracker = SpendTracker(asker.jobs, asker.market, asker.terms)
    return tracker.standing(state, asker.listed(state), asker.clock.now())


def bring_closer(asker: Asker, order: Order, rules: Rules) -> bool:
    """Have the cloud shut the machines off no later than the order's budget pays for; return whether that was closer.

    What the cloud has armed counts. It needs no lease: nobody who goes by the same order arms a later time.
    """
    state = asker.state()
    listed = asker.listed(state)
    if state.group is None or not listed.most_alive:
        return False
    closer = sooner(listed.armed_until, shut_off(state, order.budget_usd, standing(asker, state), rules))
    if closer is None:
        return False
    asker.group.arm(state.group, closer)
    if order.unattended is not None:  # after it is so: what was armed before counts until then
        machines = most_machines(state, order.resolved.resources.nodes, listed.most_alive)
        acted_on = replace(state, order_number=max(state.order_number, order.number))
        asker.jobs.arm(arming(acted_on, at=asker.clock.now(), machines=machines, until=closer))
    return True


def obey_here(asker: Asker, lease: Lease, order: Order, rules: Rules) -> bool:
    """Act on the order with the lease that nobody else holds; return whether the shut-off came closer."""
    lease.confirm()
    closer = bring_closer(asker, order, rules)
    listed = asker.listed(lease.state)
    lease.write(
        replace(
            lease.state,
            order_number=max(lease.state.order_number, order.number),
            paid_until=listed.armed_until if listed.exists else lease.state.paid_until,
        )
    )
    return closer


def least_usd(asker: Asker, state: JobState, rules: Rules) -> str:
    """Return the least sum that the budget can be lowered to now, in USD, rounded up to cents."""
    return in_cents(least_to_lower_to(state, standing(asker, state), rules))
