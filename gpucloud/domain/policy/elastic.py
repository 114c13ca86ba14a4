"""A gang that lost some of its nodes: go on with the rest, which is better than idle, and grow again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.observation import NOTHING, Mode, Observation, Task
from gpucloud.domain.policy.zones import named


def is_partial(task: Task, seen: Observation) -> bool:
    """Whether the job runs on some of its spot nodes only."""
    return seen.holding.mode is Mode.SPOT and 0 < seen.holding.nodes < task.nodes


def elastic(seen: Observation, wanted: Callable[[Observation], Choice]) -> Choice:
    """Return what a job does that runs on a part of its spot nodes.

    An hour of progress costs the same with fewer nodes, and no boot: so the rest goes on wherever `wanted` (the policy,
    asked as if nothing were held) would wait for spot. Nodes that are there again boot beside.
    """
    holding = seen.holding
    zone = named(seen.zones, holding.zone)
    if zone is not None and zone.up:
        return Choice(mode=Mode.SPOT, zone=holding.zone)
    choice = wanted(dataclasses.replace(seen, holding=NOTHING))
    if choice.mode is Mode.ON_DEMAND:
        return choice
    nodes = max(holding.nodes, zone.nodes if zone is not None else 0)
    return Choice(mode=Mode.SPOT, zone=holding.zone, reason=Reason.STAY, holds_s=choice.holds_s, nodes=nodes)
