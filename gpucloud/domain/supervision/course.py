"""What a job with a deadline is to run on now: its policy is asked with what is seen, as in a replay."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.job import Market
from gpucloud.domain.offer import Offer
from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.decide import decide
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.observation import Mode
from gpucloud.domain.quantities import format_span, format_usd
from gpucloud.domain.state import Course, Shortfall
from gpucloud.domain.supervision.capacity import is_cooling
from gpucloud.domain.supervision.seen import Goal, Heading, Rules, Seen
from gpucloud.domain.supervision.situation import (
    Situation,
    can_stand_beside,
    observed,
    price,
    rest_usd,
    situation,
    task_of,
)

_ABANDONED = Decimal("0.9")  # machines on demand are given up for money only where so little of their work is paid
_NO_TIME = timedelta(0)


def heading(goal: Goal, seen: Seen, rules: Rules) -> Heading | None:
    """Return what the job is to run on now.

    None where there is no deadline to keep, nobody knows yet how much work there is, or nothing is offered on demand:
    the job then goes on as without a deadline.
    """
    case = situation(goal, seen, rules)
    if case is None:
        return None
    shortfall = _shortfall(case)
    choice = _choice(case, shortfall)
    offer = _offer(case, choice)
    # What runs needs no offer to go on; what is wanted and cannot be had leaves everything as it is.
    mode = choice.mode if offer is not None or choice.mode is Mode.IDLE else case.holding.mode
    return Heading(mode=mode, offer=offer, course=_course(case, _shown(case, mode), choice.reason, shortfall))


def _shortfall(case: Situation) -> Shortfall | None:
    """What is missing for the deadline. Machines on demand that work are kept as long as they may be enough."""
    before = case.seen.state.course.shortfall if case.seen.state.course is not None else None
    keeps = case.holding.mode in (Mode.ON_DEMAND, Mode.BOTH) and before is not Shortfall.MONEY
    short = case.money_left_usd < rest_usd(case) * (_ABANDONED if keeps else 1)
    if short and case.policy is not Policy.ON_DEMAND:
        return Shortfall.MONEY
    starts = case.pace.changeover if case.holding.mode is Mode.IDLE else timedelta(seconds=case.holding.boot_s)
    clear = case.pace.changeover / 2 if before is Shortfall.TIME else _NO_TIME  # what was said is not taken back soon
    return Shortfall.TIME if case.slack < starts + clear else None


def _choice(case: Situation, shortfall: Shortfall | None) -> Choice:
    if shortfall is Shortfall.MONEY:  # the budget is hard: the deadline yields, and the job goes on where it is cheap
        cheap = min((zone for zone in case.zones if zone.up), key=lambda zone: zone.usd_per_hour, default=None)
        held = case.holding.mode is Mode.SPOT
        zone = case.holding.zone if held else cheap.zone if cheap else None
        return Choice(mode=Mode.SPOT if zone else Mode.IDLE, zone=zone, reason=Reason.BUDGET)
    choice = decide(case.policy, task_of(case), observed(case), case.goal.tables)
    return _before_it_is_late(case, _steadily(case, choice))


def _steadily(case: Situation, choice: Choice) -> Choice:
    """The choice, but what was begun is ended first, where neither deadline nor budget stands against it.

    Machines on demand work until spot machines stand ready, and those that were asked for beside them take over when
    they come. A policy may think otherwise a moment later; here each change of mind costs a start.
    """
    held, zone = case.holding.mode, case.holding.zone
    if choice.reason in (Reason.DEADLINE, Reason.BUDGET) or choice.mode is Mode.SPOT:
        return choice
    if held is Mode.ON_DEMAND and choice.mode is Mode.IDLE:
        return Choice(mode=Mode.ON_DEMAND)
    if held is not Mode.BOTH:
        return choice
    if case.holding.beside_s > 0:
        return Choice(mode=Mode.BOTH, zone=zone)
    in_time = case.slack >= case.pace.changeover + case.pace.handover
    return Choice(mode=Mode.SPOT, zone=zone) if in_time else Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)


def _before_it_is_late(case: Situation, choice: Choice) -> Choice:
    """On demand in place of spot machines whose loss would be one too many.

    In a replay, machines that run lose no time. Here steps turn out slower and starts longer than they were measured.
    """
    if case.holding.mode is not Mode.SPOT or choice.mode is not Mode.SPOT:
        return choice
    needed = case.pace.changeover + timedelta(seconds=case.holding.boot_s)
    if case.seen.state.successor is not None:
        needed += case.pace.changeover / 2  # not to ask and dismiss in turns
    works = case.holding.boot_s == 0 and case.holding.nodes == 0  # a part of the nodes loses time while it works
    if case.slack >= needed or (works and case.slack < case.pace.handover):  # the change would be one too many itself
        return choice
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)


def _offer(case: Situation, choice: Choice) -> Offer | None:
    """Return where the machines are to come from; None for waiting, which is also all that is left when none can."""
    usable = [o for o in case.seen.candidates if not is_cooling(case.seen.state, o.pool, case.seen.now)]
    spot = [o for o in usable if o.pool.market is Market.SPOT]
    match choice.mode:
        case Mode.IDLE:
            return None
        case Mode.SPOT | Mode.BOTH:
            return _own(case, spot) or next((o for o in spot if str(o.pool) == choice.zone), None)
        case Mode.ON_DEMAND:
            dear = [o for o in usable if o.pool.market is Market.ON_DEMAND]
            near = [o for o in dear if can_stand_beside(o, case.seen.state)]
            found = _own(case, dear) or min(near or dear, key=price, default=None)
            return found or _own(case, spot) or min(spot, key=price, default=None)  # better than nothing


def _own(case: Situation, offers: list[Offer]) -> Offer | None:
    """Return the offer of the pool that the job's machines are in: others would have to begin anew."""
    has_some = case.seen.group.size > 0 or bool(case.seen.group.counted)
    return next((o for o in offers if o.pool == case.seen.state.pool), None) if has_some else None


def _shown(case: Situation, mode: Mode) -> Mode:
    """What the job runs on for who looks on: to ask whether there is spot again is not to have it."""
    held, before = case.holding.mode, case.seen.state.course
    if mode not in (Mode.SPOT, Mode.BOTH):
        return mode
    if held is Mode.IDLE:
        return Mode.IDLE if before is not None and before.mode == Mode.IDLE.value else Mode.SPOT
    return Mode.SPOT if held is Mode.SPOT else Mode.ON_DEMAND


def _course(case: Situation, mode: Mode, reason: Reason, shortfall: Shortfall | None) -> Course:
    """Return the course for the books: as it was, as long as it is the same."""
    before = case.seen.state.course
    if before is not None and (before.mode, before.shortfall) == (mode.value, shortfall):
        return before
    same = before is not None and before.mode == mode.value
    why = f"{format_span(case.left)} of work, {format_span(max(case.time_left, _NO_TIME))} left"
    return Course(
        mode=mode.value,
        since=before.since if before is not None and same else case.seen.now,
        why=why if reason in (Reason.STAY, Reason.CHEAPEST) else f"{why}: {reason.value}",
        shortfall=shortfall,
        warning=_warning(case, shortfall),
    )


def _warning(case: Situation, shortfall: Shortfall | None) -> str | None:
    match shortfall:
        case None:
            return None
        case Shortfall.TIME:
            starts = f" and {format_span(case.pace.changeover)} for a start" if case.holding.mode is Mode.IDLE else ""
            return (
                f"the deadline will be missed: {format_span(case.left)} of work{starts},"
                f" {format_span(max(case.time_left, _NO_TIME))} left; a later `deadline:` lets the job go on"
            )
        case Shortfall.MONEY:
            return (
                f"the deadline cannot be kept for the money: the rest costs {format_usd(rest_usd(case))} on demand,"
                f" {format_usd(max(case.money_left_usd, Decimal(0)))} are left. The budget holds, so it goes on with"
                f" spot machines alone; `gpucloud budget` raises it"
            )
