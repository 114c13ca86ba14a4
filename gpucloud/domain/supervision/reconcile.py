"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.money.budget import PrepaidRule, sooner
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Action, Arm, Done, StayOn, TearDown
from gpucloud.domain.supervision.between import between
from gpucloud.domain.supervision.budget import obey
from gpucloud.domain.supervision.during import during
from gpucloud.domain.supervision.renewal import renew
from gpucloud.domain.supervision.snapshot import DriveTrial, Goal, NodeSnapshot, Readiness, Rules, Snapshot
from gpucloud.domain.untrusted import in_one_line


def decide(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """Return the next thing to do for the job. Total and pure: every state has an answer.

    A machine leaves the teardown to whoever comes from outside: it ends its own group, and with it itself.
    """
    obeyed = obey(goal, snapshot, rules)
    if obeyed is not None:
        return obeyed
    if snapshot.state.status.ended:
        if goal.self_driving or snapshot.state.torn_down:
            return Done()
        until = _held_until(goal, snapshot)
        if until is not None and snapshot.now < until:
            return _hold(until, snapshot)
        return _keep(snapshot, rules.prepaid_rule) if _is_kept(goal, snapshot) else TearDown()
    if (left := leave(goal, snapshot, rules)) is not None:
        return left
    if snapshot.state.attempt is not None:
        return during(snapshot.state.attempt, goal, snapshot, rules)
    return between(goal, snapshot, rules)


def _keep(snapshot: Snapshot, prepaid_rule: PrepaidRule) -> Action:
    """Nobody renews their time; it ends sooner where the cloud has a later end than the budget pays for.

    Whoever lowered it may have died before the cloud heard, though the order counts as acted on. What was paid for
    longer than the horizon, while the machines drove their job, stays for as long as there is money.
    """
    payable = snapshot.payable_until or snapshot.lasts_until or snapshot.now
    if snapshot.group.alive and snapshot.group.armed_until is None:
        return _arm_anew(min((snapshot.state.ended_at or snapshot.now) + prepaid_rule.horizon, payable), snapshot)
    is_short = snapshot.group.alive and payable - snapshot.now < prepaid_rule.horizon
    closer = sooner(snapshot.group.armed_until, payable) if is_short else None
    return Arm(until=closer) if closer is not None else Done()


def _arm_anew(until: datetime, snapshot: Snapshot) -> Arm | TearDown:
    """Somebody removed the shut-off of machines that nobody supervises: they have one again, no later than before."""
    return Arm(until=until) if until > snapshot.now else TearDown()


def _held_until(goal: Goal, snapshot: Snapshot) -> datetime | None:
    """Return until when the machines wait for a mended script; None where there are none, or nothing to mend."""
    failed_at = snapshot.state.failed_at
    if goal.hold is None or goal.end is not None or failed_at is None or not snapshot.group.alive:
        return None
    return failed_at + goal.hold


def _hold(until: datetime, snapshot: Snapshot) -> Action:
    """The shut-off comes when the wait is over, if not before: nobody needs to be there, and nobody renews it."""
    until = min(until, snapshot.payable_until or snapshot.lasts_until or snapshot.now)
    if snapshot.group.armed_until is None:
        return _arm_anew(until, snapshot)
    closer = sooner(snapshot.group.armed_until, until)
    return Arm(until=closer) if closer is not None else Done()


def _is_kept(goal: Goal, snapshot: Snapshot) -> bool:
    """Whether machines are left up for the user: those of a job that succeeded, for as long as they are paid."""
    wanted = goal.keep and goal.end is None and snapshot.state.exit_reason is ExitReason.SUCCEEDED
    armed = snapshot.group.armed_until
    return wanted and bool(snapshot.group.alive or (armed is not None and armed > snapshot.now))


# When a job needs nobody outside any more: its machines are there, paid, and have shown that they can drive it.


def leave(goal: Goal, snapshot: Snapshot, rules: Rules) -> Done | StayOn | None:
    """Return whether whoever waits to leave the job to its machines may, or has to stay; None: not yet, or no such."""
    if goal.until is not Until.LAUNCHED or snapshot.wanted_end is not None or not _stands(goal, snapshot, rules):
        return None
    counted = tuple(node for node in snapshot.nodes if node.node in snapshot.group.counted)
    if any(trial is not None and trial.refused is None for trial in _trials(counted, goal)):
        return Done()
    why = _why_not(counted, goal, snapshot, rules)
    return StayOn(why=why) if why is not None else None


def _stands(goal: Goal, snapshot: Snapshot, rules: Rules) -> bool:
    """Whether every machine is listed behind an armed shut-off, and has all that it needs to drive.

    One that was launched while we looked on makes itself fit; an older one has its driver when we have prepared it.
    """
    group = snapshot.group
    fewest = goal.fewest(snapshot.state.pool.market)
    there = group.exists and fewest <= group.size <= goal.nodes and len(group.counted) >= fewest
    if len(group.alive) > len(group.counted):
        return False  # one that is being interrupted stands beside the level: the group's limit is one more for it
    if not there or group.armed_until is None or renew(goal, snapshot, rules.prepaid_rule, rules.limits) is not None:
        return False
    return all(_is_fit(node, goal) for node in snapshot.nodes if node.node in group.counted)


def _is_fit(node: NodeSnapshot, goal: Goal) -> bool:
    is_new = goal.began_at is not None and node.node.launched_at >= goal.began_at
    return is_new or node.readiness is Readiness.READY


def _trials(counted: tuple[NodeSnapshot, ...], goal: Goal) -> tuple[DriveTrial | None, ...]:
    """All have one role, so that one of them tells of all. A trial under an older order was of other rights."""
    return tuple(node.trial if node.trial and node.trial.number == goal.number else None for node in counted)


def _why_not(counted: tuple[NodeSnapshot, ...], goal: Goal, snapshot: Snapshot, rules: Rules) -> str | None:
    """Return what the machines lack, or that none has shown anything for too long."""
    limits = rules.limits
    for node, trial in zip(counted, _trials(counted, goal), strict=True):
        if trial is not None and trial.refused is not None and _time(node, goal, snapshot) >= limits.granted:
            return f"{node.node.id} may not do what driving the job needs: {in_one_line(trial.refused)}"
    if min(_time(node, goal, snapshot) for node in counted) >= limits.controller:
        return f"no machine has shown within {format_span(limits.controller)} that it can drive the job"
    return None


def _time(node: NodeSnapshot, goal: Goal, snapshot: Snapshot) -> timedelta:
    """Return for how long the machine has been there since somebody wanted to leave."""
    began_at = goal.began_at if goal.began_at is not None else node.node.launched_at
    return snapshot.now - max(began_at, node.node.launched_at)
