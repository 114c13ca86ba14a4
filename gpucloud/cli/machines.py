"""Which of a job's machines a command is about."""

from __future__ import annotations

from gpucloud.domain.errors import UsageError
from gpucloud.domain.node import Node, NodeState
from gpucloud.wiring import Gpucloud, KnownJob


def one_node(cloud: Gpucloud, known: KnownJob, node_id: str | None) -> Node:
    """Return the node that is meant, by its name or the beginning that tables have of it; without one the first."""
    asker = cloud.asker(known)
    listed = asker.group.describe(group_of(cloud, known)).alive
    running = [node for node in listed if node.state is NodeState.RUNNING]
    if not running:
        raise UsageError(f"{known.name} has no machine that is up", hint=f"gpucloud status {known.name}")
    if node_id is None:
        return running[0]
    exact = [node for node in running if node.id == node_id]
    found = exact or [node for node in running if node.id.startswith(node_id)]
    if len(found) != 1:
        why = "has no node" if not found else "has several nodes that begin with"
        raise UsageError(f"{known.name} {why} {node_id}", hint=f"one of {', '.join(n.id for n in running)}")
    return found[0]


def node_of(cloud: Gpucloud, known: KnownJob, node_id: str | None) -> Node:
    """Return the node that is meant; without a name the one of rank 0 in the newest attempt, where results are."""
    attempts = cloud.asker(known).state().attempts
    first = attempts[-1].members[0].node_id if attempts else None
    try:
        return one_node(cloud, known, node_id or first)
    except UsageError:
        if node_id is not None:
            raise
        return one_node(cloud, known, None)


def group_of(cloud: Gpucloud, known: KnownJob) -> str:
    """Return the name of the job's node group; UsageError when it has none."""
    state = cloud.asker(known).state()
    if state.group is None:
        closed = state.status.ended
        raise UsageError(
            f"{known.name} has {'ended, and has no machines any more' if closed else 'no machines yet'}",
            hint=f"gpucloud status {known.name}" if closed else f"gpucloud up {known.name}",
        )
    return state.group
