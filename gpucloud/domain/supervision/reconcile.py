"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.money.prepaid import Wall, sooner
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Action, Arm, Done, StayOn, TearDown
from gpucloud.domain.supervision.between import between
from gpucloud.domain.supervision.budget import obey
from gpucloud.domain.supervision.during import during
from gpucloud.domain.supervision.renewal import renew
from gpucloud.domain.supervision.seen import DriveTrial, Goal, NodeSeen, Readiness, Rules, Seen
from gpucloud.domain.untrusted import in_one_line


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


# When a job needs nobody outside any more: its machines are there, paid, and have shown that they can drive it.


def leave(goal: Goal, seen: Seen, rules: Rules) -> Done | StayOn | None:
    """Return whether whoever waits to leave the job to its machines may, or has to stay; None: not yet, or no such."""
    if goal.until is not Until.LAUNCHED or seen.wanted_end is not None or not _stands(goal, seen, rules):
        return None
    counted = tuple(node for node in seen.nodes if node.node in seen.group.counted)
    if any(trial is not None and trial.refused is None for trial in _trials(counted, goal)):
        return Done()
    why = _why_not(counted, goal, seen, rules)
    return StayOn(why=why) if why is not None else None


def _stands(goal: Goal, seen: Seen, rules: Rules) -> bool:
    """Whether every machine is listed behind an armed shut-off, and has all that it needs to drive.

    One that was launched while we looked on makes itself fit; an older one has its driver when we have prepared it.
    """
    group = seen.group
    fewest = goal.fewest(seen.state.pool.market)
    there = group.exists and fewest <= group.size <= goal.nodes and len(group.counted) >= fewest
    if len(group.alive) > len(group.counted):
        return False  # one that is being interrupted stands beside the level: the group's limit is one more for it
    if not there or group.armed_until is None or renew(goal, seen, rules.wall, rules.limits) is not None:
        return False
    return all(_is_fit(node, goal) for node in seen.nodes if node.node in group.counted)


def _is_fit(node: NodeSeen, goal: Goal) -> bool:
    is_new = goal.began_at is not None and node.node.launched_at >= goal.began_at
    return is_new or node.readiness is Readiness.READY


def _trials(counted: tuple[NodeSeen, ...], goal: Goal) -> tuple[DriveTrial | None, ...]:
    """All have one role, so that one of them tells of all. A trial under an older order was of other rights."""
    return tuple(node.trial if node.trial and node.trial.number == goal.number else None for node in counted)


def _why_not(counted: tuple[NodeSeen, ...], goal: Goal, seen: Seen, rules: Rules) -> str | None:
    """Return what the machines lack, or that none has shown anything for too long."""
    limits = rules.limits
    for node, trial in zip(counted, _trials(counted, goal), strict=True):
        if trial is not None and trial.refused is not None and _time(node, goal, seen) >= limits.granted:
            return f"{node.node.id} may not do what driving the job needs: {in_one_line(trial.refused)}"
    if min(_time(node, goal, seen) for node in counted) >= limits.driver:
        return f"no machine has shown within {format_span(limits.driver)} that it can drive the job"
    return None


def _time(node: NodeSeen, goal: Goal, seen: Seen) -> timedelta:
    """Return for how long the machine has been there since somebody wanted to leave."""
    began_at = goal.began_at if goal.began_at is not None else node.node.launched_at
    return seen.now - max(began_at, node.node.launched_at)
