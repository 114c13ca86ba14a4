"""The machines that a job has had, brought up to date with what the cloud lists.

One rule for all who reckon with them: a machine that the cloud lists no longer has ended, at the latest when the time
that was armed last was over. What it costs up to then is what `status` shows, and what the budget counts.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from gpucloud.domain.node import EndCause, GroupView, Node, NodeState
from gpucloud.domain.state import JobState, NodeLife

LISTED_LATE = timedelta(seconds=60)
"""For so long a list may lack what lives: nothing is written down for good before."""


def with_lives(lives: tuple[NodeLife, ...], nodes: tuple[Node, ...]) -> tuple[NodeLife, ...]:
    """Return the lives with every listed node added or brought up to date."""
    known = {life.node_id: life for life in lives}
    for node in nodes:
        life = known.get(node.id) or NodeLife(node_id=node.id, pool=node.pool, launched_at=node.launched_at)
        if node.state is NodeState.TERMINATED and life.ended_at is None:
            life = replace(life, ended_at=node.ended_at or node.launched_at, end_cause=node.end_cause)
        known[node.id] = replace(life, missing_at=None) if life.ended_at is None else life
    return tuple(known.values())


def as_listed(state: JobState, group: GroupView, now: datetime) -> JobState:
    """Return the state with the ends that the group lists, and with those of machines that it lists no longer.

    Nobody may have written an end down yet. What is missed for the first time may only be listed late: it counts as
    alive for a minute more, and where it was paid until a time, for a minute after that at the most.
    """
    listed = {node.id for node in group.nodes}
    lives = (
        life if life.ended_at is not None or life.node_id in listed else _missing(life, state.paid_until, now)
        for life in with_lives(state.nodes, group.nodes)
    )
    return replace(state, nodes=tuple(lives))


def ended(life: NodeLife, paid_until: datetime | None, now: datetime) -> NodeLife:
    """Return the life with its end, of which nobody tells: what was armed bounds it, and when it was missed."""
    if life.ended_at is not None:
        return life
    at = min(moment for moment in (now, life.missing_at, paid_until) if moment is not None)
    cause = EndCause.SCHEDULE if at == paid_until else None
    return replace(life, ended_at=max(at, life.launched_at), end_cause=cause)


def _missing(life: NodeLife, paid_until: datetime | None, now: datetime) -> NodeLife:
    since = life.missing_at or now
    first = min(since, paid_until) if paid_until is not None else since
    life = replace(life, missing_at=since)
    return ended(life, paid_until, now) if now - first >= LISTED_LATE else life
