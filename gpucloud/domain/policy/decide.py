"""The one function that every policy is asked through: in a replay, in a plan, and while a job runs."""

from __future__ import annotations

import dataclasses

from gpucloud.domain.policy.anew import anew
from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.elastic import elastic, is_partial
from gpucloud.domain.policy.greedy import greedy
from gpucloud.domain.policy.learned import Tables, learned
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.net import secured
from gpucloud.domain.policy.observation import Mode, Observation, Task
from gpucloud.domain.policy.uniform import uniform


def decide(policy: Policy, task: Task, seen: Observation, tables: Tables | None = None) -> Choice:
    """Return what to run on now: what the policy wants, or what deadline and budget leave.

    `LEARNED` without tables acts as `UNIFORM`. Greedy, and every policy without a deadline, waits for spot. Of a script
    that begins anew none is asked: they reckon with work that is kept.
    """
    if is_partial(task, seen):
        choice = elastic(task, seen, lambda alone: _wanted(policy, task, alone, tables))
    else:
        choice = _wanted(policy, task, seen, tables)
    choice = secured(task, seen, choice)
    return choice if choice.holds_s >= task.tick_s else dataclasses.replace(choice, holds_s=task.tick_s)


def without_deadline(task: Task, seen: Observation) -> Choice:
    """Return what a job runs on that never waits and has no deadline: spot, else on demand, which it keeps.

    No policy is asked of such a job: its supervisor takes the cheapest pool that has machines, after each loss anew.
    """
    if is_partial(task, seen):
        return elastic(task, seen, lambda alone: _never_idle(task, alone))
    return _never_idle(task, seen)


def _never_idle(task: Task, seen: Observation) -> Choice:
    choice = greedy(task, seen)
    return Choice(mode=Mode.ON_DEMAND, reason=Reason.STAY) if choice.mode is Mode.IDLE else choice


def _wanted(policy: Policy, task: Task, seen: Observation, tables: Tables | None) -> Choice:
    if task.begins_anew and policy is not Policy.ON_DEMAND:
        return anew(task, seen)
    match policy:
        case Policy.UNIFORM:
            return uniform(task, seen)
        case Policy.GREEDY:
            return greedy(task, seen)
        case Policy.ON_DEMAND:
            return Choice(mode=Mode.ON_DEMAND, reason=Reason.ASKED)
        case Policy.LEARNED:
            return uniform(task, seen) if tables is None else learned(tables, task, seen)
