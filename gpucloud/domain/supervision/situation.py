"""How a job with a deadline stands: what its policy is told, in the words of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.job import Market
from gpucloud.domain.ledger import usd_for
from gpucloud.domain.offer import Offer
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.observation import NOTHING, Holding, Mode, Observation, Task, ZoneState
from gpucloud.domain.state import JobState
from gpucloud.domain.supervision.capacity import is_cooling
from gpucloud.domain.supervision.membership import has_notice, is_gone
from gpucloud.domain.supervision.pace import Pace, pace_of
from gpucloud.domain.supervision.prepaid import reserve_usd
from gpucloud.domain.supervision.seen import Goal, NodeSeen, Readiness, Rules, Seen

_NO_TIME = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that an answer rests on.

    `span` is from the run's first order to its deadline; `dear` is the cheapest offer on demand, `zones` what is known
    of the spot pools.
    """

    goal: Goal
    policy: Policy
    seen: Seen
    pace: Pace
    work: timedelta
    left: timedelta
    time_left: timedelta
    span: timedelta
    money_left_usd: Decimal
    dear: Offer
    holding: Holding
    zones: tuple[ZoneState, ...]
    tick: timedelta

    @property
    def slack(self) -> timedelta:
        """The time that is left over the work."""
        return self.time_left - self.left


def situation(goal: Goal, seen: Seen, rules: Rules) -> Situation | None:
    """Return how the job stands; None where there is no deadline to keep, or too little is known to reckon with one."""
    if goal.policy is None or goal.first_at is None or goal.deadline_at is None:
        return None
    if not goal.buys_time or seen.state.status.ended:
        return None
    pace = pace_of(seen.state, goal.work, seen.now, rules.limits, goal.nodes)
    dear = min((o for o in seen.candidates if o.pool.market is Market.ON_DEMAND), key=price, default=None)
    if pace.work is None or pace.left is None or dear is None:
        return None
    kept_usd = reserve_usd(goal.nodes, dear.cap_usd_per_hour, rules.wall)
    return Situation(
        goal=goal,
        policy=goal.policy,
        seen=seen,
        pace=pace,
        work=pace.work,
        left=pace.left,
        time_left=goal.deadline_at - seen.now,
        span=goal.deadline_at - goal.first_at,
        money_left_usd=goal.budget_usd - seen.spent_usd - kept_usd,
        dear=dear,
        holding=_holding(goal, seen, pace),
        zones=_zones(goal, seen, goal.first_at),
        tick=min(rules.limits.ask_again, pace.changeover / 6),
    )


def task_of(case: Situation) -> Task:
    """Return what stays the same for as long as nothing is measured anew."""
    return Task(
        work_s=case.work.total_seconds(),
        span_s=case.span.total_seconds(),
        changeover_s=case.pace.changeover.total_seconds(),
        on_demand_usd_per_hour=float(case.dear.usd_per_hour),
        tick_s=case.tick.total_seconds(),
        handover_s=case.pace.handover.total_seconds(),
        nodes=case.goal.nodes,
        least_nodes=case.goal.fewest(Market.SPOT),
        begins_anew=case.goal.begins_anew,
    )


def observed(case: Situation) -> Observation:
    """Return what changes."""
    return Observation(
        work_left_s=case.left.total_seconds(),
        time_left_s=case.time_left.total_seconds(),
        holding=case.holding,
        zones=case.zones,
        money_left_usd=float(case.money_left_usd),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What tables are made for: the task, in how many zones there may be spot machines, of what size and price."""

    task: Task
    zones: int
    gpus: int
    spot_usd_per_hour: float


def lesson(goal: Goal, seen: Seen, rules: Rules) -> Lesson | None:
    """Return what the learned policy's tables are to be made for; None where they are of no use."""
    case = situation(goal, seen, rules) if goal.policy is Policy.LEARNED else None
    offers = [offer for offer in seen.candidates if offer.pool.market is Market.SPOT]
    if case is None or not offers:
        return None
    cheapest = min(offers, key=price)
    usd_per_hour = float(cheapest.usd_per_hour)
    return Lesson(task=task_of(case), zones=len(offers), gpus=cheapest.gpus, spot_usd_per_hour=usd_per_hour)


def can_stand_beside(offer: Offer, state: JobState) -> bool:
    """Whether machines of the offer may be asked for while others work: in the same group, made for the same way.

    With EFA they are in one placement group, which is in the zone of those that work.
    """
    same = offer.pool.region == state.pool.region and offer.gpu == state.gpu and offer.efa in state.efa
    near = not offer.efa.interfaces or offer.pool.zone == state.pool.zone
    return same and near and state.group is not None


def stands_ready(goal: Goal, seen: Seen) -> bool:
    """Whether the machines that were asked for beside those that work could take over now."""
    successor = seen.state.successor
    there = [n for n in _there(seen) if successor is not None and n.node.pool == successor.pool]
    return sum(node.readiness is Readiness.READY for node in there) >= goal.nodes


def rest_usd(case: Situation) -> Decimal:
    """Return what the work that is left costs on demand."""
    return usd_for(case.dear.usd_per_hour * case.goal.nodes, case.left)


def price(offer: Offer) -> Decimal:
    """Return what offers are ranked by."""
    return offer.usd_per_hour


def _holding(goal: Goal, seen: Seen, pace: Pace) -> Holding:
    """Return what the job has: machines that work, or enough of them that boot. Fewer are nothing yet."""
    state, attempt = seen.state, seen.state.attempt
    successor = state.successor
    there = [node for node in _there(seen) if successor is None or node.node.pool != successor.pool]
    held = len(there) if attempt is None else len(attempt.members)
    if attempt is None and (held < goal.fewest(state.pool.market) or is_cooling(state, state.pool, seen.now)):
        return NOTHING
    launched = [node.node.launched_at for node in there] or [seen.now]
    works = attempt is not None and attempt.stepped_at is not None
    boot = _NO_TIME if works else _rest(pace.changeover, seen.now - max(launched))
    if state.pool.market is Market.SPOT:
        age = seen.now - min(launched)
        zone = str(state.pool)
        return Holding(
            mode=Mode.SPOT,
            zone=zone,
            boot_s=boot.total_seconds(),
            spot_age_s=age.total_seconds(),
            nodes=held if held < goal.nodes else 0,
        )
    if successor is None or successor.pool.market is not Market.SPOT:
        return Holding(mode=Mode.ON_DEMAND, boot_s=boot.total_seconds())
    boots = pace.changeover - pace.handover
    beside = _NO_TIME if stands_ready(goal, seen) else _rest(boots, seen.now - successor.at)
    return Holding(
        mode=Mode.BOTH, zone=str(successor.pool), boot_s=boot.total_seconds(), beside_s=beside.total_seconds()
    )


def _there(seen: Seen) -> list[NodeSeen]:
    return [n for n in seen.nodes if not is_gone(n) and not n.node.relieved and not has_notice(n)]


def _rest(whole: timedelta, passed: timedelta) -> timedelta:
    """What of a span is to come: a second at the least, for it is not over."""
    return max(whole - passed, timedelta(seconds=1))


def _zones(goal: Goal, seen: Seen, first_at: datetime) -> tuple[ZoneState, ...]:
    """Return the spot pools as they are known: one that refused is down while it cools, and worth a try again then.

    So is the job's own for as long as it gives no more than a part of the nodes.
    """
    state = seen.state
    spot = [offer for offer in seen.candidates if offer.pool.market is Market.SPOT]
    if state.attempt is not None and state.pool.market is not Market.SPOT:
        spot = [offer for offer in spot if can_stand_beside(offer, state)]
    there = sum(node.node.pool == state.pool for node in _there(seen))
    part = there if goal.fewest(state.pool.market) <= there < goal.nodes else 0
    own = state.pool
    return tuple(_zone(offer, state, seen.now, part if offer.pool == own else 0, first_at) for offer in spot)


def _zone(offer: Offer, state: JobState, now: datetime, part: int, first_at: datetime) -> ZoneState:
    cooldown = next((c for c in state.cooldowns if c.pool == offer.pool), None)
    up = (cooldown is None or cooldown.until <= now) and not part
    launches = [life.launched_at for life in state.nodes if life.pool == offer.pool]
    if cooldown is None:
        since = min(launches, default=first_at)
    else:
        since = cooldown.until if up else max([cooldown.first_at, *launches])
    age_s = (now - since).total_seconds()
    return ZoneState(zone=str(offer.pool), up=up, age_s=age_s, usd_per_hour=float(offer.usd_per_hour), nodes=part)
