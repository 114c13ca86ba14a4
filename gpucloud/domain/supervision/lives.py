"""The machines that a job has had, brought up to date with what the cloud lists."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from gpucloud.domain.node import GroupView, Node, NodeState
from gpucloud.domain.state import JobState, NodeLife


def with_lives(lives: tuple[NodeLife, ...], nodes: tuple[Node, ...]) -> tuple[NodeLife, ...]:
    """Return the lives with every listed node added or brought up to date."""
    known = {life.node_id: life for life in lives}
    for node in nodes:
        life = known.get(node.id) or NodeLife(node_id=node.id, pool=node.pool, launched_at=node.launched_at)
        if node.state is NodeState.TERMINATED and life.ended_at is None:
            life = replace(life, ended_at=node.ended_at or node.launched_at, end_cause=node.end_cause)
        known[node.id] = life
    return tuple(known.values())


def as_listed(state: JobState, group: GroupView, now: datetime) -> tuple[JobState, datetime]:
    """Return the state with the ends that the group lists, and until when what it does not list can have cost money.

    Nobody may have written an end down yet; and what was paid until a time, and is no longer listed, ended by then.
    """
    seen = replace(state, nodes=with_lives(state.nodes, group.nodes))
    over = state.paid_until is not None and not group.alive
    return seen, min(now, state.paid_until) if over and state.paid_until is not None else now
