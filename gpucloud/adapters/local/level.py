"""What a node group needs next, decided from its records and the time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.adapters.local.records import GroupRecord, NodeRecord, Schedule, noticed
from gpucloud.domain.node import EndCause, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The records as they shall be, and how many nodes are to be started."""

    group: GroupRecord
    nodes: tuple[NodeRecord, ...]
    starts: int


def settle(group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime, notice_s: float) -> Step:
    """Return the next step: shut-off, then interruptions, then the level. Equal records and 0 starts mean: nothing."""
    if group.armed_until is None or now >= group.armed_until:
        group = replace(group, size=0)
        nodes = tuple(_ending(node, EndCause.SCHEDULE) for node in nodes)
    group, nodes = _scheduled(group, nodes, now, notice_s)
    nodes = tuple(
        _ending(node, EndCause.INTERRUPTED) if node.taken_at is not None and now >= node.taken_at else node
        for node in nodes
    )
    return _levelled(group, nodes)


def _ending(node: NodeRecord, cause: EndCause) -> NodeRecord:
    return replace(node, ending=cause) if node.alive and node.ending is None else node


def _levelled(group: GroupRecord, nodes: tuple[NodeRecord, ...]) -> Step:
    """Bring the nodes to the level; too many are those of another pool than the group's first, then the newest."""
    counted = sorted((node for node in nodes if node.counted), key=lambda node: (node.pool != group.pool, node.number))
    surplus = {node.id for node in counted[group.size :]}
    nodes = tuple(_ending(node, EndCause.CHOICE) if node.id in surplus else node for node in nodes)
    return Step(group=group, nodes=nodes, starts=max(0, group.size - len(counted)))


def _scheduled(
    group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime, notice_s: float
) -> tuple[GroupRecord, tuple[NodeRecord, ...]]:
    schedule = group.schedule
    if schedule is None:
        return group, nodes
    if group.size == 0:
        return replace(group, schedule=replace(schedule, next_at=None)), nodes
    if schedule.next_at is None:
        return replace(group, schedule=replace(schedule, next_at=now + _draw(schedule).gap)), nodes
    if now < schedule.next_at:
        return group, nodes
    later = replace(schedule, drawn=schedule.drawn + 1)
    later = replace(later, next_at=max(now, schedule.next_at + _draw(later).gap))
    return replace(group, schedule=later), _taken(nodes, _draw(schedule), now, notice_s)


def _taken(nodes: tuple[NodeRecord, ...], draw: _Draw, now: datetime, notice_s: float) -> tuple[NodeRecord, ...]:
    able = [n for n in nodes if n.counted and n.state is NodeState.RUNNING and n.taken_at is None]
    if not able:
        return nodes
    victim = able[int(draw.which * len(able))]
    after = noticed(victim, now, notice_s) if draw.announced else _ending(victim, EndCause.INTERRUPTED)
    return tuple(after if node.id == victim.id else node for node in nodes)


@dataclass(frozen=True, slots=True)
class _Draw:
    gap: timedelta
    announced: bool
    which: float


def _draw(schedule: Schedule) -> _Draw:
    """Return the schedule's next interruption: a function of its seed and number, so that it survives a restart."""
    dice = random.Random(f"{schedule.seed}/{schedule.drawn}")  # noqa: S311  (a reproducible drill, no secret)
    gap = timedelta(seconds=dice.expovariate(1 / schedule.mean_s))
    return _Draw(gap, dice.random() >= schedule.unannounced, dice.random())
