"""Who takes part in an attempt, what each says of it, and who can be relied on."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.agentstatus import AttemptStatus, Progress, RunState, Stop
from gpucloud.domain.job import Market
from gpucloud.domain.ledger import FREE_WHEN_TAKEN_WITHIN
from gpucloud.domain.node import Node, NodeState
from gpucloud.domain.state import Attempt, JobState
from gpucloud.domain.supervision.seen import Limits, NodeSeen, Seen

NOBODY_ANSWERS = "no machine answers"
_NOTICE = timedelta(seconds=120)
_TAKEN_WITHIN = timedelta(seconds=60)  # after the time that the notice names


def part_of(attempt: Attempt, node: NodeSeen | None) -> AttemptStatus | None:
    """Return what the node says of its part in the attempt; None while it has not heard of it."""
    part = node.status.attempt if node is not None and node.status is not None else None
    return part if part is not None and part.attempt == attempt.number else None


def members_of(attempt: Attempt, seen: Seen) -> tuple[NodeSeen | None, ...]:
    """Return the attempt's members as seen, in rank order; None for one that the cloud no longer lists."""
    by_id = {node.node.id: node for node in seen.nodes}
    return tuple(by_id.get(member.node_id) for member in attempt.members)


def progress_of(attempt: Attempt, seen: Seen) -> Progress | None:
    """Return what rank 0's script last reported."""
    part = part_of(attempt, members_of(attempt, seen)[0])
    return part.progress if part else None


def is_over(attempt: Attempt, node: NodeSeen | None) -> bool:
    """Whether the member has nothing running of this attempt, and never will."""
    if node is None or is_gone(node):
        return True
    part = part_of(attempt, node)
    if part is None:  # an agent that reads of the end first does not begin
        return attempt.ordered is not Stop.NO and node.heard
    return part.state is RunState.EXITED


def is_gone(node: NodeSeen | None) -> bool:
    """Whether the cloud no longer lists the node as alive."""
    return node is None or node.node.state is NodeState.TERMINATED


def some_leave(seen: Seen) -> bool:
    """Whether machines are about to be taken for which money is kept, or was spent: it is free in a moment.

    That is so of those beside the group's level. One that the level counts comes back and costs as much, unless it is
    so young that nothing is charged for it; once it is back, the one that leaves is beside the level. Which one that is
    may not be known yet: the cloud starts the other when it warns.
    """
    alive = [n for n in seen.nodes if not is_gone(n)]
    counted = [n for n in alive if not n.node.detached]
    came_back = len(counted) > seen.group.size
    noticed = [(n.node, n.status.notice.at) for n in alive if n.status is not None and n.status.notice is not None]
    leaving = [at for node, at in noticed if node.detached or came_back or _is_free(node, at)]
    if came_back:
        leaving.append(max(n.node.launched_at for n in counted) + _NOTICE)
    return any(seen.now < at + _TAKEN_WITHIN for at in leaving)


def _is_free(node: Node, taken_at: datetime) -> bool:
    return node.pool.market is Market.SPOT and taken_at - node.launched_at < FREE_WHEN_TAKEN_WITHIN


def is_usable(node: NodeSeen, limits: Limits) -> bool:
    """Whether an attempt may be placed on the node once it is prepared."""
    noticed = node.status is not None and node.status.notice is not None
    return not is_gone(node) and not node.node.detached and not noticed and node.silent_for < limits.silent


def quarantined(state: JobState) -> frozenset[str]:
    """Return the nodes that take no part any more."""
    return frozenset(one.node_id for one in state.quarantined)


def somebody_answers(seen: Seen) -> bool:
    """All silent at once means that we are offline, and nothing is believed."""
    return any(node.silent_for == timedelta(0) and not is_gone(node) for node in seen.nodes)


def all_silent(seen: Seen, limits: Limits) -> bool:
    """Whether there are nodes, and none has answered for long enough that it is no passing delay."""
    alive = [node for node in seen.nodes if not is_gone(node)]
    return bool(alive) and all(node.silent_for >= limits.silent for node in alive)
