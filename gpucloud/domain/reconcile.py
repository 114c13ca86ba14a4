"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.action import (
    Action,
    Arm,
    CloseAttempt,
    Detach,
    Done,
    Drill,
    EndAttempt,
    Finish,
    NoteInterruptions,
    OpenAttempt,
    Prepare,
    Provision,
    Replace,
    Resize,
    TearDown,
    Tell,
    Wait,
)
from gpucloud.domain.agentstatus import AttemptStatus, Outcome, Progress, RunState, Stop
from gpucloud.domain.node import EndCause, NodeState
from gpucloud.domain.prepaid import Wall
from gpucloud.domain.seen import Goal, Limits, NodeSeen, Readiness, Rules, Seen, Until
from gpucloud.domain.state import Attempt, ExitReason, Interruption, InterruptionKind


def decide(goal: Goal, seen: Seen, rules: Rules) -> Action:
    """Return the next thing to do for the job. Total and pure: every state has an answer."""
    if seen.state.status.ended:
        kept = goal.keep and seen.state.exit_reason is ExitReason.SUCCEEDED
        return Done() if seen.state.torn_down or kept else TearDown()
    if seen.state.attempt is not None:
        return _during(seen.state.attempt, goal, seen, rules)
    return _between(goal, seen, rules)


def part_of(attempt: Attempt, node: NodeSeen | None) -> AttemptStatus | None:
    """Return what the node says of its part in the attempt; None while it has not heard of it."""
    part = node.status.attempt if node is not None and node.status is not None else None
    return part if part is not None and part.attempt == attempt.number else None


def members_of(attempt: Attempt, seen: Seen) -> tuple[NodeSeen | None, ...]:
    """Return the attempt's members as seen, in rank order; None for one that the cloud no longer lists."""
    by_id = {node.node.id: node for node in seen.nodes}
    return tuple(by_id.get(member.node_id) for member in attempt.members)


def progress_of(attempt: Attempt, seen: Seen) -> Progress | None:
    """Return what rank 0's script last reported."""
    part = part_of(attempt, members_of(attempt, seen)[0])
    return part.progress if part else None


# During an attempt


def _during(attempt: Attempt, goal: Goal, seen: Seen, rules: Rules) -> Action:
    members = members_of(attempt, seen)
    news = _news(attempt, members, seen, rules.limits)
    if news:
        return NoteInterruptions(interruptions=news)
    if all(is_over(attempt, node) for node in members):
        return _close(attempt, members, seen, rules)
    return (
        _order(attempt, members, seen, rules.limits)
        or _tell(seen)
        or _make_room(seen)
        or _prepare(seen, rules.limits)
        or _renew(seen, rules.wall)
        or _drill(attempt, goal, seen, rules.limits)
        or Wait(why="running")
    )


def is_over(attempt: Attempt, node: NodeSeen | None) -> bool:
    """Whether the member has nothing running of this attempt."""
    if _is_gone(node):
        return True
    part = part_of(attempt, node)
    return part is not None and part.state is RunState.EXITED


def _is_gone(node: NodeSeen | None) -> bool:
    return node is None or node.node.state is NodeState.TERMINATED


def _news(
    attempt: Attempt, members: tuple[NodeSeen | None, ...], seen: Seen, limits: Limits
) -> tuple[Interruption, ...]:
    known = {i.node_id for i in seen.state.interruptions}
    kinds = {
        member.node_id: _taken(attempt, node, seen, limits)
        for member, node in zip(attempt.members, members, strict=True)
        if member.node_id not in known
    }
    return tuple(
        Interruption(node_id=node_id, kind=kind, attempt=attempt.number, noticed_at=seen.now)
        for node_id, kind in kinds.items()
        if kind is not None
    )


def _taken(attempt: Attempt, node: NodeSeen | None, seen: Seen, limits: Limits) -> InterruptionKind | None:
    if node is None:
        return InterruptionKind.LOST
    if node.status is not None and node.status.notice is not None and not _is_gone(node):
        return InterruptionKind.NOTICE
    if _is_gone(node):
        # What ended by our own choice or by the shut-off was not taken by the cloud.
        ours = node.node.end_cause in (EndCause.SCHEDULE, EndCause.CHOICE)
        return None if ours else InterruptionKind.LOST
    frozen = node.silent_for >= limits.silent and not is_over(attempt, node) and _somebody_answers(seen)
    return InterruptionKind.FROZEN if frozen else None


def _somebody_answers(seen: Seen) -> bool:
    """All silent at once means that we are offline, and nothing is believed."""
    return any(node.silent_for == timedelta(0) and not _is_gone(node) for node in seen.nodes)


def _close(attempt: Attempt, members: tuple[NodeSeen | None, ...], seen: Seen, rules: Rules) -> Action:
    reason = _reason(attempt, members, seen)
    waited = seen.failed_for if seen.failed_for is not None else timedelta(0)
    if reason is ExitReason.USER_ERROR and waited < rules.limits.settle:
        # A script also fails because a peer's machine went: give the cloud a moment to say so.
        return Wait(why="a script failed; asking the cloud whether a machine went first")
    return CloseAttempt(reason=reason)


def _reason(attempt: Attempt, members: tuple[NodeSeen | None, ...], seen: Seen) -> ExitReason:
    parts = [part_of(attempt, node) for node in members]
    outcomes = {part.outcome if part else None for part in parts}
    if outcomes == {Outcome.DONE}:
        return ExitReason.SUCCEEDED
    taken = _reason_of_interruptions(attempt, seen)
    if attempt.condemned is not None and (taken is None or not attempt.condemned.retried):
        return attempt.condemned
    if taken is not None:
        return taken
    if Outcome.FAILED in outcomes:
        return ExitReason.USER_ERROR
    if outcomes == {Outcome.LEFT}:
        return ExitReason.INTERRUPTED if _can_renew(seen) else ExitReason.BUDGET
    return ExitReason.LOST


def _reason_of_interruptions(attempt: Attempt, seen: Seen) -> ExitReason | None:
    kinds = {i.kind for i in seen.state.interruptions if i.attempt == attempt.number}
    if not kinds:
        return None
    return ExitReason.INTERRUPTED if kinds == {InterruptionKind.NOTICE} else ExitReason.LOST


_FIRMNESS = {Stop.NO: 0, Stop.SAVE: 1, Stop.KILL: 2}


def _order(attempt: Attempt, members: tuple[NodeSeen | None, ...], seen: Seen, limits: Limits) -> EndAttempt | None:
    """One member down means that the others cannot go on: they end now, not when their collectives give up."""
    wanted = (
        _order_for_the_broken(attempt, members, seen, limits)
        or _order_for_the_hung(attempt, seen, limits)
        or _order_for_the_user(attempt, seen, limits)
    )
    return wanted if wanted and _FIRMNESS[wanted.how] > _FIRMNESS[attempt.ordered] else None


def _order_for_the_broken(
    attempt: Attempt, members: tuple[NodeSeen | None, ...], seen: Seen, limits: Limits
) -> EndAttempt | None:
    taken = _reason_of_interruptions(attempt, seen)
    outcomes = {part.outcome for part in (part_of(attempt, node) for node in members) if part}
    if any(_is_gone(node) for node in members) or taken is ExitReason.LOST or Outcome.KILLED in outcomes:
        return EndAttempt(how=Stop.KILL, reason=taken or ExitReason.LOST)
    if seen.failed_for is not None and seen.failed_for >= limits.settle:
        return EndAttempt(how=Stop.KILL, reason=taken or ExitReason.USER_ERROR)
    if seen.uneven_for is not None and seen.uneven_for >= limits.save:
        return EndAttempt(how=Stop.KILL, reason=taken or ExitReason.LOST)
    return None


def _order_for_the_hung(attempt: Attempt, seen: Seen, limits: Limits) -> EndAttempt | None:
    """Armed after the first steps and only while training: saving and evaluating take their own time."""
    progress = progress_of(attempt, seen)
    if progress is None or progress.phase != "train" or progress.step_seconds is None:
        return None
    limit = max(limits.hang_at_least.total_seconds(), limits.hang_steps * progress.step_seconds)
    return EndAttempt(how=Stop.KILL, reason=ExitReason.HUNG) if progress.age_s > limit else None


def _order_for_the_user(attempt: Attempt, seen: Seen, limits: Limits) -> EndAttempt | None:
    if seen.wanted_end is None:
        return None
    waited = seen.now - attempt.condemned_at if attempt.condemned_at else timedelta(0)
    return EndAttempt(how=Stop.KILL if waited >= limits.save else Stop.SAVE, reason=seen.wanted_end)


def _can_renew(seen: Seen) -> bool:
    until = seen.state.paid_until
    return seen.payable_until is not None and (until is None or seen.payable_until > until)


def _make_room(seen: Seen) -> Action | None:
    """Ask for another machine while the one with a notice still saves: if the budget has the money for both."""
    noticed = [n for n in seen.nodes if n.status is not None and n.status.notice is not None]
    counted = [n.node.id for n in noticed if not _is_gone(n) and not n.node.detached]
    if counted and seen.payable_with_another is not None:
        return _lower(seen, seen.payable_with_another) or Detach(node_id=counted[0])
    # Given up is given up: a frozen node that wakes later would bring its old ranks back.
    given_up = {i.node_id for i in seen.state.interruptions if i.kind is InterruptionKind.FROZEN}
    alive = tuple(n.node.id for n in seen.nodes if not _is_gone(n) and not n.node.detached)
    frozen = tuple(node_id for node_id in alive if node_id in given_up)
    return Replace(node_ids=frozen) if frozen else None


def _lower(seen: Seen, payable: datetime) -> Arm | None:
    """The shut-off comes closer when more machines are alive than it was reckoned for."""
    until = seen.group.armed_until
    return Arm(until=payable) if until is not None and until - payable > timedelta(seconds=1) else None


def _renew(seen: Seen, wall: Wall) -> Arm | None:
    """Renewed when half of the horizon is gone, and only if it is worth a call; lowered whenever it must be."""
    until, payable = seen.group.armed_until, seen.payable_until
    if payable is None or until is None:
        return None
    lower = _lower(seen, payable)
    if lower is not None:
        return lower
    worth = payable - until >= min(timedelta(seconds=60), wall.horizon / 4)
    return Arm(until=payable) if worth and until - seen.now < wall.horizon / 2 else None


def _drill(attempt: Attempt, goal: Goal, seen: Seen, limits: Limits) -> Drill | None:
    progress = progress_of(attempt, seen)
    if not goal.drill or seen.state.drilled or progress is None:
        return None
    at = limits.drill_at * progress.total_steps if progress.total_steps else progress.first_step + 20
    return Drill(node_id=attempt.members[-1].node_id) if progress.step >= at else None


# Between attempts


def _between(goal: Goal, seen: Seen, rules: Rules) -> Action:
    return (
        _finish(seen, rules.limits)
        or _capacity(goal, seen, rules)
        or _prepare(seen, rules.limits)
        or _tell(seen)
        or _start(goal, seen, rules.limits)
        or Wait(why="machines" if not seen.group.alive else "bootstrap")
    )


def _finish(seen: Seen, limits: Limits) -> Finish | None:
    if seen.wanted_end is not None:
        return Finish(reason=seen.wanted_end)
    if seen.failed_bootstraps >= limits.bootstrap_tries:
        error = next((node.error for node in seen.nodes if node.error), "the bootstrap failed")
        return Finish(reason=ExitReason.USER_ERROR, message=error, exit_code=14)
    count = fruitless(seen.state.attempts[seen.state.reopened_after :])
    if count >= limits.fruitless_attempts:
        return Finish(reason=ExitReason.LOST, message=f"{count} attempts in a row made no new step")
    if seen.payable_until is None:
        return Finish(reason=ExitReason.BUDGET, message="the budget cannot pay for another start and its save")
    return None


def fruitless(attempts: tuple[Attempt, ...]) -> int:
    """Return how many attempts at the end of the list made no step that had not been made before."""
    best, count = 0, 0
    for attempt in attempts:
        count = 0 if (attempt.last_step or 0) > best else count + 1
        best = max(best, attempt.last_step or 0)
    return count


def _capacity(goal: Goal, seen: Seen, rules: Rules) -> Action | None:
    """The shut-off is armed, and read back, before the level that starts machines is set."""
    group, payable = seen.group, seen.payable_until
    if not group.exists:
        return Provision()
    if payable is not None and _must_arm(goal, seen, rules.wall):
        return Arm(until=payable)
    if group.size != goal.nodes:
        return Resize(size=goal.nodes)
    unfit = tuple(n.node.id for n in seen.nodes if _is_unfit(n, seen, rules.limits))
    if unfit:
        return Replace(node_ids=unfit)
    known = {i.node_id for i in seen.state.interruptions}
    news = tuple(n for n in seen.nodes if n.status and n.status.notice and not _is_gone(n) and n.node.id not in known)
    if news:
        return NoteInterruptions(interruptions=tuple(_early(n, seen) for n in news))
    return _make_room(seen)


def _must_arm(goal: Goal, seen: Seen, wall: Wall) -> bool:
    until = seen.group.armed_until
    if until is None or until - seen.now < wall.least:
        return True
    starting = seen.group.size < goal.nodes and until - seen.now < wall.horizon / 2
    return (starting and _can_renew(seen)) or _renew(seen, wall) is not None


def _is_unfit(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    silent = node.silent_for >= limits.silent and node.readiness is Readiness.READY and _somebody_answers(seen)
    return not _is_gone(node) and not node.node.detached and (node.readiness is Readiness.FAILED or silent)


def _early(node: NodeSeen, seen: Seen) -> Interruption:
    number = seen.state.attempts[-1].number if seen.state.attempts else 0
    return Interruption(node_id=node.node.id, kind=InterruptionKind.NOTICE, attempt=number, noticed_at=seen.now)


def _start(goal: Goal, seen: Seen, limits: Limits) -> Action | None:
    ready = [n.node.id for n in seen.nodes if _is_usable(n, limits) and n.readiness is Readiness.READY]
    if len(ready) < goal.nodes:
        return None
    if goal.until is Until.READY:
        return Done()
    return OpenAttempt(number=len(seen.state.attempts) + 1, node_ids=_ranked(ready, seen)[: goal.nodes])


def _ranked(ready: list[str], seen: Seen) -> tuple[str, ...]:
    """Nodes that were members before come first and keep their order, so that rank 0 moves as seldom as it can."""
    last = seen.state.attempts[-1].members if seen.state.attempts else ()
    order = {member.node_id: member.rank for member in last}
    return tuple(sorted(ready, key=lambda node_id: (order.get(node_id, len(order)), node_id)))


# Both


def _is_usable(node: NodeSeen, limits: Limits) -> bool:
    noticed = node.status is not None and node.status.notice is not None
    return not _is_gone(node) and not node.node.detached and not noticed and node.silent_for < limits.silent


def _prepare(seen: Seen, limits: Limits) -> Prepare | None:
    waiting = tuple(
        n.node.id
        for n in seen.nodes
        if n.node.state is NodeState.RUNNING and n.readiness is Readiness.NO and _is_usable(n, limits)
    )
    return Prepare(node_ids=waiting) if waiting else None


def _tell(seen: Seen) -> Tell | None:
    untold = tuple(
        n.node.id
        for n in seen.nodes
        if n.readiness is Readiness.READY and not n.told and not _is_gone(n) and n.silent_for == timedelta(0)
    )
    return Tell(node_ids=untold) if untold else None
