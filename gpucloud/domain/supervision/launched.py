"""When a job needs nobody outside any more: its machines are there, paid, and drive it."""

from __future__ import annotations

from gpucloud.domain.supervision.seen import Goal, NodeSeen, Readiness, Rules, Seen
from gpucloud.domain.supervision.upkeep import renew


def goes_by_itself(goal: Goal, seen: Seen, rules: Rules) -> bool:
    """Whether every machine is listed behind an armed shut-off, and can drive.

    One that was launched while we looked on makes itself fit; an older one has its driver when we have prepared it.
    """
    group = seen.group
    fewest = goal.fewest(seen.state.pool.market)
    there = group.exists and fewest <= group.size <= goal.nodes and len(group.counted) >= fewest
    if not there or group.armed_until is None or renew(goal, seen, rules.wall, rules.limits) is not None:
        return False
    return all(_drives(node, goal) for node in seen.nodes if node.node in group.counted)


def _drives(node: NodeSeen, goal: Goal) -> bool:
    is_new = goal.began_at is not None and node.node.launched_at >= goal.began_at
    return is_new or node.readiness is Readiness.READY
