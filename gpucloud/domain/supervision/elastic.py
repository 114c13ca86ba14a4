"""Other machines for a job that trains: fewer or more of them, or those of another pool, which take over.

The job asks for all of them, always. An attempt has its nodes for good, so that one more means another attempt: saved,
ended and started again, in a `handover`, as the job's own starts tell it (pace).

*Starting*: to wait costs what those that are ready could train meanwhile; not to wait costs a handover of just those,
later. So it waits for a handover at the most: whatever comes, that loses no more than twice what foresight would (the
ski-rental rule: Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988). And only for machines that were
launched with those that are ready; what is launched in place of one that was interrupted has its whole boot before it.

*Growing*: r nodes stop for a handover, for k more after it. They make up for that within handover · r / k; they are
taken to stay as long as they have been there, as spot machines do (the longer they live, the longer they will), and
work and money must last so long. An attempt that has not worked for a handover is left alone: however machines come and
go, growing never takes more than half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.money.budget import PrepaidRule, may_launch, sooner
from gpucloud.domain.node.node import Fault
from gpucloud.domain.node.status import Stop
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.state import Attempt, ExitReason, Shortfall
from gpucloud.domain.supervision.action import (
    Action,
    Appoint,
    Arm,
    BringHome,
    CoolDown,
    Dismiss,
    EndAttempt,
    Resize,
    TakeOver,
    Wait,
)
from gpucloud.domain.supervision.capacity import (
    can_overlap,
    cool_down,
    has_enough,
    is_cooling,
    is_overdue,
    partial,
    reasons,
    refused,
    unsaved,
)
from gpucloud.domain.supervision.deadline import stands_ready
from gpucloud.domain.supervision.membership import Pace, is_usable, pace_of
from gpucloud.domain.supervision.renewal import HOMING, homing_words, is_unheard, unfit
from gpucloud.domain.supervision.snapshot import (
    CapacityChoice,
    Goal,
    Homecoming,
    Limits,
    NodeSnapshot,
    Readiness,
    Rules,
    Snapshot,
)

AWAITING = "waiting for more machines, at the latest until"
"""How the words begin that tell of a start that could be made with fewer."""


def enough_since(goal: Goal, snapshot: Snapshot, limits: Limits) -> datetime | None:
    """Return since when there are enough machines ready for an attempt, and not all; None while there are not.

    For the state: a supervisor that follows goes on with the same wait, before it knows again who is ready.
    """
    if not goal.is_range or snapshot.state.attempt is not None:
        return None
    there = _of_the_pool(snapshot, limits)
    ready = sum(node.readiness is Readiness.READY for node in there)
    fewest = goal.fewest(snapshot.state.pool.market)
    if len(there) < fewest or ready >= goal.nodes:
        return None
    return snapshot.state.enough_at or (snapshot.now if ready >= fewest else None)


def waits_until(goal: Goal, snapshot: Snapshot, limits: Limits) -> datetime | None:
    """Return until when at the most an attempt waits for more machines than are ready; None where it may start.

    Those that an attempt has left over go on at once.
    """
    ready = [n for n in _of_the_pool(snapshot, limits) if n.readiness is Readiness.READY]
    before = snapshot.state.attempts[-1].started_at if snapshot.state.attempts else None
    if len(ready) >= goal.nodes or all(before is not None and n.node.launched_at < before for n in ready):
        return None
    pace = pace_of(snapshot.state, goal.work, snapshot.now, limits, goal.nodes)
    until = (snapshot.enough_at or snapshot.now) + pace.handover
    return until if snapshot.now < until and _some_follow(ready, snapshot, pace, limits) else None


def ask_for_more(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> Resize | None:
    """Ask for the machines that an attempt lacks, where the cloud stopped trying: not often, and only if they can pay.

    A group that has its level keeps trying by itself.
    """
    missing = goal.nodes - snapshot.group.size
    wants = goal.is_range and missing > 0 and attempt.ending_reason is None and not _turns_elsewhere(snapshot)
    if not wants or not _may_ask(snapshot, rules):
        return None
    pace = pace_of(snapshot.state, goal.work, snapshot.now, rules.limits, goal.nodes)
    needed_s = pace.changeover.total_seconds() + _made_up_in_s(len(attempt.members), missing, pace.handover)
    return Resize(size=goal.nodes) if _lasts_s(attempt, goal, snapshot, pace) > needed_s else None


def order_to_grow(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Return the order to save and leave when machines stand ready with which another attempt would be worth it."""
    now, works = len(attempt.members), attempt.stepped_at
    if not goal.is_range or now >= goal.nodes or works is None or _turns_elsewhere(snapshot):
        return None
    more = _beside(attempt, snapshot, limits)[: goal.nodes - now]
    pace = pace_of(snapshot.state, goal.work, snapshot.now, limits, goal.nodes)
    if not more or snapshot.now - works < pace.handover or _some_follow(more, snapshot, pace, limits):
        return None
    cost = pace.handover + unsaved(attempt, goal, snapshot)
    stay = any((snapshot.now - node.node.launched_at) * count >= cost * now for count, node in enumerate(more, 1))
    if not stay or _lasts_s(attempt, goal, snapshot, pace) <= _made_up_in_s(now, len(more), cost):
        return None
    ready = "1 more machine is" if len(more) == 1 else f"{len(more)} more machines are"
    message = f"{ready} ready: it goes on with {now + len(more)} nodes"
    return EndAttempt(how=Stop.SAVE, reason=ExitReason.RESIZED, message=message)


def can_start(goal: Goal, snapshot: Snapshot) -> bool:
    """Whether a job that trains on a range of nodes has enough of them ready, whatever becomes of the others."""
    ready = sum(node.readiness is Readiness.READY for node in snapshot.nodes)
    return has_enough(goal, snapshot) and ready >= goal.fewest(snapshot.state.pool.market)


def ranked(ready: list[str], snapshot: Snapshot) -> tuple[str, ...]:
    """Nodes that were members before come first and keep their order, so that rank 0 moves as seldom as it can."""
    last = snapshot.state.attempts[-1].members if snapshot.state.attempts else ()
    order = {member.node_id: member.rank for member in last}
    return tuple(sorted(ready, key=lambda node_id: (order.get(node_id, len(order)), node_id)))


def _may_ask(snapshot: Snapshot, rules: Rules) -> bool:
    """Whether machines may be asked for: paid ones, well before the shut-off, of a pool that did not refuse lately."""
    pool, armed = snapshot.state.pool, snapshot.group.armed_until
    refusal = refused(snapshot, pool, snapshot.state.pool_at)
    lately = refusal is not None and snapshot.now - refusal.at < rules.limits.cooldown
    is_paid = snapshot.payable_until is not None and may_launch(armed, snapshot.now, rules.prepaid_rule)
    return is_paid and not lately and not is_cooling(snapshot.state, pool, snapshot.now) and are_alike(snapshot)


def _lasts_s(attempt: Attempt, goal: Goal, snapshot: Snapshot, pace: Pace) -> float:
    """Return how long the attempt's nodes go on at the most: while there is work, and money at the highest price."""
    usd_per_s = float(snapshot.state.dearest_usd_per_hour) * len(snapshot.group.alive) / 3600
    left_usd = float(goal.budget_usd - snapshot.spent_usd)
    paid_s = left_usd / usd_per_s if usd_per_s > 0 else math.inf
    works_s = pace.left.total_seconds() * goal.nodes / len(attempt.members) if pace.left is not None else math.inf
    return min(paid_s, works_s)


def _made_up_in_s(now: int, more: int, cost: timedelta) -> float:
    """Return after what time, the stop for `cost` included, so many more nodes have done what the stop lost."""
    return cost.total_seconds() * (now + more) / more


def _some_follow(ready: Sequence[NodeSnapshot], snapshot: Snapshot, pace: Pace, limits: Limits) -> bool:
    """Whether machines are about to be ready too: launched no more than a handover after the youngest that is.

    One that takes longer than a whole changeover is not waited for.
    """
    youngest = max(node.node.launched_at for node in ready)
    return any(
        node.readiness in (Readiness.NO, Readiness.PREPARING)
        and node.node.launched_at - youngest <= pace.handover
        and snapshot.now - node.node.launched_at < pace.changeover
        for node in _of_the_pool(snapshot, limits)
    )


def _beside(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> list[NodeSnapshot]:
    """Return the machines that are ready and take no part, the oldest first."""
    members = {member.node_id for member in attempt.members}
    found = [n for n in _of_the_pool(snapshot, limits) if n.node.id not in members and n.readiness is Readiness.READY]
    return sorted(found, key=lambda node: node.node.launched_at)


def _of_the_pool(snapshot: Snapshot, limits: Limits) -> list[NodeSnapshot]:
    return [node for node in snapshot.nodes if node.node.pool == snapshot.state.pool and is_usable(node, limits)]


def _turns_elsewhere(snapshot: Snapshot) -> bool:
    return snapshot.state.successor is not None or appointed(snapshot) is not None


# Machines of another pool take over from those that work: asked for beside them, so that no time is lost.
#
# A job with a deadline does so when it leaves spot for machines on demand, or those for spot. What was asked for and
# never came has cost nothing; what works goes on until the others stand ready. Both are paid meanwhile, and the shut-
# off is reckoned for both before any is asked for.


def appointed(snapshot: Snapshot) -> Offer | None:
    """Return the offer whose machines are to take over from those that work; None where none are to."""
    to, state = snapshot.capacity_choice, snapshot.state
    if to is None or to.offer is None or state.attempt is None or to.offer.pool.market is state.pool.market:
        return None
    return to.offer if can_overlap(to.offer, state) else None


def are_alike(snapshot: Snapshot) -> bool:
    """Whether all machines that the level counts are of the job's pool; where it falls, those of another go first."""
    return all(node.pool == snapshot.state.pool for node in snapshot.group.counted)


def results_first(
    snapshot: Snapshot, limits: Limits, message: str | None = None, *, before: Resize | None = None
) -> BringHome | Wait | None:
    """Return how results come ahead of the end of the machines that have them; None where none is awaited any more.

    All that a job has paid for may be in them, and at its end nothing else is kept waiting: while they come, and for
    `limits.homing` in which none does, the machines stay. `before` a level at which the job goes on with others, these
    are paid already or asked for only then, and nothing is trained meanwhile. That costs `limits.results` at the most,
    from the attempt's end or since somebody supervises.
    """
    if snapshot.homecoming is Homecoming.DONE or not (before is None or _gives_back(before, snapshot)):
        return None
    if snapshot.homecoming is Homecoming.NO:
        return BringHome(message=message)
    if before is None:
        return Wait(why=homing_words(snapshot, limits))
    state = snapshot.state
    ended_at = (state.attempts[-1].ended_at if state.attempts else None) or snapshot.now
    until = max(ended_at, state.owner.since if state.owner is not None else ended_at) + limits.results
    if snapshot.now >= until:
        return None
    by = format_moment(until, snapshot.now)
    return Wait(why=f"{HOMING} until {by} at the most: the machines that have them are to go")


def _gives_back(resize: Resize, snapshot: Snapshot) -> bool:
    """Whether machines go that the last attempt may have run on: all, or those that others took over from."""
    is_lower = resize.size < snapshot.group.size
    return is_lower and (resize.size == 0 or not are_alike(snapshot))


def have_beside(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """Return what to do, while an attempt works, about the machines that are to take over from its own.

    None is asked for that the cloud would refuse because its shut-off comes too soon.
    """
    successor, offer = snapshot.state.successor, appointed(snapshot)
    if attempt.ending_reason is not None or goal.self_driving:
        return None
    if successor is None:
        return _begin(attempt, goal, snapshot, offer, rules.prepaid_rule)
    if offer is None or offer.pool != successor.pool or _stands_in_vain(attempt, goal, snapshot, rules.limits):
        return Dismiss()
    bad = _unfit_beside(snapshot, rules.limits)
    if bad is not None:
        return bad
    refusal = refused(snapshot, successor.pool, successor.at)
    there = sum(node.pool == successor.pool for node in snapshot.group.counted)
    if refusal is None and there < goal.nodes:
        refusal = partial(snapshot, successor.pool, there, goal.nodes, rules.limits)
    if refusal is not None:
        return cool_down(goal, refusal, rules.limits)
    own = sum(node.pool != successor.pool for node in snapshot.group.counted)
    both = goal.nodes + max(len(attempt.members), own)
    lacks = snapshot.group.size < both and may_launch(snapshot.group.armed_until, snapshot.now, rules.prepaid_rule)
    return Resize(size=both) if lacks else None


def _is_late(to: CapacityChoice | None) -> bool:
    """Whether a change would be one too many, though the machines for it stood ready."""
    return to is not None and to.spare is not None and to.spare < timedelta(0)


def _stands_in_vain(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether those that are to take over have waited for a changeover, and there is still no time for the change.

    So long they are held for the case that one which works is interrupted, and because a pace that is measured anew may
    leave the time after all. What works has no other end than its last step: both would be paid until then.
    """
    to, successor = snapshot.capacity_choice, snapshot.state.successor
    if successor is None or not _is_late(to) or is_unheard(snapshot, limits):
        return False
    waited = snapshot.now - successor.at
    is_long = waited >= pace_of(snapshot.state, goal.work, snapshot.now, limits, goal.nodes).changeover
    return is_long and not _awaits_a_save(attempt, goal, snapshot, _come_at(snapshot))


def _come_at(snapshot: Snapshot) -> datetime:
    """Return when the last of those that are to take over was launched; when they were asked for, where none was."""
    successor = snapshot.state.successor
    there = (n.node.launched_at for n in snapshot.nodes if successor is not None and n.node.pool == successor.pool)
    return max(there, default=successor.at if successor is not None else snapshot.now)


def _unfit_beside(snapshot: Snapshot, limits: Limits) -> CoolDown | None:
    """Return the cooldown of a pool of whose machines one can take over from nothing: all would wait for it, paid."""
    pools = {n.node.id: n.node.pool for n in snapshot.nodes}
    to = snapshot.state.successor
    bad = next((node_id for node_id in unfit(snapshot, limits) if to is not None and pools[node_id] == to.pool), None)
    if bad is None:
        return None
    return CoolDown(
        pool=pools[bad],
        fault=Fault.CAPACITY,
        code="Unprepared",
        message=f"{bad} could not be made ready",
        length=limits.cooldown,
        longest=limits.cooldown_longest,  # all of them are paid each time, unlike machines that a cloud has not
    )


def order_to_move(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Return the order to save and leave, when the machines that take over stand ready, or none can stand beside."""
    to = snapshot.capacity_choice
    if attempt.ending_reason is not None or to is None:
        return None
    successor, offer = snapshot.state.successor, appointed(snapshot)
    if successor is not None:
        ready = to.mode is not Mode.BOTH and offer is not None and offer.pool == successor.pool
        if _is_late(to) or not ready or not stands_ready(goal, snapshot):
            return None
        awaited = _awaits_a_save(attempt, goal, snapshot, _come_at(snapshot))
        return _order(f"{successor.pool} takes over") if not awaited else None
    decision = to.capacity_decision
    spare = decision.shortfall is not Shortfall.MONEY and _awaits_a_save(attempt, goal, snapshot, decision.since)
    if spare or not _leaves(to, snapshot, offer) or _boots_too_late(to, goal, snapshot, limits):
        return None
    return _order(f"{to.mode.value}: {reasons(to, snapshot.now)}")


def _boots_too_late(to: CapacityChoice, goal: Goal, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether what works is nearer to its end than machines that begin to boot once it is given up."""
    if to.spare is None or to.mode is Mode.IDLE:
        return False
    pace = pace_of(snapshot.state, goal.work, snapshot.now, limits, goal.nodes)
    return to.spare < pace.start - pace.handover


def _awaits_a_save(attempt: Attempt, goal: Goal, snapshot: Snapshot, since: datetime) -> bool:
    """Whether a change that was to come then waits for the next save of a script that saves only when it likes.

    Not for longer than the work took that was not saved then, nor for a save that is overdue: both machines are paid,
    or the dearer ones, meanwhile.
    """
    before = unsaved(attempt, goal, snapshot) - (snapshot.now - since)
    return goal.saves_unasked and not is_overdue(attempt, goal, snapshot) and snapshot.now - since < before


def succeed(goal: Goal, snapshot: Snapshot) -> Action | None:
    """Return what becomes, once the attempt is over, of machines that were asked for beside its own."""
    successor = snapshot.state.successor
    if successor is None:
        return None
    there = sum(node.pool == successor.pool for node in snapshot.group.counted)
    to = snapshot.capacity_choice
    if to is not None and to.offer is not None and to.offer.pool == successor.pool and there > 0:
        is_bought = successor.pool.market is Market.ON_DEMAND  # the rest is asked for as for any other start
        return TakeOver() if is_bought or there >= goal.nodes else Dismiss()
    return TakeOver() if (to is None or to.mode is not Mode.IDLE) and there >= goal.nodes else Dismiss()


def _begin(
    attempt: Attempt, goal: Goal, snapshot: Snapshot, offer: Offer | None, prepaid_rule: PrepaidRule
) -> Action | None:
    """The shut-off first, sooner: it pays for twice as many machines. Before that, what was asked for in vain goes."""
    there = sum(node.pool == snapshot.state.pool for node in snapshot.group.counted)
    own = max(goal.nodes if are_alike(snapshot) else there, len(attempt.members))
    if snapshot.group.size > own:
        return Resize(size=own)
    if (
        offer is None
        or _is_late(snapshot.capacity_choice)
        or not may_launch(snapshot.payable_with_successor, snapshot.now, prepaid_rule)
    ):
        return None
    until = sooner(snapshot.group.armed_until, snapshot.payable_with_successor)
    return Arm(until=until) if until is not None else Appoint(offer=offer)


def _leaves(to: CapacityChoice, snapshot: Snapshot, offer: Offer | None) -> bool:
    """Whether the machines are given up before others are there."""
    on_demand = snapshot.state.pool.market is Market.ON_DEMAND
    if to.mode is Mode.IDLE:
        return on_demand
    if to.offer is None or to.offer.pool.market is snapshot.state.pool.market:
        return False
    beside = offer is not None and snapshot.payable_with_successor is not None
    return not beside and (not on_demand or to.capacity_decision.shortfall is Shortfall.MONEY)


def _order(message: str) -> EndAttempt:
    return EndAttempt(how=Stop.SAVE, reason=ExitReason.RESCHEDULED, message=message)
