"""For a script that saves nothing: one try at spot machines where it is likely to pay, and on demand else.

Whatever ends its machines, or changes them, begins it anew. A try is a whole run; where that may fail just before its
end, time and money for a whole run on demand must still be left.
"""

from __future__ import annotations

import math

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.greedy import greedy
from gpucloud.domain.policy.observation import Mode, Observation, Task
from gpucloud.domain.policy.zones import cheapest

_HOUR = 3600.0
_LIVES_S = 2.1 * _HOUR  # the mean up-time of spot machines in the recording of April 2023


def anew(task: Task, seen: Observation) -> Choice:
    """Return spot where a try is affordable and its expected cost is below on demand; what runs stays as it is."""
    holding = seen.holding
    if math.isinf(task.span_s) or holding.mode is Mode.SPOT:
        return greedy(task, seen)
    if holding.mode is not Mode.IDLE:
        return Choice(mode=Mode.ON_DEMAND)
    zone = cheapest(seen.zones, task.on_demand_usd_per_hour)
    usd_per_hour = zone.usd_per_hour if zone else min((one.usd_per_hour for one in seen.zones), default=math.inf)
    spare_s = seen.time_left_s - 2 * (task.work_s + task.changeover_s)
    if spare_s < 0:
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)
    if not _pays(task, usd_per_hour):
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.EXPECTED)
    if seen.money_left_usd is not None and seen.money_left_usd < _two_runs_usd(task, usd_per_hour):
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.BUDGET)
    if zone is None:
        return Choice(mode=Mode.IDLE, reason=Reason.WAIT, holds_s=spare_s)
    return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.CHEAPEST)


def _pays(task: Task, usd_per_hour: float) -> bool:
    """Whether spot for as long as it lasts, and on demand where it does not last for a run, costs less than on demand.

    With lives of mean M, forgetful, and a run of x·M: p·M·(1 − e⁻ˣ) + (1 − e⁻ˣ)·k·x·M < k·x·M.
    """
    lives = (task.work_s + task.changeover_s) / _LIVES_S
    lasts = math.exp(-lives)
    return usd_per_hour * (1 - lasts) < task.on_demand_usd_per_hour * lives * lasts


def _two_runs_usd(task: Task, usd_per_hour: float) -> float:
    hours = (task.work_s + task.changeover_s) / _HOUR
    return task.nodes * (usd_per_hour + task.on_demand_usd_per_hour) * hours
