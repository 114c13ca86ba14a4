"""A gang that lost some of its nodes: go on with the rest, which is better than idle, and grow again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.observation import NOTHING, Mode, Observation, Task, ZoneState
from gpucloud.domain.policy.zones import named


def is_partial(task: Task, seen: Observation) -> bool:
    """Whether the job runs on some of its spot nodes only."""
    return seen.holding.mode is Mode.SPOT and 0 < seen.holding.nodes < task.nodes


def elastic(task: Task, seen: Observation, wanted: Callable[[Observation], Choice]) -> Choice:
    """Return what a job does that runs on a part of its spot nodes.

    An hour of progress costs the same with fewer nodes, and no boot: so the rest goes on wherever `wanted` (the policy,
    asked as if nothing were held) would wait for spot. It moves to a zone that has all nodes if a changeover there
    takes hardly longer than regrouping here.
    """
    holding, handover_s = seen.holding, task.handover_s or 0.0
    zone = named(seen.zones, holding.zone)
    grown = _grown(task, holding.nodes, zone)
    if zone is not None and zone.up and grown == task.nodes:
        return Choice(mode=Mode.SPOT, zone=holding.zone)
    choice = wanted(dataclasses.replace(seen, holding=NOTHING))
    moves = choice.mode is Mode.SPOT and choice.zone != holding.zone and task.changeover_s <= 2 * handover_s
    if choice.mode is Mode.ON_DEMAND or moves:
        return choice
    return Choice(mode=Mode.SPOT, zone=holding.zone, reason=Reason.STAY, holds_s=task.tick_s, nodes=grown)


def _grown(task: Task, nodes: int, zone: ZoneState | None) -> int:
    """How many nodes to have in the zone: more than now where they are likely to be worth the time to regroup.

    More nodes make up for regrouping within handover · nodes / more. They are taken to last as long as they have been
    there (those of a part: no time at all), and their boot is a trial too: if they go, nothing is regrouped.
    """
    there = nodes if zone is None else task.nodes if zone.up else zone.nodes
    if zone is None or there <= nodes:
        return nodes
    handover_s = task.handover_s or 0.0
    tried_s = task.changeover_s - handover_s + (zone.age_s if zone.up else 0.0)
    return there if handover_s * nodes / (there - nodes) <= tried_s else nodes
