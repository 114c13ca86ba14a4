"""Which pool the machines come from: the next one when the cloud has none, or may not start any (DESIGN §5).

An attempt has its machines in one pool, because its ranks must be near each other. A pool that refuses cools down: what
it gave is given back, and the cheapest pool that is not cooling is asked next. A machine that the cloud takes is first
asked for again in its own pool, where its peers are.
"""

from __future__ import annotations

from datetime import datetime

from gpucloud.domain.job import Market
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.offer import Pool
from gpucloud.domain.policy.observation import Mode
from gpucloud.domain.state import Cooldown, ExitReason, JobState
from gpucloud.domain.supervision.action import Action, CoolDown, Finish, Move, Resize, Wait
from gpucloud.domain.supervision.quarantine import QUARANTINED
from gpucloud.domain.supervision.seen import Goal, Heading, Limits, Seen

_ELSEWHERE = (Fault.CAPACITY, Fault.QUOTA)  # another pool may help
_LATER = (Fault.THROTTLING, Fault.TRANSIENT)  # the same call may help


def other_pool(goal: Goal, seen: Seen, limits: Limits) -> Action | None:
    """Return what to do about a pool that does not give what is asked of it; None while it may."""
    if not is_cooling(seen.state, seen.state.pool, seen.now):
        return _judge(goal, seen, limits)
    offer = next((o for o in seen.candidates if not is_cooling(seen.state, o.pool, seen.now)), None)
    return _give_back(seen) or (Move(offer=offer) if offer is not None else _nothing_left(seen, limits))


def pool_of_the_course(goal: Goal, seen: Seen, to: Heading, limits: Limits) -> Action | None:
    """Return what to do so that machines come from where a job with a deadline is to have them; None when they may.

    While it waits it has none. No patience ends: the deadline does.
    """
    pool = to.offer.pool if to.offer is not None else seen.state.pool
    if to.mode is not Mode.IDLE and pool == seen.state.pool:
        return _judge(goal, seen, limits)
    back = _give_back(seen)
    if back is not None:
        return back
    if to.offer is not None:
        return Move(offer=to.offer)
    nowhere = all(is_cooling(seen.state, offer.pool, seen.now) for offer in seen.candidates)
    return (_never(seen) if nowhere else None) or Wait(why=f"waiting: {to.course.why}")


def _give_back(seen: Seen) -> Action | None:
    if seen.group.exists and seen.group.size > 0:
        return Resize(size=0)
    return Wait(why="giving machines back") if seen.group.counted else None


def has_enough(goal: Goal, seen: Seen) -> bool:
    """Whether a job that trains on a range of nodes has enough of them, though the pool may give no more."""
    there = sum(node.pool == seen.state.pool for node in seen.group.counted)
    return goal.is_range and there >= goal.fewest(seen.state.pool.market)


def refused(seen: Seen, pool: Pool, since: datetime | None) -> Refusal | None:
    """Return the pool's last refusal since the job turned to it."""
    found = [r for r in seen.group.refusals if r.pool == pool and (since is None or r.at >= since)]
    return max(found, key=lambda refusal: refusal.at, default=None)


def cool_down(goal: Goal, refusal: Refusal, limits: Limits) -> CoolDown:
    """Return the cooldown for a pool that refused.

    Where a deadline is to be kept, asking again costs nothing and waiting does: it does not become longer and longer.
    """
    length, longest = limits.cooldown, limits.cooldown_longest
    if goal.policy is not None:
        length = longest = limits.insist if refusal.pool.market is Market.ON_DEMAND else limits.cooldown
    return CoolDown(
        pool=refusal.pool,
        fault=refusal.fault,
        code=refusal.code,
        message=refusal.message,
        length=length,
        longest=longest,
    )


def partial(seen: Seen, pool: Pool, there: int, needed: int, limits: Limits) -> Refusal | None:
    """Return the refusal that it is when a pool has given some machines for long, and not those that are needed."""
    if seen.short_for is None or seen.short_for < limits.gang:
        return None
    message = f"{there} of {needed} machines after {limits.gang.total_seconds():.0f} s"
    return Refusal(pool=pool, fault=Fault.CAPACITY, code="Partial", message=message, at=seen.now)


def withheld(seen: Seen, limits: Limits) -> Refusal | None:
    """Return the refusal that it is when a pool has given no machine for long, and refuses none, or only for now."""
    since, pool = seen.state.bare_at, seen.state.pool
    if since is None or seen.now - since < limits.bare:
        return None
    last = refused(seen, pool, seen.state.pool_at)
    said = f"; its last word: {last.message} ({last.code})" if last is not None else ""
    message = f"no machine after {limits.bare.total_seconds() / 60:.0f} min{said}"
    return Refusal(pool=pool, fault=Fault.CAPACITY, code="Withheld", message=message, at=seen.now)


def is_cooling(state: JobState, pool: Pool, now: datetime) -> bool:
    """Whether the pool refused lately."""
    return any(cooldown.pool == pool and cooldown.until > now for cooldown in state.cooldowns)


def refused_lately(seen: Seen, limits: Limits) -> bool:
    """Whether the pool refused so lately that asking again would only be one more call."""
    refusal = refused(seen, seen.state.pool, seen.state.pool_at)
    return refusal is not None and seen.now - refusal.at < limits.ask_again


def cooled(state: JobState, action: CoolDown, now: datetime) -> tuple[Cooldown, ...]:
    """Return the state's cooldowns with one more; a pool that is cooled down again is left alone for longer.

    What is long ago says nothing of a pool of now: a try counts for as long as the longest cooldown after its end.
    """
    before = next((c for c in state.cooldowns if c.pool == action.pool and now - c.until < action.longest), None)
    tries = before.tries + 1 if before is not None else 1
    length = min(action.length * 2 ** min(tries - 1, 8), action.longest)
    new = Cooldown(
        pool=action.pool,
        first_at=before.first_at if before is not None else now,
        until=now + length,
        tries=tries,
        fault=action.fault,
        code=action.code,
        message=action.message,
    )
    return (*(c for c in state.cooldowns if c.pool != action.pool), new)


def _judge(goal: Goal, seen: Seen, limits: Limits) -> Action | None:
    if has_enough(goal, seen):
        return None
    refusal = refused(seen, seen.state.pool, seen.state.pool_at)
    if refusal is not None and refusal.fault not in (*_ELSEWHERE, *_LATER):
        step = f"; {refusal.hint}" if refusal.hint else ""
        message = f"{refusal.pool}: {refusal.message} ({refusal.code}){step}"
        return Finish(reason=ExitReason.NO_CAPACITY, message=message, exit_code=13)
    waited = seen.short_for is not None and seen.short_for >= limits.gang
    if refusal is not None and refusal.fault in _ELSEWHERE and (waited or not seen.group.counted):
        return cool_down(goal, refusal, limits)
    there, needed = len(seen.group.counted), goal.fewest(seen.state.pool.market)
    short = partial(seen, seen.state.pool, there, needed, limits) if 0 < there < needed else withheld(seen, limits)
    return cool_down(goal, short, limits) if short is not None else None


def _nothing_left(seen: Seen, limits: Limits) -> Action:
    """Waiting costs nothing. A quota does not grow by waiting; capacity may."""
    cooling = [c for c in seen.state.cooldowns if c.until > seen.now]
    last = max(cooling, key=lambda c: c.until)
    ended = [life.ended_at for life in seen.state.nodes if life.ended_at is not None]
    waited = seen.now - max([min(c.first_at for c in cooling), *ended])
    never = _never(seen)
    if never is not None:
        return never
    if waited >= limits.patience:
        hours = waited.total_seconds() / 3600
        message = f"no pool had machines for {hours:.1f} h; the last said: {last.message} ({last.code})"
        return Finish(reason=ExitReason.NO_CAPACITY, message=message)
    until = min(c.until for c in cooling)
    return Wait(why=f"no capacity: asking again at {until:%H:%M:%S} UTC")


def _never(seen: Seen) -> Finish | None:
    """The end, where every pool that was asked refuses for a reason that time does not change."""
    cooling = [c for c in seen.state.cooldowns if c.until > seen.now]
    bad = next((c for c in cooling if c.code == QUARANTINED), None)
    if bad is not None:
        return Finish(reason=ExitReason.NO_CAPACITY, message=bad.message, exit_code=14)
    if cooling and all(c.fault is Fault.QUOTA for c in cooling):
        last = max(cooling, key=lambda c: c.until)
        return Finish(reason=ExitReason.NO_CAPACITY, message=f"{last.message} ({last.code}): gpucloud quota request")
    return None
