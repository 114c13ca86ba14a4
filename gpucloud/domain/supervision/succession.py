"""Machines of another pool take over from those that work: asked for beside them, so that no time is lost.

A job with a deadline does so when it leaves spot for machines on demand, or those for spot. What was asked for and
never came has cost nothing; what works goes on until the others stand ready. Both are paid meanwhile, and the shut-off
is reckoned for both before any is asked for.
"""

from __future__ import annotations

from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.policy.observation import Mode
from gpucloud.domain.money.prepaid import Wall, may_launch, sooner
from gpucloud.domain.node.status import Stop
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.state import Attempt, ExitReason, Shortfall
from gpucloud.domain.supervision.action import Action, Appoint, Arm, Dismiss, EndAttempt, Resize, TakeOver
from gpucloud.domain.supervision.capacity import cool_down, partial, refused
from gpucloud.domain.supervision.deadline import can_stand_beside, stands_ready
from gpucloud.domain.supervision.seen import Goal, Heading, Rules, Seen


def appointed(seen: Seen) -> Offer | None:
    """Return the offer whose machines are to take over from those that work; None where none are to."""
    to, state = seen.heading, seen.state
    if to is None or to.offer is None or state.attempt is None or to.offer.pool.market is state.pool.market:
        return None
    return to.offer if can_stand_beside(to.offer, state) else None


def are_alike(seen: Seen) -> bool:
    """Whether all machines that the level counts are of the job's pool; where it falls, those of another go first."""
    return all(node.pool == seen.state.pool for node in seen.group.counted)


def have_beside(attempt: Attempt, goal: Goal, seen: Seen, rules: Rules) -> Action | None:
    """Return what to do, while an attempt works, about the machines that are to take over from its own.

    None is asked for that the cloud would refuse because its shut-off comes too soon.
    """
    successor, offer = seen.state.successor, appointed(seen)
    if attempt.ending_reason is not None or goal.self_driving:
        return None
    if successor is None:
        return _begin(attempt, goal, seen, offer, rules.wall)
    if offer is None or offer.pool != successor.pool:
        return Dismiss()
    refusal = refused(seen, successor.pool, successor.at)
    there = sum(node.pool == successor.pool for node in seen.group.counted)
    if refusal is None and there < goal.nodes:
        refusal = partial(seen, successor.pool, there, goal.nodes, rules.limits)
    if refusal is not None:
        return cool_down(goal, refusal, rules.limits)
    own = sum(node.pool != successor.pool for node in seen.group.counted)
    both = goal.nodes + max(len(attempt.members), own)
    lacks = seen.group.size < both and may_launch(seen.group.armed_until, seen.now, rules.wall)
    return Resize(size=both) if lacks else None


def order_to_move(attempt: Attempt, goal: Goal, seen: Seen) -> EndAttempt | None:
    """Return the order to save and leave, when the machines that take over stand ready, or none can stand beside."""
    to = seen.heading
    if attempt.ending_reason is not None or to is None:
        return None
    successor, offer = seen.state.successor, appointed(seen)
    if successor is not None:
        ready = to.mode is not Mode.BOTH and offer is not None and offer.pool == successor.pool
        return _order(f"{successor.pool} takes over") if ready and stands_ready(goal, seen) else None
    return _order(f"{to.mode.value}: {to.capacity_decision.why}") if _leaves(to, seen, offer) else None


def succeed(goal: Goal, seen: Seen) -> Action | None:
    """Return what becomes, once the attempt is over, of machines that were asked for beside its own."""
    successor = seen.state.successor
    if successor is None:
        return None
    there = [node for node in seen.group.counted if node.pool == successor.pool]
    wanted = seen.heading is None or seen.heading.mode is not Mode.IDLE
    return TakeOver() if wanted and len(there) >= goal.nodes else Dismiss()


def _begin(attempt: Attempt, goal: Goal, seen: Seen, offer: Offer | None, wall: Wall) -> Action | None:
    """The shut-off first, sooner: it pays for twice as many machines. Before that, what was asked for in vain goes."""
    there = sum(node.pool == seen.state.pool for node in seen.group.counted)
    own = max(goal.nodes if are_alike(seen) else there, len(attempt.members))
    if seen.group.size > own:
        return Resize(size=own)
    if offer is None or not may_launch(seen.payable_with_successor, seen.now, wall):
        return None
    until = sooner(seen.group.armed_until, seen.payable_with_successor)
    return Arm(until=until) if until is not None else Appoint(offer=offer)


def _leaves(to: Heading, seen: Seen, offer: Offer | None) -> bool:
    """Whether the machines are given up before others are there."""
    on_demand = seen.state.pool.market is Market.ON_DEMAND
    if to.mode is Mode.IDLE:
        return on_demand
    if to.offer is None or to.offer.pool.market is seen.state.pool.market:
        return False
    beside = offer is not None and seen.payable_with_successor is not None
    return not beside and (not on_demand or to.capacity_decision.shortfall is Shortfall.MONEY)


def _order(message: str) -> EndAttempt:
    return EndAttempt(how=Stop.SAVE, reason=ExitReason.RESCHEDULED, message=message)
