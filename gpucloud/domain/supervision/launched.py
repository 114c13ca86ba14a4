"""When a job needs nobody outside any more: its machines are there, paid, and have shown that they can drive it."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.order import Until
from gpucloud.domain.quantities import format_span
from gpucloud.domain.shown import in_one_line
from gpucloud.domain.supervision.action import Done, StayOn
from gpucloud.domain.supervision.seen import DriveTrial, Goal, NodeSeen, Readiness, Rules, Seen
from gpucloud.domain.supervision.upkeep import renew


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
        return False  # one that is being taken stands beside the level: the group's limit is one more for it
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
