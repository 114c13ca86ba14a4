"""Which pool the machines come from: the next one when the cloud has none, or may not start any (DESIGN §5).

An attempt has its machines in one pool, because its ranks must be near each other. A pool that refuses cools down: what
it gave is given back, and the cheapest pool that is not cooling is asked next. A machine that the cloud takes is first
asked for again in its own pool, where its peers are.
"""

from __future__ import annotations

from datetime import datetime

from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.offer import Pool
from gpucloud.domain.state import Cooldown, ExitReason, JobState
from gpucloud.domain.supervision.action import Action, CoolDown, Finish, Move, Resize, Wait
from gpucloud.domain.supervision.quarantine import QUARANTINED
from gpucloud.domain.supervision.seen import Goal, Limits, Seen

_ELSEWHERE = (Fault.CAPACITY, Fault.QUOTA)  # another pool may help
_LATER = (Fault.THROTTLING, Fault.TRANSIENT)  # the same call may help


def other_pool(goal: Goal, seen: Seen, limits: Limits) -> Action | None:
    """Return what to do about a pool that does not give what is asked of it; None while it may."""
    if not is_cooling(seen.state, seen.state.pool, seen.now):
        return _judge(goal, seen, limits)
    if seen.group.exists and seen.group.size > 0:
        return Resize(size=0)
    if seen.group.counted:
        return Wait(why="giving machines back")
    offer = next((o for o in seen.candidates if not is_cooling(seen.state, o.pool, seen.now)), None)
    return Move(offer=offer) if offer is not None else _nothing_left(seen, limits)


def is_cooling(state: JobState, pool: Pool, now: datetime) -> bool:
    """Whether the pool refused lately."""
    return any(cooldown.pool == pool and cooldown.until > now for cooldown in state.cooldowns)


def refused_lately(seen: Seen, limits: Limits) -> bool:
    """Whether the pool refused so lately that asking again would only be one more call."""
    refusal = _newest(seen)
    return refusal is not None and seen.now - refusal.at < limits.ask_again


def cooled(state: JobState, action: CoolDown, now: datetime) -> tuple[Cooldown, ...]:
    """Return the state's cooldowns with one more; a pool that is cooled down again is left alone for longer."""
    before = next((c for c in state.cooldowns if c.pool == action.pool), None)
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
    refusal = _newest(seen)
    if refusal is not None and refusal.fault not in (*_ELSEWHERE, *_LATER):
        step = f"; {refusal.hint}" if refusal.hint else ""
        message = f"{refusal.pool}: {refusal.message} ({refusal.code}){step}"
        return Finish(reason=ExitReason.NO_CAPACITY, message=message, exit_code=13)
    waited = seen.short_for is not None and seen.short_for >= limits.gang
    if refusal is not None and refusal.fault in _ELSEWHERE and (waited or not seen.group.counted):
        return _cool_down(refusal.pool, refusal.fault, refusal.code, refusal.message, limits)
    if waited and 0 < len(seen.group.counted) < goal.nodes:
        message = f"{len(seen.group.counted)} of {goal.nodes} machines after {limits.gang.total_seconds():.0f} s"
        return _cool_down(seen.state.pool, Fault.CAPACITY, "Partial", message, limits)
    return None


def _cool_down(pool: Pool, fault: Fault, code: str, message: str, limits: Limits) -> CoolDown:
    return CoolDown(
        pool=pool, fault=fault, code=code, message=message, length=limits.cooldown, longest=limits.cooldown_longest
    )


def _newest(seen: Seen) -> Refusal | None:
    """Return the pool's last refusal since the job turned to it."""
    chosen = seen.state.pool_at
    found = [r for r in seen.group.refusals if r.pool == seen.state.pool and (chosen is None or r.at >= chosen)]
    return max(found, key=lambda refusal: refusal.at, default=None)


def _nothing_left(seen: Seen, limits: Limits) -> Action:
    """Waiting costs nothing. A quota does not grow by waiting; capacity may."""
    cooling = [c for c in seen.state.cooldowns if c.until > seen.now]
    last = max(cooling, key=lambda c: c.until)
    ended = [life.ended_at for life in seen.state.nodes if life.ended_at is not None]
    waited = seen.now - max([min(c.first_at for c in cooling), *ended])
    bad = next((c for c in cooling if c.code == QUARANTINED), None)
    if bad is not None:
        return Finish(reason=ExitReason.NO_CAPACITY, message=bad.message, exit_code=14)
    if all(c.fault is Fault.QUOTA for c in cooling):
        return Finish(reason=ExitReason.NO_CAPACITY, message=f"{last.message} ({last.code}): gpucloud quota request")
    if waited >= limits.patience:
        hours = waited.total_seconds() / 3600
        message = f"no pool had machines for {hours:.1f} h; the last said: {last.message} ({last.code})"
        return Finish(reason=ExitReason.NO_CAPACITY, message=message)
    until = min(c.until for c in cooling)
    return Wait(why=f"no capacity: asking again at {until:%H:%M:%S} UTC")
