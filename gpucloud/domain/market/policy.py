"""What a job with a deadline runs on next: the function that all policies are asked through, and the nets below."""

from __future__ import annotations

import math

from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.learned import Tables, learned
from gpucloud.domain.market.policies import (
    Choice,
    Mode,
    Observation,
    Reason,
    Task,
    ZoneState,
    anew,
    elastic,
    greedy,
    is_partial,
    named,
    uniform,
)


def decide(policy: Policy, task: Task, observation: Observation, tables: Tables | None = None) -> Choice:
    """Return what to run on now: what the policy wants, or what deadline and budget leave.

    `LEARNED` without tables acts as `UNIFORM`. Greedy, and every policy without a deadline, waits for spot. Of a script
    that begins anew none is asked: they reckon with work that is kept.
    """
    if is_partial(task, observation):
        choice = elastic(task, observation, lambda alone: _wanted(policy, task, alone, tables))
    else:
        choice = _wanted(policy, task, observation, tables)
    choice = secured(task, observation, choice)
    return choice if choice.holds_s >= task.tick_s else choice.held(task.tick_s)


def without_deadline(task: Task, observation: Observation) -> Choice:
    """Return what a job runs on that never waits and has no deadline: spot, else on demand, which it keeps.

    No policy is asked of such a job: its supervisor takes the cheapest pool that has machines, after each loss anew.
    """
    if is_partial(task, observation):
        return elastic(task, observation, lambda alone: _never_idle(task, alone))
    return _never_idle(task, observation)


def _never_idle(task: Task, observation: Observation) -> Choice:
    choice = greedy(task, observation)
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.STAY) if choice.mode is Mode.IDLE else choice


def _wanted(policy: Policy, task: Task, observation: Observation, tables: Tables | None) -> Choice:
    if task.saves_nothing and policy is not Policy.ON_DEMAND:
        return anew(task, observation)
    match policy:
        case Policy.UNIFORM:
            return uniform(task, observation)
        case Policy.GREEDY:
            return greedy(task, observation)
        case Policy.ON_DEMAND:
            return Choice(mode=Mode.ON_DEMAND, reason=Reason.ASKED)
        case Policy.LEARNED:
            return uniform(task, observation) if tables is None else learned(tables, task, observation)


# The nets below every policy: whatever it wants, the deadline and the budget stay within reach.
#
# Both rest on one thought: on-demand machines finish C hours of work in d + C hours for k·(d + C). While a job is idle,
# or its spot machines work, that much time and money must be left; a fresh start of spot machines may cost one
# changeover more before it comes to anything.


_HOUR = 3600.0
_EXACT_S = 1e-6  # what rounding of seconds may leave over


def least_span_s(task: Task) -> float:
    """Return the shortest time to a deadline at which spot can be tried at all: R0 ≥ C0 + 2d."""
    return task.work_s + 2 * task.changeover_s


def least_task_budget_usd(task: Task, spot_usd_per_hour: float) -> float:
    """Return the smallest budget that holds together with a deadline: k·(C0 + d) + p·d, for all nodes."""
    on_demand = task.on_demand_usd_per_hour * (task.work_s + task.changeover_s)
    return task.nodes * (on_demand + spot_usd_per_hour * task.changeover_s) / _HOUR


def least_usd(task: Task, work_left_s: float) -> float:
    """Return what finishing on demand costs from nothing: k·(C + d), for all nodes."""
    return task.nodes * task.on_demand_usd_per_hour * (work_left_s + task.changeover_s) / _HOUR


def secured(task: Task, observation: Observation, choice: Choice) -> Choice:
    """Return the choice, or on demand where the choice could miss the deadline or pass the budget.

    Misses nothing that was feasible (`least_span_s`, `least_budget_usd`), as long as a changeover takes no longer than
    the task says and on-demand machines can be had.
    """
    if math.isinf(task.span_s):
        return choice
    choice = _in_time(task, observation, choice)
    return (
        choice
        if observation.money_left_usd is None
        else _in_money(task, observation, choice, observation.money_left_usd)
    )


def _in_time(task: Task, observation: Observation, choice: Choice) -> Choice:
    """The net under the deadline, as in Wu et al., NSDI 2024: R < C + 2d ends all attempts at spot."""
    wanted = choice.mode
    slack = observation.time_left_s - observation.work_left_s
    d = task.changeover_s
    if _is_kept(observation, choice):
        return _kept_in_time(task, observation, choice, slack - d)
    if wanted is Mode.IDLE:
        spare = min(slack - 2 * d, slack - d - task.tick_s)
        return _until(choice, spare) if spare >= 0 else _held_or_on_demand(task, observation)
    if wanted is Mode.SPOT and slack < _to_spot_s(task, observation, choice):
        return _held_or_on_demand(task, observation)
    if wanted is Mode.BOTH and slack < d + (task.handover_s or 0.0):
        return _on_demand(Reason.DEADLINE)
    return choice


def _is_kept(observation: Observation, choice: Choice) -> bool:
    """Whether the choice goes on with the spot machines that are held."""
    kept = observation.holding.mode is Mode.SPOT and choice.mode is Mode.SPOT
    return kept and choice.zone == observation.holding.zone


def _kept_in_time(task: Task, observation: Observation, choice: Choice, spare_s: float) -> Choice:
    """Machines that all work keep the slack; those that boot take what their boot takes, and a part of a gang some."""
    holding = observation.holding
    if is_partial(task, observation):
        spare_s -= max(task.tick_s, task.handover_s or 0.0)
        return _until(choice, spare_s) if spare_s >= 0 else _on_demand(Reason.DEADLINE)
    return choice if not holding.boot_s or spare_s >= holding.boot_s - _EXACT_S else _on_demand(Reason.DEADLINE)


def _to_spot_s(task: Task, observation: Observation, choice: Choice) -> float:
    """The slack that a change to spot machines needs, so that they may be interrupted just before their first step."""
    if observation.holding.mode is Mode.BOTH and choice.zone == observation.holding.zone:
        return task.changeover_s + observation.holding.beside_s + (task.handover_s or 0.0)
    return 2 * task.changeover_s


def _held_or_on_demand(task: Task, observation: Observation) -> Choice:
    """Spot machines that work are as good as time itself: slack does not shrink. Everything else ends on demand."""
    if observation.holding.mode is Mode.SPOT and not is_partial(task, observation):
        return Choice(mode=Mode.SPOT, zone=observation.holding.zone, reason=Reason.DEADLINE)
    return _on_demand(Reason.DEADLINE)


def _in_money(task: Task, observation: Observation, choice: Choice, left_usd: float) -> Choice:
    """The net under the budget: spot, or waiting for it, only with k·(C + d) + p·d left."""
    spare = left_usd - least_usd(task, observation.work_left_s)
    if choice.mode is Mode.ON_DEMAND:
        return choice
    if _is_kept(observation, choice) and not is_partial(task, observation):
        dearer = _dearer_usd(task, named(observation.zones, choice.zone))
        return choice if dearer <= 0 or dearer <= spare else _on_demand(Reason.BUDGET)
    if observation.holding.mode is Mode.BOTH:
        return choice
    if choice.mode is Mode.IDLE and observation.holding.mode is not Mode.IDLE:
        return choice if spare >= 0 else _on_demand(Reason.BUDGET)
    price = _price(observation, choice)
    return choice if spare >= task.nodes * price * task.changeover_s / _HOUR else _on_demand(Reason.BUDGET)


def _dearer_usd(task: Task, zone: ZoneState | None) -> float:
    """By how much a tick on spot machines costs more than the same work on demand; below zero where it costs less."""
    above = zone.usd_per_hour - task.on_demand_usd_per_hour if zone else 0.0
    return task.nodes * above * task.tick_s / _HOUR


def _price(observation: Observation, choice: Choice) -> float:
    zone = named(observation.zones, choice.zone)
    if zone is not None:
        return zone.usd_per_hour
    return min((zone.usd_per_hour for zone in observation.zones), default=0.0)


def _on_demand(reason: Reason) -> Choice:
    return Choice(mode=Mode.ON_DEMAND, reason=reason)


def _until(choice: Choice, spare_s: float) -> Choice:
    """The same choice, not to be trusted past the moment when the net may catch it."""
    return choice if choice.holds_s <= spare_s else choice.held(spare_s)
