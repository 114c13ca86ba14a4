"""What a job with a deadline is to run on now: how it stands, as its policy is told, as in a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.job.quantities import format_span, format_usd
from gpucloud.domain.job.spec import Market, Policy
from gpucloud.domain.market.learned import Lesson
from gpucloud.domain.market.policies import NOTHING, Choice, Holding, Mode, Observation, Reason, Task, ZoneState
from gpucloud.domain.market.policy import decide
from gpucloud.domain.money.budget import reserve_usd
from gpucloud.domain.money.ledger import usd_for
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.state import CapacityDecision, Cooldown, Shortfall
from gpucloud.domain.supervision.capacity import can_overlap, is_cooling, is_mute, is_overdue, unsaved, zones_of
from gpucloud.domain.supervision.membership import Pace, has_notice, is_gone, pace_of
from gpucloud.domain.supervision.renewal import is_unheard
from gpucloud.domain.supervision.snapshot import CapacityChoice, Goal, NodeSnapshot, Readiness, Rules, Snapshot

_ABANDONED = Decimal("0.9")  # machines on demand are given up for money only where so little of their work is paid
_NO_TIME = timedelta(0)


def capacity_choice(goal: Goal, snapshot: Snapshot, rules: Rules) -> CapacityChoice | None:
    """Return what the job is to run on now.

    None where there is no deadline to keep, nobody knows yet how much work there is, or nothing is offered on demand:
    the job then goes on as without a deadline.
    """
    case = situation(goal, snapshot, rules)
    if case is None:
        return None
    if is_unheard(snapshot, rules.limits):
        return _as_before(case)
    shortfall = _shortfall(case)
    choice = _choice(case, shortfall)
    offer = _offer(case, choice)
    # What runs needs no offer to go on; what is wanted and cannot be had leaves everything as it is.
    mode = choice.mode if offer is not None or choice.mode is Mode.IDLE else case.holding.mode
    for_money = shortfall is Shortfall.MONEY or choice.reason is Reason.BUDGET
    return CapacityChoice(
        mode=mode,
        offer=offer,
        capacity_decision=_capacity_decision(case, _shown(case, mode), choice.reason, shortfall),
        spare=None if for_money else case.spare,
    )


def _as_before(case: Situation) -> CapacityChoice | None:
    """What runs, and what was said of it: by the steps that are known all work of meanwhile would be to do still."""
    before, mode = case.snapshot.state.capacity_decision, Mode.ON_DEMAND if _is_bought(case) else case.holding.mode
    offer = _offer(case, Choice(mode=mode, zone=case.holding.zone))
    return CapacityChoice(mode=mode, offer=offer, capacity_decision=before, spare=case.spare) if before else None


def _shortfall(case: Situation) -> Shortfall | None:
    """What is missing for the deadline. Machines on demand that work are kept as long as they may be enough."""
    before = said.shortfall if (said := case.snapshot.state.capacity_decision) is not None else None
    keeps = case.holding.mode in (Mode.ON_DEMAND, Mode.BOTH) and before is not Shortfall.MONEY
    short = case.money_left_usd < rest_usd(case) * (_ABANDONED if keeps else 1)
    if short and case.policy is not Policy.ON_DEMAND:
        return Shortfall.MONEY
    starts = case.pace.start if case.holding.mode is Mode.IDLE else timedelta(seconds=case.holding.boot_s)
    clear = case.pace.changeover / 2 if before is Shortfall.TIME else _NO_TIME  # what was said is not taken back soon
    return Shortfall.TIME if case.slack < starts + clear else None


def _choice(case: Situation, shortfall: Shortfall | None) -> Choice:
    if shortfall is Shortfall.MONEY:  # the budget is hard: the deadline yields, and the job goes on where it is cheap
        zone = _cheap(case)
        return Choice(mode=Mode.SPOT if zone else Mode.IDLE, zone=zone, reason=Reason.BUDGET)
    missed = _missed(case) if shortfall is Shortfall.TIME else None
    if missed is not None:
        return missed
    choice = decide(case.policy, task_of(case), observed(case), case.goal.tables)
    return _before_it_is_late(case, _steadily(case, _on_fresh_news(case, choice)))


def _cheap(case: Situation) -> str | None:
    """Return the spot pool that the job's machines are in, or else the cheapest that may be asked."""
    cheap = min((zone for zone in case.zones if zone.up), key=lambda zone: zone.usd_per_hour, default=None)
    return case.holding.zone if case.holding.mode is Mode.SPOT else cheap.zone if cheap else None


def _missed(case: Situation) -> Choice | None:
    """Return spot where the work alone takes longer than there is time: dearer machines would not be there in time.

    None where a short start may still do, where machines on demand are there, and for who asked for those.
    """
    hopeless = case.slack < _NO_TIME and case.policy is not Policy.ON_DEMAND and not case.saves_nothing
    whole = case.holding.mode is Mode.SPOT and case.holding.nodes == 0
    if not hopeless or not (whole or (case.holding.mode is Mode.IDLE and not _is_bought(case))):
        return None
    zone = _cheap(case)
    if zone is None or not (whole or zone in _worthwhile(case)):
        return None
    return Choice(mode=Mode.SPOT, zone=zone, reason=Reason.MISSED)


def _on_fresh_news(case: Situation, choice: Choice) -> Choice:
    """The choice, but machines on demand are not bought on old news, just before spot may be asked again.

    What asking costs is the wait, which needs time to try spot after it. The news is fresh while any pool's refusal is
    younger than the wait for the next answer would be: pools that refuse in turns are not waited for for ever. A moment
    is no wait: pools that refused in one breath are all asked again.
    """
    buys = case.holding.mode is Mode.IDLE and choice.mode is Mode.ON_DEMAND and not _is_bought(case)
    if not buys or choice.reason not in (Reason.EXPECTED, Reason.BEHIND):
        return choice
    rests = [c.until - case.snapshot.now for c in _exclusions(case)]
    if not rests or len(rests) < len(_worthwhile(case)):
        return choice
    if min(rests) > case.tick and min(rests) + max(rests) >= case.excluded_for:
        return choice
    if case.slack - min(rests) < 2 * case.pace.changeover + case.tick:
        return choice
    told = observed(case)
    there = replace(told, zones=tuple(replace(zone, up=True, age_s=0.0) for zone in told.zones))
    taken = decide(case.policy, task_of(case), there, case.goal.tables).mode is Mode.SPOT
    return Choice(mode=Mode.IDLE, reason=Reason.WAIT) if taken else choice


def _exclusions(case: Situation) -> list[Cooldown]:
    """Return the cooldowns of the spot pools that would be taken."""
    spot, now = _worthwhile(case), case.snapshot.now
    return [c for c in case.snapshot.state.cooldowns if str(c.pool) in spot and c.until > now]


def _worthwhile(case: Situation) -> set[str]:
    """Return the spot pools that cost less than machines on demand: policies take no others."""
    return {zone.zone for zone in case.zones if zone.usd_per_hour < float(case.dear.usd_per_hour)}


def _is_bought(case: Situation) -> bool:
    """Whether machines on demand were asked for that do not work yet, to take over too; some of them may be missing."""
    state, group = case.snapshot.state, case.snapshot.group
    pool = state.successor.pool if state.successor is not None else state.pool
    if (state.attempt is not None and state.successor is None) or pool.market is not Market.ON_DEMAND:
        return False
    asked = group.exists and group.size > (case.goal.nodes if state.successor is not None else 0)
    held = any(node.pool == pool for node in group.counted)
    return (asked or held) and not is_cooling(state, pool, case.snapshot.now)


def _steadily(case: Situation, choice: Choice) -> Choice:
    """The choice, but what was begun is ended first, where neither deadline nor budget stands against it.

    Machines on demand work until spot machines stand ready, and those that were asked for beside them take over when
    they come. A policy may think otherwise a moment later; here each change of mind costs a start. Those that were just
    bought are left by none: their minimum is charged, and were spot refused, all that was paid would be paid again.
    """
    held, zone = case.holding.mode, case.holding.zone
    if _is_bought(case) and choice.mode is not Mode.ON_DEMAND:
        return Choice(mode=Mode.ON_DEMAND)
    if choice.reason in (Reason.DEADLINE, Reason.BUDGET) or choice.mode is Mode.SPOT:
        return choice
    if held is Mode.ON_DEMAND and choice.mode is Mode.IDLE:
        return Choice(mode=Mode.ON_DEMAND)
    if held is not Mode.BOTH:
        return choice
    if case.holding.beside_s > 0:
        return Choice(mode=Mode.BOTH, zone=zone)
    in_time = case.slack >= case.pace.changeover + case.handover
    return Choice(mode=Mode.SPOT, zone=zone) if in_time else Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)


def _before_it_is_late(case: Situation, choice: Choice) -> Choice:
    """On demand in place of spot machines whose loss would be one too many; not where the change itself would be.

    In a replay, machines that run lose no time. Here steps turn out slower and starts longer than they were measured.
    """
    successor = case.snapshot.state.successor
    if case.holding.mode is not Mode.SPOT or choice.reason is Reason.BUDGET:
        return choice
    if successor is None and case.spare is not None and case.spare < _NO_TIME:
        return choice if choice.mode is Mode.SPOT else Choice(mode=Mode.SPOT, zone=case.holding.zone)
    needed = case.pace.changeover + timedelta(seconds=case.holding.boot_s)
    if successor is not None:
        needed += case.pace.changeover / 2  # not to ask and dismiss in turns
    if choice.mode is not Mode.SPOT or case.slack >= needed:
        return choice
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)


def _offer(case: Situation, choice: Choice) -> Offer | None:
    """Return where the machines are to come from; None for waiting, which is also all that is left when none can."""
    usable = [o for o in case.snapshot.candidates if not is_cooling(case.snapshot.state, o.pool, case.snapshot.now)]
    spot = [o for o in usable if o.pool.market is Market.SPOT]
    match choice.mode:
        case Mode.IDLE:
            return None
        case Mode.SPOT | Mode.BOTH:
            return _own(case, spot) or next((o for o in spot if str(o.pool) == choice.zone), None)
        case Mode.ON_DEMAND:
            dear = [o for o in usable if o.pool.market is Market.ON_DEMAND]
            near = [o for o in dear if can_overlap(o, case.snapshot.state)]
            found = _own(case, dear) or min(near or dear, key=price, default=None)
            return found or _own(case, spot) or min(spot, key=price, default=None)  # better than nothing


def _own(case: Situation, offers: list[Offer]) -> Offer | None:
    """Return the offer of the pool that takes over, or that the job's machines are in: others would begin anew."""
    state, has_some = case.snapshot.state, case.snapshot.group.size > 0 or bool(case.snapshot.group.counted)
    own = [state.successor.pool, state.pool] if state.successor is not None else [state.pool]
    return next((o for pool in own for o in offers if o.pool == pool), None) if has_some else None


def _shown(case: Situation, mode: Mode) -> Mode:
    """What the job runs on for who looks on: to ask whether there is spot again is not to have it."""
    held, before = case.holding.mode, case.snapshot.state.capacity_decision
    if mode not in (Mode.SPOT, Mode.BOTH):
        return mode
    if held is Mode.IDLE:
        return Mode.IDLE if before is not None and before.mode == Mode.IDLE.value else Mode.SPOT
    return Mode.SPOT if held is Mode.SPOT else Mode.ON_DEMAND


def _capacity_decision(case: Situation, mode: Mode, reason: Reason, shortfall: Shortfall | None) -> CapacityDecision:
    """Return the decision as it is stored: the one before, as long as it is the same."""
    before = case.snapshot.state.capacity_decision
    if before is not None and (before.mode, before.shortfall) == (mode.value, shortfall):
        return before
    same = before is not None and before.mode == mode.value
    why = f"{format_span(case.left)} of work, {format_span(max(case.time_left, _NO_TIME))} left{_news(case, reason)}"
    return CapacityDecision(
        mode=mode.value,
        since=before.since if before is not None and same else case.snapshot.now,
        why=why if reason in (Reason.STAY, Reason.CHEAPEST) else f"{why}: {reason.value}",
        shortfall=shortfall,
        warning=_warning(case, shortfall),
        at=case.snapshot.now,
        deadline_at=case.goal.deadline_at,
    )


def _news(case: Situation, reason: Reason) -> str:
    """Return what is known of spot, where the decision rests on it: what a later one may see otherwise."""
    count, pools = len(_exclusions(case)), len(_worthwhile(case))
    told = count and reason in (Reason.EXPECTED, Reason.BEHIND, Reason.WAIT)
    return f", {count} of {pools} spot pool{'s' * (pools != 1)} excluded" if told else ""


def _warning(case: Situation, shortfall: Shortfall | None) -> str | None:
    match shortfall:
        case None:
            return None
        case Shortfall.TIME:
            starts = f" and a changeover of {format_span(case.pace.start)}" if case.holding.mode is Mode.IDLE else ""
            return (
                f"the deadline will be missed: {format_span(case.left)} of work{starts},"
                f" {format_span(max(case.time_left, _NO_TIME))} left; a later `deadline:` lets the job go on"
            )
        case Shortfall.MONEY:
            return (
                f"the deadline cannot be kept for the money: the rest costs {format_usd(rest_usd(case))} on demand,"
                f" and {format_usd(max(case.money_left_usd, Decimal(0)))} may be spent on it. The budget holds, so it"
                f" goes on with spot machines alone; `gpucloud budget` raises it"
            )


# How a job with a deadline stands: what its policy is told, in the words of a replay.


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that an answer rests on.

    `span` is from the run's first order to its deadline; `dear` is the cheapest offer on demand, `zones` what is known
    of the spot pools. A pool that refused is not asked again for `excluded_for`.
    """

    goal: Goal
    policy: Policy
    snapshot: Snapshot
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
    excluded_for: timedelta

    @property
    def slack(self) -> timedelta:
        """The time that is left over the work."""
        return self.time_left - self.left

    @property
    def saves_nothing(self) -> bool:
        """Whether its script begins anew with every change, or loses more than it does between two of its saves."""
        attempt, kept = self.snapshot.state.attempt, self.snapshot.state.checkpoint
        if attempt is None:
            return self.goal.saves_nothing and kept is None
        mute = is_mute(attempt, self.goal, self.snapshot) and kept is None
        return mute or is_overdue(attempt, self.goal, self.snapshot)

    @property
    def handover(self) -> timedelta:
        """What a change takes whose machines stand ready, with the work that is done again then."""
        attempt = self.snapshot.state.attempt
        return self.pace.handover + (unsaved(attempt, self.goal, self.snapshot) if attempt is not None else _NO_TIME)

    @property
    def spare(self) -> timedelta | None:
        """What time is over, or won over a part of the nodes, after a change of what works; None where nothing does.

        Before machines are asked for, a script that saves nothing needs the time as well in which they boot: what it
        makes meanwhile is lost. Where some came in vain beside the attempt, half of that: not to buy in turns.
        """
        state, attempt = self.snapshot.state, self.snapshot.state.attempt
        boots = self.pace.start - self.pace.handover
        if attempt is None or attempt.stepped_at is None:
            return None
        won = self.left * self.goal.nodes / len(attempt.members) - self.left
        spare = max(self.slack, won) - self.handover
        if state.successor is not None:
            return spare
        beside = (one.launched_at for one in state.nodes if one.pool.market is not state.pool.market)
        in_vain = any(launched_at > attempt.started_at for launched_at in beside)
        return spare - boots * (1 if self.saves_nothing else 0.5 if in_vain else 0)


def situation(goal: Goal, snapshot: Snapshot, rules: Rules) -> Situation | None:
    """Return how the job stands; None where there is no deadline to keep, or too little is known to reckon with one."""
    if goal.policy is None or goal.first_at is None or goal.deadline_at is None:
        return None
    if not goal.buys_time or snapshot.state.status.ended:
        return None
    pace = pace_of(snapshot.state, goal.work, snapshot.now, rules.limits, goal.nodes)
    dear = min((o for o in snapshot.candidates if o.pool.market is Market.ON_DEMAND), key=price, default=None)
    if pace.work is None or pace.left is None or dear is None:
        return None
    kept_usd = reserve_usd(goal.nodes, dear.cap_usd_per_hour, rules.prepaid_rule)
    return Situation(
        goal=goal,
        policy=goal.policy,
        snapshot=snapshot,
        pace=pace,
        work=pace.work,
        left=pace.left,
        time_left=goal.deadline_at - snapshot.now,
        span=goal.deadline_at - goal.first_at,
        money_left_usd=goal.budget_usd - snapshot.spent_usd - kept_usd,
        dear=dear,
        holding=_holding(goal, snapshot, pace),
        zones=zones_of(goal, snapshot, _there(snapshot), goal.first_at),
        tick=min(rules.limits.ask_again, pace.changeover / 6),
        excluded_for=rules.limits.cooldown,
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
        saves_nothing=case.saves_nothing,
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


def lesson(goal: Goal, snapshot: Snapshot, rules: Rules) -> Lesson | None:
    """Return what the learned policy's tables are to be made for; None where they are of no use."""
    case = situation(goal, snapshot, rules) if goal.policy is Policy.LEARNED else None
    offers = [offer for offer in snapshot.candidates if offer.pool.market is Market.SPOT]
    if case is None or not offers:
        return None
    cheapest = min(offers, key=price)
    usd_per_hour = float(cheapest.usd_per_hour)
    return Lesson(task=task_of(case), zones=len(offers), gpus=cheapest.gpus, spot_usd_per_hour=usd_per_hour)


def stands_ready(goal: Goal, snapshot: Snapshot) -> bool:
    """Whether the machines that were asked for beside those that work could take over now."""
    successor = snapshot.state.successor
    there = [n for n in _there(snapshot) if successor is not None and n.node.pool == successor.pool]
    return sum(node.readiness is Readiness.READY for node in there) >= goal.nodes


def rest_usd(case: Situation) -> Decimal:
    """Return what the work that is left costs on demand."""
    return usd_for(case.dear.usd_per_hour * case.goal.nodes, case.left)


def price(offer: Offer) -> Decimal:
    """Return what offers are ranked by."""
    return offer.usd_per_hour


def _holding(goal: Goal, snapshot: Snapshot, pace: Pace) -> Holding:
    """Return what the job has: machines that work, or enough of them that boot. Fewer are nothing yet."""
    state, attempt, successor = snapshot.state, snapshot.state.attempt, snapshot.state.successor
    comes = successor.pool if attempt is None and successor is not None else state.pool
    pool = comes if comes.market is Market.ON_DEMAND else state.pool
    there = [node for node in _there(snapshot) if node.node.pool == pool]
    held = len(attempt.members) if attempt is not None else len(there)
    if attempt is None and (held < goal.fewest(pool.market) or is_cooling(state, pool, snapshot.now)):
        return NOTHING
    launched = [node.node.launched_at for node in there] or [snapshot.now]
    works = attempt is not None and attempt.stepped_at is not None
    boot = _NO_TIME if works else _rest(pace.start, snapshot.now - max(launched))
    if pool.market is Market.SPOT:
        return Holding(
            mode=Mode.SPOT,
            zone=str(pool),
            boot_s=boot.total_seconds(),
            spot_age_s=(snapshot.now - min(launched)).total_seconds(),
            nodes=held if held < goal.nodes else 0,
        )
    if successor is None or successor.pool.market is not Market.SPOT:
        return Holding(mode=Mode.ON_DEMAND, boot_s=boot.total_seconds())
    boots = pace.changeover - pace.handover
    beside = _NO_TIME if stands_ready(goal, snapshot) else _rest(boots, snapshot.now - successor.at)
    return Holding(
        mode=Mode.BOTH, zone=str(successor.pool), boot_s=boot.total_seconds(), beside_s=beside.total_seconds()
    )


def _there(snapshot: Snapshot) -> list[NodeSnapshot]:
    return [n for n in snapshot.nodes if not is_gone(n) and not n.node.relieved and not has_notice(n)]


def _rest(whole: timedelta, passed: timedelta) -> timedelta:
    """What of a span is to come: a second at the least, for it is not over."""
    return max(whole - passed, timedelta(seconds=1))
