"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again.
"""

from __future__ import annotations

from datetime import datetime

from gpucloud.domain.state import ExitReason
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    Done,
    TearDown,
)
from gpucloud.domain.supervision.between import between
from gpucloud.domain.supervision.budget import obey
from gpucloud.domain.supervision.during import during
from gpucloud.domain.supervision.launched import leave
from gpucloud.domain.supervision.prepaid import Wall, sooner
from gpucloud.domain.supervision.seen import Goal, Rules, Seen


def decide(goal: Goal, seen: Seen, rules: Rules) -> Action:
    """Return the next thing to do for the job. Total and pure: every state has an answer.

    A machine leaves the teardown to whoever comes from outside: it ends its own group, and with it itself.
    """
    obeyed = obey(goal, seen, rules)
    if obeyed is not None:
        return obeyed
    if seen.state.status.ended:
        if goal.self_driving or seen.state.torn_down:
            return Done()
        until = _held_until(goal, seen)
        if until is not None and seen.now < until:
            return _hold(until, seen)
        return _keep(seen, rules.wall) if _is_kept(goal, seen) else TearDown()
    if (left := leave(goal, seen, rules)) is not None:
        return left
    if seen.state.attempt is not None:
        return during(seen.state.attempt, goal, seen, rules)
    return between(goal, seen, rules)


def _keep(seen: Seen, wall: Wall) -> Action:
    """Nobody renews their time; it ends sooner where the cloud has a later end than the budget pays for.

    Whoever lowered it may have died before the cloud heard, though the order counts as acted on. What was paid for
    longer than the horizon, while the machines drove their job, stays for as long as there is money.
    """
    payable = seen.payable_until or seen.lasts_until or seen.now
    if seen.group.alive and seen.group.armed_until is None:
        return _arm_anew(min((seen.state.ended_at or seen.now) + wall.horizon, payable), seen)
    is_short = seen.group.alive and payable - seen.now < wall.horizon
    closer = sooner(seen.group.armed_until, payable) if is_short else None
    return Arm(until=closer) if closer is not None else Done()


def _arm_anew(until: datetime, seen: Seen) -> Arm | TearDown:
    """Somebody removed the shut-off of machines that nobody supervises: they have one again, no later than before."""
    return Arm(until=until) if until > seen.now else TearDown()


def _held_until(goal: Goal, seen: Seen) -> datetime | None:
    """Return until when the machines wait for a mended script; None where there are none, or nothing to mend."""
    failed_at = seen.state.failed_at
    if goal.hold is None or goal.end is not None or failed_at is None or not seen.group.alive:
        return None
    return failed_at + goal.hold


def _hold(until: datetime, seen: Seen) -> Action:
    """The shut-off comes when the wait is over, if not before: nobody needs to be there, and nobody renews it."""
    until = min(until, seen.payable_until or seen.lasts_until or seen.now)
    if seen.group.armed_until is None:
        return _arm_anew(until, seen)
    closer = sooner(seen.group.armed_until, until)
    return Arm(until=closer) if closer is not None else Done()


def _is_kept(goal: Goal, seen: Seen) -> bool:
    """Whether machines are left up for the user: those of a job that succeeded, for as long as they are paid."""
    wanted = goal.keep and goal.end is None and seen.state.exit_reason is ExitReason.SUCCEEDED
    armed = seen.group.armed_until
    return wanted and bool(seen.group.alive or (armed is not None and armed > seen.now))
