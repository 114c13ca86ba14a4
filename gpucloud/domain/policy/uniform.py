"""Uniform progress: on demand while behind the straight line from submit to deadline, spot whenever there is some."""

from __future__ import annotations

import math

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.greedy import greedy
from gpucloud.domain.policy.observation import Mode, Observation, Task
from gpucloud.domain.policy.zones import cheapest


def uniform(task: Task, seen: Observation) -> Choice:
    """Return what Uniform Progress does as its authors' code acts.

    Wu et al., "Can't Be Late", NSDI 2024. Their text reads as if on-demand machines were given up as soon as the job is
    two changeovers ahead; their code keeps them until spot is there, which costs less (0.727 against 0.763 of on
    demand, on their own 2,400 windows). Spot machines are kept until they are taken.
    """
    holding = seen.holding
    if holding.mode is Mode.SPOT or math.isinf(task.span_s):
        return greedy(task, seen)
    done = task.work_s - seen.work_left_s
    elapsed = task.span_s - seen.time_left_s
    zone = cheapest(seen.zones, task.on_demand_usd_per_hour)
    if holding.mode is Mode.IDLE:
        ahead = done - elapsed * task.work_s / task.span_s
        if zone is not None:
            return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
        if ahead < 0:
            return Choice(mode=Mode.ON_DEMAND, reason=Reason.BEHIND)
        return Choice(mode=Mode.IDLE, reason=Reason.WAIT, holds_s=ahead * task.span_s / task.work_s)
    missing = (elapsed + 2 * task.changeover_s) * task.work_s / task.span_s - done
    if zone is None:
        return Choice(mode=Mode.ON_DEMAND)
    if missing <= 0:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.BEHIND, holds_s=_caught_up(task, missing, holding.boot_s))


def _caught_up(task: Task, missing_s: float, boot_s: float) -> float:
    """How long until machines that never stop have made up for what is missing: they gain 1 − C0/R0 of the time."""
    pace = task.work_s / task.span_s
    return boot_s + (missing_s + boot_s * pace) / (1 - pace) if pace < 1 else math.inf
