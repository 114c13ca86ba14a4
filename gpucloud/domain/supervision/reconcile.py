"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again.
"""

from __future__ import annotations

from gpucloud.domain.state import ExitReason
from gpucloud.domain.supervision.action import (
    Action,
    Done,
    TearDown,
)
from gpucloud.domain.supervision.between import between
from gpucloud.domain.supervision.budget import change_budget
from gpucloud.domain.supervision.during import during
from gpucloud.domain.supervision.launched import goes_by_itself
from gpucloud.domain.supervision.seen import Goal, Rules, Seen, Until


def decide(goal: Goal, seen: Seen, rules: Rules) -> Action:
    """Return the next thing to do for the job. Total and pure: every state has an answer.

    A machine leaves the teardown to whoever comes from outside: it ends its own group, and with it itself.
    """
    changed = change_budget(seen, goal.nodes, rules)
    if changed is not None:
        return changed
    if seen.state.status.ended:
        if goal.self_driving:
            return Done()
        kept = goal.keep and seen.state.exit_reason is ExitReason.SUCCEEDED
        return Done() if seen.state.torn_down or kept else TearDown()
    if goal.until is Until.LAUNCHED and goes_by_itself(goal, seen, rules):
        return Done()
    if seen.state.attempt is not None:
        return during(seen.state.attempt, goal, seen, rules)
    return between(goal, seen, rules)
