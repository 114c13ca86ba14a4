"""Spot whenever there is some, else waiting; the deadline is the net's business."""

from __future__ import annotations

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.observation import Mode, Observation, Task
from gpucloud.domain.policy.zones import cheapest


def greedy(task: Task, seen: Observation) -> Choice:
    """Return spot where it is up, else idle; what runs stays, on demand to the end.

    "Greedy" of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024.
    """
    holding = seen.holding
    if holding.mode is not Mode.IDLE:
        return Choice(mode=holding.mode, zone=holding.zone)
    zone = cheapest(seen.zones, task.on_demand_usd_per_hour)
    if zone is not None:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
    return Choice(mode=Mode.IDLE, reason=Reason.WAIT)
