"""What to do next for a job, decided from what is stored and what is seen; nothing here touches the world.

`decide` is called once a tick. Whatever it returns may be done twice, and the process may die before, while or after
doing it: the next tick, here or elsewhere, sees the world as it is then and decides again. What to do while an attempt
runs is decided in `during`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import format_moment, format_span
from gpucloud.domain.money.budget import PrepaidRule, may_launch, sooner
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import Attempt, ExitReason, JobState
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    Done,
    Finish,
    Inspect,
    NoteInterruptions,
    OpenAttempt,
    Pause,
    Provision,
    Replace,
    Resize,
    StayOn,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.budget import obey
from gpucloud.domain.supervision.capacity import (
    has_enough,
    is_cooling,
    other_pool,
    pause_line,
    pause_until,
    pool_of_the_decision,
    refused_lately,
    saved_steps,
    too_late_to_start,
)
from gpucloud.domain.supervision.during import during
from gpucloud.domain.supervision.elastic import AWAITING, can_start, ranked, results_first, succeed, waits_until
from gpucloud.domain.supervision.membership import NOBODY_ANSWERS, all_silent, is_usable, noticed_beside, some_leave
from gpucloud.domain.supervision.quarantine import failed_setup, give_up_pool, note_bad, stop_buying, to_replace
from gpucloud.domain.supervision.renewal import can_renew, make_room, prepare, promise, renew, tell, unfit
from gpucloud.domain.supervision.snapshot import (
    DriveTrial,
    Goal,
    Limits,
    NodeSnapshot,
    Readiness,
    Rules,
    Snapshot,
)
from gpucloud.domain.untrusted import in_one_line


def decide(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """Return the next thing to do for the job. Total and pure: every state has an answer.

    A machine leaves the teardown to whoever comes from outside: it ends its own group, and with it itself.
    """
    obeyed = obey(goal, snapshot, rules)
    if obeyed is not None:
        return obeyed
    if snapshot.state.status.ended:
        return _after_the_end(goal, snapshot, rules)
    if (left := leave(goal, snapshot, rules)) is not None:
        return left
    if snapshot.state.attempt is not None:
        return during(snapshot.state.attempt, goal, snapshot, rules)
    return between(goal, snapshot, rules)


# Between two attempts, and before the first.


_WORTH = timedelta(seconds=30)
_ARMING = timedelta(seconds=15)
"""What may pass until the least time is armed and machines are asked for: else it would be armed anew for ever."""
IN_USE = "waiting for GPUs that others use until"
TIME_IS_OVER = "unattended time is over; `gpucloud train {job}` or `reconcile` goes on"
RESULTS_ARE_KEPT = "; its results so far are in its store, and come home when it ends"


def between(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """Return the next thing to do when no attempt is open."""
    ends = _finish(goal, snapshot, rules.limits)
    if ends is None and snapshot.payable_until is None:
        return (
            note_bad(snapshot, rules.limits)
            or _note_news(snapshot)
            or tell(snapshot)
            or Wait(why="waiting until machines have left")
        )
    return (
        ends
        or note_bad(snapshot, rules.limits)
        or _capacity(goal, snapshot, rules)
        or prepare(snapshot)
        or tell(snapshot)
        or _start(goal, snapshot, rules.limits)
        or Wait(why=_waits_for(snapshot, rules.limits))
    )


def _waits_for(snapshot: Snapshot, limits: Limits) -> str:
    if all_silent(snapshot, limits):
        return NOBODY_ANSWERS
    return "machines" if not snapshot.group.alive else "bootstrap"


def _finish(goal: Goal, snapshot: Snapshot, limits: Limits) -> Finish | None:
    if snapshot.wanted_end is not None:
        return Finish(reason=snapshot.wanted_end)
    if (failed := failed_setup(snapshot)) is not None:
        return Finish(reason=ExitReason.USER_ERROR, message=failed)
    if snapshot.failed_bootstraps >= limits.bootstrap_tries and not can_start(goal, snapshot):
        error = next((node.error for node in snapshot.nodes if node.error), "the bootstrap failed")
        return Finish(reason=ExitReason.UNPREPARED, message=error)
    if (why := _in_vain(goal, snapshot.state.attempts[snapshot.state.reopened_after :], limits)) is not None:
        return Finish(reason=ExitReason.LOST, message=why)
    if snapshot.payable_until is None and not some_leave(snapshot):
        return Finish(reason=ExitReason.BUDGET)
    return (
        stop_buying(snapshot, limits) or _give_up(goal, snapshot, limits) or too_late_to_start(goal, snapshot, limits)
    )


def _give_up(goal: Goal, snapshot: Snapshot, limits: Limits) -> Finish | None:
    cost = saved_steps(snapshot.state, snapshot.now, limits)
    if goal.give_up is None or cost is None or cost.times <= goal.give_up:
        return None
    message = f"{cost} (checkpoint: give_up: {goal.give_up:g}x)"
    return Finish(reason=ExitReason.INTERRUPTED, message=message)


def _pause(snapshot: Snapshot, limits: Limits) -> Wait | None:
    """Between attempts that end soon and save nothing; without machines it costs nothing."""
    until = pause_until(snapshot.state, limits)
    if until is None or snapshot.now >= until:
        return None
    return Wait(why=pause_line(snapshot.state, until, snapshot.now, limits))


def _in_vain(goal: Goal, attempts: tuple[Attempt, ...], limits: Limits) -> str | None:
    """Return why no further attempt is worth its money, as the newest in a row show; None while one is."""
    if goal.uses_library or goal.saves_alone or any(map(_told, attempts)):
        count, how = fruitless(attempts), "saved nothing new" if goal.saves_alone else "made no new step"
    else:
        brief = max(limits.soon, limits.changeover)
        count = cut_short(attempts, brief)
        how = f"ended within {format_span(brief)}, and the script tells no steps: what they made cannot be seen"
    return f"{count} attempts in a row {how}" if count >= limits.fruitless_attempts else None


def _told(attempt: Attempt) -> bool:
    """Whether its script tells how far it is: only of one that does is it known that it hangs."""
    return attempt.reason is ExitReason.HUNG or (attempt.last_step, attempt.saved_step) != (None, None)


def cut_short(attempts: tuple[Attempt, ...], brief: timedelta) -> int:
    """Return how many attempts at the end of the list ended before they can have made much.

    One that worked for longer and was interrupted shows no fault: a script that tells nothing may have saved by itself.
    """
    count = 0
    for attempt in attempts:
        took = (attempt.ended_at or attempt.started_at) - attempt.started_at
        count = count + 1 if took < brief else 0
    return count


def fruitless(attempts: tuple[Attempt, ...]) -> int:
    """Return how many attempts at the end of the list made no new step.

    A step is new that none before had made, and so is one that none before had committed: where the work of a long
    attempt was lost, those that commit it bit by bit go on. What a script made that began anew is new.
    """
    made, committed, count = 0, 0, 0
    for attempt in attempts:
        if attempt.begun_anew:
            made, committed = 0, 0
        is_new = (attempt.last_step or 0) > made or (attempt.saved_step or 0) > committed
        count = 0 if is_new else count + 1
        made, committed = max(made, attempt.last_step or 0), max(committed, attempt.saved_step or 0)
    return count


def _capacity(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """Results of the last attempt are brought before the machines go that have them, where that does not take long."""
    if goal.self_driving:
        return _own_capacity(goal, snapshot, rules)
    action = _level(goal, snapshot, rules)
    first = results_first(snapshot, rules.limits, before=action) if isinstance(action, Resize) else None
    return first or action


def _level(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """The shut-off is armed, and read back, before the level that starts machines is set."""
    group, payable = snapshot.group, promise(snapshot)
    elsewhere = succeed(goal, snapshot) or _elsewhere(goal, snapshot, rules.limits) or _bad_pool(snapshot, rules.limits)
    if elsewhere is not None:
        return elsewhere
    if not group.exists:
        return Provision()
    if payable is not None and _must_arm(goal, snapshot, rules):
        return Arm(until=payable)
    if group.size != goal.nodes:
        refused = refused_lately(snapshot, rules.limits)
        wait = Wait(why="the cloud has no more machines now") if refused else _pause(snapshot, rules.limits)
        if wait is None or not has_enough(goal, snapshot):
            return wait or _resize(goal, snapshot, rules)
    return _machines(goal, snapshot, rules)


def _resize(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """A start that the cloud would refuse, for its shut-off comes too soon, is not tried in turns."""
    if goal.nodes > snapshot.group.size and not may_launch(
        snapshot.group.armed_until, snapshot.now, rules.prepaid_rule
    ):
        return Wait(why="waiting for a later shut-off")
    return Resize(size=goal.nodes)


def _elsewhere(goal: Goal, snapshot: Snapshot, limits: Limits) -> Action | None:
    if snapshot.capacity_choice is not None:
        return pool_of_the_decision(goal, snapshot, snapshot.capacity_choice, limits)
    return other_pool(goal, snapshot, limits)


def _own_capacity(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """What a machine may do about the machines beside it: none is bought elsewhere, and no time at all.

    The group refills itself for as long as its shut-off lies ahead.
    """
    until = snapshot.group.armed_until
    if not snapshot.group.exists or until is None or until - snapshot.now < rules.prepaid_rule.least:
        message = _time_is_over(snapshot.state)
        return results_first(snapshot, rules.limits, message) or Pause(message=message)
    if snapshot.group.size != goal.nodes:
        return Resize(size=goal.nodes)
    return _machines(goal, snapshot, rules)


def _time_is_over(state: JobState) -> str:
    kept = bool(state.attempts) and state.attempts[-1].outputs_came
    return TIME_IS_OVER.format(job=state.job) + (RESULTS_ARE_KEPT if kept else "")


def _machines(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """Return what to do about machines that are unfit or are being interrupted."""
    bad = to_replace(snapshot) or unfit(snapshot, rules.limits)
    if bad:
        return Replace(node_ids=bad)
    return _note_news(snapshot) or make_room(goal, snapshot, rules.prepaid_rule)


def _note_news(snapshot: Snapshot) -> NoteInterruptions | None:
    news = noticed_beside(snapshot)
    return NoteInterruptions(interruptions=news) if news else None


def _bad_pool(snapshot: Snapshot, limits: Limits) -> Action | None:
    return None if is_cooling(snapshot.state, snapshot.state.pool, snapshot.now) else give_up_pool(snapshot, limits)


def _must_arm(goal: Goal, snapshot: Snapshot, rules: Rules) -> bool:
    until, prepaid_rule = snapshot.group.armed_until, rules.prepaid_rule
    if until is None or (
        until - snapshot.now < prepaid_rule.least - _ARMING and not all_silent(snapshot, rules.limits)
    ):
        return True
    starting = snapshot.group.size < goal.nodes and until - snapshot.now < prepaid_rule.horizon / 2
    return (starting and _gains(snapshot, until)) or renew(goal, snapshot, prepaid_rule, rules.limits) is not None


def _gains(snapshot: Snapshot, until: datetime) -> bool:
    """While nothing is spent the payable time moves on with the clock: armed anew for that, no machine ever starts."""
    return can_renew(snapshot) and snapshot.payable_until is not None and snapshot.payable_until - until >= _WORTH


def _start(goal: Goal, snapshot: Snapshot, limits: Limits) -> Action | None:
    usable = [n for n in snapshot.nodes if is_usable(n, limits)]
    own = [
        n for n in usable if n.node.pool == snapshot.state.pool
    ]  # beside them, those that they took over from may end
    fewest = goal.fewest(snapshot.state.pool.market)
    ready = [n.node.id for n in (own if len(own) >= fewest else usable) if n.readiness is Readiness.READY]
    if len(ready) < fewest:
        return None
    until = waits_until(goal, snapshot, limits) if len(ready) < goal.nodes else None
    if until is not None:
        return Wait(why=f"{AWAITING} {format_moment(until, snapshot.now)}: {len(ready)} of {goal.nodes} are ready")
    if goal.until is Until.READY:
        return Done()
    paused = _pause(snapshot, limits)
    if paused is not None:
        return paused
    opening = OpenAttempt(number=len(snapshot.state.attempts) + 1, node_ids=ranked(ready, snapshot)[: goal.nodes])
    return _inspect(opening, snapshot, limits) or opening


def _inspect(opening: OpenAttempt, snapshot: Snapshot, limits: Limits) -> Action | None:
    """GPUs are looked at before every attempt that uses them; who is bad was written down before we came here.

    Those that others use are looked at again after a while.
    """
    if not snapshot.inspects:
        return None
    last = snapshot.inspection
    if last is None or (last.number, last.node_ids) != (opening.number, opening.node_ids):
        return Inspect(number=opening.number, node_ids=opening.node_ids)
    if not last.done:
        return Wait(why="checking the GPUs")
    if not last.in_use:
        return None
    if last.over_at is not None and snapshot.now - last.over_at >= limits.ask_again:
        return Inspect(number=opening.number, node_ids=opening.node_ids)
    until = format_moment(min(one.since for one in last.in_use) + limits.in_use, snapshot.now)
    used = "; ".join(f"{one.node_id}: {in_one_line(one.why)}" for one in last.in_use)
    return Wait(why=f"{IN_USE} {until}: {used}")


# When a job needs nobody outside any more: its machines are there, paid, and have shown that they can drive it.


def leave(goal: Goal, snapshot: Snapshot, rules: Rules) -> Done | StayOn | None:
    """Return whether whoever waits to leave the job to its machines may, or has to stay; None: not yet, or no such."""
    if goal.until is not Until.LAUNCHED or snapshot.wanted_end is not None or not _stands(goal, snapshot, rules):
        return None
    counted = tuple(node for node in snapshot.nodes if node.node in snapshot.group.counted)
    if any(trial is not None and trial.refused is None for trial in _trials(counted, goal)):
        return Done()
    why = _why_not(counted, goal, snapshot, rules)
    return StayOn(why=why) if why is not None else None


def _stands(goal: Goal, snapshot: Snapshot, rules: Rules) -> bool:
    """Whether every machine is listed behind an armed shut-off, and has all that it needs to drive.

    One that was launched while we looked on makes itself fit; an older one has its driver when we have prepared it.
    """
    group = snapshot.group
    fewest = goal.fewest(snapshot.state.pool.market)
    there = group.exists and fewest <= group.size <= goal.nodes and len(group.counted) >= fewest
    if len(group.alive) > len(group.counted):
        return False  # one that is being interrupted stands beside the level: the group's limit is one more for it
    if not there or group.armed_until is None or renew(goal, snapshot, rules.prepaid_rule, rules.limits) is not None:
        return False
    return all(_is_fit(node, goal) for node in snapshot.nodes if node.node in group.counted)


def _is_fit(node: NodeSnapshot, goal: Goal) -> bool:
    is_new = goal.began_at is not None and node.node.launched_at >= goal.began_at
    return is_new or node.readiness is Readiness.READY


def _trials(counted: tuple[NodeSnapshot, ...], goal: Goal) -> tuple[DriveTrial | None, ...]:
    """All have one role, so that one of them tells of all. A trial under an older order was of other rights."""
    return tuple(node.trial if node.trial and node.trial.number == goal.number else None for node in counted)


def _why_not(counted: tuple[NodeSnapshot, ...], goal: Goal, snapshot: Snapshot, rules: Rules) -> str | None:
    """Return what the machines lack, or that none has shown anything for too long."""
    limits = rules.limits
    for node, trial in zip(counted, _trials(counted, goal), strict=True):
        if trial is not None and trial.refused is not None and _time(node, goal, snapshot) >= limits.granted:
            return f"{node.node.id} may not do what driving the job needs: {in_one_line(trial.refused)}"
    if min(_time(node, goal, snapshot) for node in counted) >= limits.controller:
        return f"no machine has shown within {format_span(limits.controller)} that it can drive the job"
    return None


def _time(node: NodeSnapshot, goal: Goal, snapshot: Snapshot) -> timedelta:
    """Return for how long the machine has been there since somebody wanted to leave."""
    began_at = goal.began_at if goal.began_at is not None else node.node.launched_at
    return snapshot.now - max(began_at, node.node.launched_at)


# After the end: machines that stay for their user, or wait for a mended script.


def _after_the_end(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """Nothing is ended before results that nobody has brought were asked for, if who has them can be asked."""
    if snapshot.state.torn_down:
        return Done()
    until = _held_until(goal, snapshot) if not goal.self_driving else None
    if until is not None and snapshot.now < until:
        return _hold(until, snapshot)
    if not goal.self_driving and _is_kept(goal, snapshot):
        return _keep(snapshot, rules.prepaid_rule)
    return results_first(snapshot, rules.limits) or (Done() if goal.self_driving else TearDown())


def _keep(snapshot: Snapshot, prepaid_rule: PrepaidRule) -> Action:
    """Nobody renews their time; it ends sooner where the cloud has a later end than the budget pays for.

    Whoever lowered it may have died before the cloud heard, though the order counts as acted on. What was paid for
    longer than the horizon, while the machines drove their job, stays for as long as there is money.
    """
    payable = snapshot.payable_until or snapshot.lasts_until or snapshot.now
    if snapshot.group.alive and snapshot.group.armed_until is None:
        return _arm_anew(min((snapshot.state.ended_at or snapshot.now) + prepaid_rule.horizon, payable), snapshot)
    is_short = snapshot.group.alive and payable - snapshot.now < prepaid_rule.horizon
    closer = sooner(snapshot.group.armed_until, payable) if is_short else None
    return Arm(until=closer) if closer is not None else Done()


def _held_until(goal: Goal, snapshot: Snapshot) -> datetime | None:
    """Return until when the machines wait for a mended script; None where there are none, or nothing to mend."""
    failed_at = snapshot.state.failed_at
    if goal.hold is None or goal.end is not None or failed_at is None or not snapshot.group.alive:
        return None
    return failed_at + goal.hold


def _hold(until: datetime, snapshot: Snapshot) -> Action:
    """The shut-off comes when the wait is over, or the budget before: nobody needs to be there, or to renew it."""
    until = min(until, snapshot.payable_until or snapshot.lasts_until or snapshot.now)
    armed = snapshot.group.armed_until
    if armed is None:
        return _arm_anew(until, snapshot)
    moves = sooner(armed, until) is not None or until - armed >= _WORTH
    return Arm(until=until) if moves else Done()


def _arm_anew(until: datetime, snapshot: Snapshot) -> Arm | TearDown:
    """Somebody removed the shut-off of machines that nobody supervises: they have one again, no later than before."""
    return Arm(until=until) if until > snapshot.now else TearDown()


def _is_kept(goal: Goal, snapshot: Snapshot) -> bool:
    """Whether machines are left up for the user: those of a job that succeeded, for as long as they are paid."""
    wanted = goal.keep and goal.end is None and snapshot.state.exit_reason is ExitReason.SUCCEEDED
    armed = snapshot.group.armed_until
    return wanted and bool(snapshot.group.alive or (armed is not None and armed > snapshot.now))
