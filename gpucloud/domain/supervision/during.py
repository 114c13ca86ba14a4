"""What to do while an attempt is open."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.node.status import EXCUSED, UNTOLD, Outcome, Stop
from gpucloud.domain.node.use import wasted
from gpucloud.domain.state.state import Attempt, ExitReason, Interruption, InterruptionKind
from gpucloud.domain.supervision.action import (
    Action,
    BringHome,
    CloseAttempt,
    Drill,
    EndAttempt,
    NoteInterruptions,
    Replace,
    Wait,
)
from gpucloud.domain.supervision.capacity import is_mute
from gpucloud.domain.supervision.elastic import ask_for_more, have_beside, order_to_grow, order_to_move
from gpucloud.domain.supervision.membership import (
    NOBODY_ANSWERS,
    all_silent,
    believed_dead,
    has_notice,
    hung,
    is_doubtful,
    is_gone,
    is_over,
    members_of,
    noticed_beside,
    outcome_of,
    outcomes_of,
    progress_of,
    quarantined,
    some_leave,
)
from gpucloud.domain.supervision.quarantine import in_a_row, note_bad, to_replace
from gpucloud.domain.supervision.renewal import (
    UNTRAINED,
    for_results,
    is_refused,
    make_room,
    prepare,
    renew,
    tell,
    trained_nothing,
    unfit,
    worth_a_start,
    worth_another_save,
)
from gpucloud.domain.supervision.snapshot import Goal, Homecoming, Limits, NodeSnapshot, Readiness, Rules, Snapshot
from gpucloud.domain.supervision.transitions import last_steps_unsaved


def during(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
    """Return the next thing to do for an open attempt.

    A new machine is made ready first of all: that takes longest, and goes on beside everything else.
    """
    preparing = prepare(snapshot)
    if preparing is not None:
        return preparing
    members = members_of(attempt, snapshot)
    news = _news(attempt, members, snapshot, rules.limits)
    if news:
        return NoteInterruptions(interruptions=news)
    bad = note_bad(snapshot, rules.limits)
    if bad is not None:
        return bad
    if all(is_over(attempt, node) for node in members):
        return _close(attempt, members, goal, snapshot, rules)
    ends = attempt.ends_for_good
    if ends and (_is_overdue(attempt, snapshot, rules.limits) or _only_given_up(attempt, members, snapshot)):
        outputs_at = members[0]
        hears = outputs_at is not None and not is_gone(outputs_at) and outputs_at.silent_for == timedelta(0)
        home = _bring_home(attempt, goal, snapshot, rules) if hears else None
        return home or CloseAttempt(reason=attempt.ending_reason or ExitReason.STOPPED)
    return (
        _order(attempt, members, goal, snapshot, rules)
        or tell(snapshot)
        or _replace_unprepared(attempt, snapshot, rules.limits)
        or _replace_undying(attempt, snapshot, rules.limits)
        or (None if ends else make_room(goal, snapshot, rules.prepaid_rule))  # for an end no machine is asked for
        or (None if ends else _replace_bad(attempt, goal, snapshot, rules.limits))
        or have_beside(attempt, goal, snapshot, rules)
        or ask_for_more(attempt, goal, snapshot, rules)
        or renew(goal, snapshot, rules.prepaid_rule, rules.limits)
        or (Wait(why=NOBODY_ANSWERS) if all_silent(snapshot, rules.limits) else None)
        or _drill(attempt, goal, snapshot, rules.limits)
        or Wait(why="running")
    )


def _news(
    attempt: Attempt, members: tuple[NodeSnapshot | None, ...], snapshot: Snapshot, limits: Limits
) -> tuple[Interruption, ...]:
    known = {i.node_id for i in snapshot.state.interruptions}
    ranks = {member.node_id for member in attempt.members}
    kinds = {
        member.node_id: _interruption(attempt, node, snapshot, limits)
        for member, node in zip(attempt.members, members, strict=True)
        if member.node_id not in known and outcome_of(attempt, member, node) is not Outcome.DONE
    }
    interrupted = tuple(
        Interruption(node_id=node_id, kind=kind, attempt=attempt.number, noticed_at=snapshot.now)
        for node_id, kind in kinds.items()
        if kind is not None
    )
    return (*noticed_beside(snapshot, ranks), *interrupted)


def _interruption(
    attempt: Attempt, node: NodeSnapshot | None, snapshot: Snapshot, limits: Limits
) -> InterruptionKind | None:
    if node is not None and has_notice(node) and not is_gone(node):
        return InterruptionKind.NOTICE
    if node is None or is_gone(node):
        # What ended by our own choice or by the shut-off was not interrupted by the cloud.
        cause = node.node.end_cause if node is not None else EndCause.INTERRUPTED
        if cause in (EndCause.SCHEDULE, EndCause.CHOICE):
            return None
        told = cause is EndCause.INTERRUPTED and _left_unheard(attempt, node, snapshot)
        return InterruptionKind.NOTICE if told else InterruptionKind.LOST
    frozen = not is_over(attempt, node) and believed_dead(node, snapshot, limits)
    return InterruptionKind.FROZEN if frozen else None


def _left_unheard(attempt: Attempt, node: NodeSnapshot | None, snapshot: Snapshot) -> bool:
    """Whether the machine went while nobody supervised, and its attempt had saved on a notice and left.

    The checkpoint is all that is left of such a notice. One is also saved so where the cloud only recommends to leave:
    then the attempt's other machines still work.
    """
    saved, before = snapshot.saved, snapshot.state.attempts[:-1]
    owner = snapshot.state.owner
    known = 0 if attempt.begun_anew else max((one.saved_step or 0 for one in before), default=0)
    ended_at = node.node.ended_at if node is not None else None
    is_news = ended_at is not None and owner is not None and ended_at >= owner.since
    if is_news or saved is None or saved.why is not Why.NOTICE or saved.step <= known:
        return False
    return all(is_over(attempt, member) for member in members_of(attempt, snapshot))


def _close(
    attempt: Attempt, members: tuple[NodeSnapshot | None, ...], goal: Goal, snapshot: Snapshot, rules: Rules
) -> Action:
    reason, message = _reason(attempt, members, snapshot, rules.prepaid_rule), None
    failed_to_save = goal.saves_alone and outcomes_of(attempt, snapshot)[0] is Outcome.FAILED
    refused = reason is ExitReason.LOST and is_refused(attempt, snapshot)
    if reason is ExitReason.SUCCEEDED or refused or (reason is ExitReason.USER_ERROR and failed_to_save):
        message = last_steps_unsaved(attempt, snapshot, saves_alone=goal.saves_alone)
    if reason is ExitReason.SUCCEEDED and trained_nothing(attempt, goal, snapshot):
        reason, message = ExitReason.USER_ERROR, UNTRAINED
    elif refused and not worth_another_save(attempt, snapshot, rules.limits):
        reason = ExitReason.USER_ERROR
    elif reason is ExitReason.USER_ERROR and not _is_settled(members, snapshot, rules.limits):
        # A script also fails because a peer's machine went: give the cloud a moment to say so.
        return Wait(why="a script failed; asking the cloud whether a machine went first", briefly=True)
    home = None if reason.retried else _bring_home(attempt, goal, snapshot, rules)
    return home or CloseAttempt(reason=reason, message=message)


def _bring_home(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> Action | None:
    """Nothing is ended before the outputs are safe: its machines are paid meanwhile, while there is hope for long.

    What can be brought nowhere is tried until the machines end by themselves, or the user has waited long for the end.
    """
    first = members_of(attempt, snapshot)[0]
    if snapshot.homecoming is Homecoming.DONE or (snapshot.homecoming is Homecoming.FAILED and is_gone(first)):
        return None  # a host of the user's own whose time is over is asked once: what lies there stays
    hopeless = attempt.unbrought_at is not None and snapshot.now - attempt.unbrought_at >= rules.limits.homing
    if hopeless and snapshot.wanted_end is not None:
        return None
    renewal = None if hopeless or is_gone(first) else renew(goal, snapshot, rules.prepaid_rule, rules.limits)
    if renewal is not None:
        return renewal
    if snapshot.homecoming is Homecoming.NO:
        return BringHome()
    failed = snapshot.homecoming is Homecoming.FAILED
    return Wait(why="the outputs could not be brought home; trying again" if failed else "bringing the outputs home")


def _is_settled(members: tuple[NodeSnapshot | None, ...], snapshot: Snapshot, limits: Limits) -> bool:
    """Whether a failure is the script's own: no machine that went has shown by now, and none is about to.

    Where no cloud lists what has died (own hosts), a member's silence is the only sign of it: time for the witness.
    """
    if snapshot.failed_for is None or snapshot.failed_for < limits.settle:
        return False
    doubtful = any(is_doubtful(node) for node in members)
    return not doubtful or snapshot.failed_for >= limits.settle + 2 * limits.silent


def _reason(
    attempt: Attempt, members: tuple[NodeSnapshot | None, ...], snapshot: Snapshot, prepaid_rule: PrepaidRule
) -> ExitReason:
    outcomes = set(outcomes_of(attempt, snapshot))
    if outcomes == {Outcome.DONE}:
        return ExitReason.SUCCEEDED
    interrupted = _reason_of_interruptions(attempt, snapshot)
    if attempt.ending_reason is not None and (interrupted is None or not attempt.ending_reason.retried):
        return attempt.ending_reason
    if interrupted is not None:
        return interrupted
    if Outcome.FAILED in outcomes:
        # A script also fails because its GPU did, or a peer: killed by its own agent (at the wall, or found alone), or
        # by the shut-off, before it could say so.
        cut = any(n is not None and is_gone(n) and n.node.end_cause is EndCause.SCHEDULE for n in members)
        excused = _unhealthy_members(attempt, snapshot) or bool(outcomes & EXCUSED) or (cut and None in outcomes)
        return ExitReason.LOST if excused else ExitReason.USER_ERROR
    if outcomes == {Outcome.LEFT}:
        return ExitReason.INTERRUPTED if worth_a_start(snapshot, prepaid_rule) else ExitReason.BUDGET
    return ExitReason.LOST


def _reason_of_interruptions(attempt: Attempt, snapshot: Snapshot) -> ExitReason | None:
    kinds = {i.kind for i in snapshot.state.interruptions if i.attempt == attempt.number}
    if not kinds:
        return None
    return ExitReason.INTERRUPTED if kinds == {InterruptionKind.NOTICE} else ExitReason.LOST


DRILL_WAITS = "the drill waits for the script's first step"

_FIRMNESS = {Stop.NO: 0, Stop.SAVE: 1, Stop.ABORT: 2, Stop.KILL: 3}


def _order(
    attempt: Attempt, members: tuple[NodeSnapshot | None, ...], goal: Goal, snapshot: Snapshot, rules: Rules
) -> EndAttempt | None:
    """One member down means that the others cannot go on: they end now, not when their collectives give up."""
    limits = rules.limits
    wanted = (
        _order_for_the_broken(attempt, members, snapshot, limits)
        or _order_for_the_unhealthy(attempt, snapshot, limits)
        or _order_for_the_hung(attempt, snapshot, limits)
        or _order_for_the_interrupted(attempt, goal, snapshot)
        or _order_for_the_unprepared(attempt, snapshot, limits)
        or _order_for_the_user(attempt, goal, snapshot, limits)
        or _order_for_the_budget(attempt, goal, snapshot, limits)
        or for_results(attempt, goal, snapshot, rules)
        or _order_for_the_idle(attempt, goal, snapshot, limits)
        or _order_for_the_rescheduled(attempt, goal, snapshot, limits)
        or _order_for_the_resized(attempt, goal, snapshot, limits)
    )
    if wanted is not None and _FIRMNESS[wanted.how] > _FIRMNESS[attempt.ordered]:
        return wanted
    # Whatever the attempt is ending for: who waits for the job's end has a time limit only once the state says so.
    if attempt.ending_reason is not None and attempt.ending_reason.retried and snapshot.wanted_end is not None:
        return EndAttempt(how=attempt.ordered, reason=snapshot.wanted_end)
    return None


def _order_for_the_broken(
    attempt: Attempt, members: tuple[NodeSnapshot | None, ...], snapshot: Snapshot, limits: Limits
) -> EndAttempt | None:
    interrupted = _reason_of_interruptions(attempt, snapshot)
    outcomes = outcomes_of(attempt, snapshot)
    gone = any(is_gone(n) and how is not Outcome.DONE for n, how in zip(members, outcomes, strict=True))
    if gone or interrupted is ExitReason.LOST or not EXCUSED.isdisjoint(outcomes):
        return EndAttempt(how=Stop.KILL, reason=interrupted or ExitReason.LOST)
    if _is_settled(members, snapshot, limits):
        return EndAttempt(how=Stop.KILL, reason=interrupted or ExitReason.USER_ERROR)
    if snapshot.uneven_for is not None and snapshot.uneven_for >= limits.leave:
        return EndAttempt(how=Stop.KILL, reason=interrupted or ExitReason.LOST)
    return None


def _order_for_the_unhealthy(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """An ill node may still save; what it computes from now on is not trusted."""
    if not _unhealthy_members(attempt, snapshot):
        return None
    waited = snapshot.now - attempt.ending_at if attempt.ending_at else timedelta(0)
    return EndAttempt(how=Stop.KILL if waited >= limits.leave else Stop.SAVE, reason=ExitReason.INTERRUPTED)


def _unhealthy_members(attempt: Attempt, snapshot: Snapshot) -> bool:
    return any(member.node_id in quarantined(snapshot.state) for member in attempt.members)


def _replace_bad(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> Replace | None:
    """End bad nodes that were to come in place of others; not for ever in a pool that has no good ones.

    So with those that a job on a range of nodes cannot grow by: they may stand beside a long attempt.
    """
    members = {member.node_id for member in attempt.members}
    grows = goal.is_range and snapshot.failed_bootstraps < limits.bootstrap_tries
    found = to_replace(snapshot) or (unfit(snapshot, limits) if grows else ())
    bad = tuple(node_id for node_id in found if node_id not in members)
    return Replace(node_ids=bad) if bad and len(in_a_row(snapshot.state)) < limits.quarantines else None


def _order_for_the_hung(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """The ranks tell where they are before they are killed; an agent that does not see to that is told to kill."""
    if attempt.ending_reason is ExitReason.HUNG and attempt.ending_at is not None:
        late = snapshot.now - attempt.ending_at >= limits.stacks
        return EndAttempt(how=Stop.KILL, reason=ExitReason.HUNG) if late else None
    why = hung(attempt, snapshot, limits)
    return EndAttempt(how=Stop.ABORT, reason=ExitReason.HUNG, message=why) if why is not None else None


def _order_for_the_interrupted(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> EndAttempt | None:
    """Ranks that use the library hear of one machine's notice from each other; those of any other script do not."""
    if not goal.saves_alone or _reason_of_interruptions(attempt, snapshot) is not ExitReason.INTERRUPTED:
        return None
    return EndAttempt(how=Stop.SAVE, reason=ExitReason.INTERRUPTED)


def _order_for_the_unprepared(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """What cannot be prepared cannot be told anything either: the others save, as far as its ranks hear of it."""
    bad = _unprepared(attempt, snapshot, limits)
    if not bad:
        return None
    minutes = limits.boot.total_seconds() / 60
    errors = {node.node.id: node.error or "it failed" for node in snapshot.nodes}
    message = "; ".join(f"{one} could not be prepared for {minutes:.0f} min: {errors[one]}" for one in bad)
    return EndAttempt(how=_how(attempt, snapshot, limits), reason=ExitReason.LOST, message=message)


def _unprepared(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    """Return the members that still work and could not be prepared for long, by this supervisor or those before it."""
    intervals = {interval.node_id: interval.unprepared_at for interval in snapshot.state.nodes}
    working = (
        member.node_id
        for member, node in zip(attempt.members, members_of(attempt, snapshot), strict=True)
        if not is_over(attempt, node) and node is not None and node.readiness is not Readiness.READY
    )
    return tuple(i for i in working if (since := intervals.get(i)) is not None and snapshot.now - since >= limits.boot)


def _replace_unprepared(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> Replace | None:
    """End the members that heard of no order for long: their ranks would be waited for until the budget is used up."""
    late = attempt.ending_at is not None and snapshot.now - attempt.ending_at >= limits.overdue
    bad = _unprepared(attempt, snapshot, limits)
    return Replace(node_ids=bad) if bad and late else None


def _replace_undying(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> Replace | None:
    """End the members that answer and whose ranks outlive their end: no signal reaches what hangs in a driver.

    Silent ones have limits of their own, and all may be silent because it is us who are cut off.
    """
    if attempt.killed_at is None or snapshot.now - attempt.killed_at < limits.overdue:
        return None
    undying = tuple(
        node.node.id
        for node in members_of(attempt, snapshot)
        if node is not None and not is_over(attempt, node) and node.silent_for < limits.silent
    )
    return Replace(node_ids=undying) if undying else None


def _order_for_the_user(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    if snapshot.wanted_end is None:
        return None
    return EndAttempt(how=_how_where_it_may_save(attempt, goal, snapshot, limits), reason=snapshot.wanted_end)


def _order_for_the_budget(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Once what is left is the reserve, the work ends, whatever the cloud has armed.

    Machines that drive a job may have no right to move its shut-off closer when its budget is lowered, and whoever
    lowered it may have died before he did. Outside, money is waited for that machines give back which are being
    interrupted.
    """
    spent = (
        snapshot.payable_until is None
        and snapshot.lasts_until is None
        and (goal.self_driving or not some_leave(snapshot))
    )
    if not (spent or attempt.ending_reason is ExitReason.BUDGET):
        return None
    return EndAttempt(how=_how_where_it_may_save(attempt, goal, snapshot, limits), reason=ExitReason.BUDGET)


def _order_for_the_idle(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Once it is decided it stays so, whatever the GPUs do while the ranks save."""
    if attempt.ending_reason is ExitReason.IDLE:
        return EndAttempt(how=_how(attempt, snapshot, limits), reason=ExitReason.IDLE)
    why = wasted(snapshot.use, goal.idle)
    return EndAttempt(how=Stop.SAVE, reason=ExitReason.IDLE, message=why) if why is not None else None


def _order_for_the_rescheduled(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Once it is decided it stays so, whatever the market does while the ranks save."""
    if attempt.ending_reason is ExitReason.RESCHEDULED:
        return EndAttempt(how=_how(attempt, snapshot, limits), reason=ExitReason.RESCHEDULED)
    return order_to_move(attempt, goal, snapshot, limits)


def _order_for_the_resized(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> EndAttempt | None:
    """Once it is decided it stays so, whatever the new machines do while the ranks save."""
    if attempt.ending_reason is ExitReason.RESIZED:
        return EndAttempt(how=_how(attempt, snapshot, limits), reason=ExitReason.RESIZED)
    return order_to_grow(attempt, goal, snapshot, limits)


def _how(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> Stop:
    """Saving first; what does not listen is killed."""
    waited = snapshot.now - attempt.ending_at if attempt.ending_at else timedelta(0)
    return Stop.KILL if waited >= limits.leave else Stop.SAVE


def _how_where_it_may_save(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> Stop:
    """A script that saves nothing is asked for nothing: it would not hear that, and go on until it is killed."""
    return Stop.KILL if is_mute(attempt, goal, snapshot) else _how(attempt, snapshot, limits)


def _is_overdue(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether an end was not obeyed: a machine does not hear us, or cannot end, and the cloud must end it."""
    return attempt.ending_at is not None and snapshot.now - attempt.ending_at >= limits.overdue


def _only_given_up(attempt: Attempt, members: tuple[NodeSnapshot | None, ...], snapshot: Snapshot) -> bool:
    """Whether nothing of the attempt runs but on machines that were given up: they end with the group."""
    given_up = {i.node_id for i in snapshot.state.interruptions if i.kind is InterruptionKind.FROZEN}
    running = [node for node in members if node is not None and not is_over(attempt, node)]
    return all(node.node.id in given_up for node in running)


def _drill(attempt: Attempt, goal: Goal, snapshot: Snapshot, limits: Limits) -> Drill | Wait | None:
    """A job with no machine that its cloud takes now may have one in a later attempt."""
    state, progress, young = snapshot.state, progress_of(attempt, snapshot), snapshot.now - attempt.started_at
    wanted = goal.drill and attempt.ending_reason is None and state.drilled is None and state.drill_refused is None
    node_id = _last_to_take(attempt, goal, snapshot) if wanted else None
    if node_id is None:
        return None
    if progress is None:
        if young < (limits.drill_patience if goal.uses_library else limits.drill_blind):
            why = f"{DRILL_WAITS}, {format_span(limits.drill_patience)} at the most"
            return Wait(why=why) if young >= limits.drill_blind else None
        return Drill(node_id=node_id)
    # What is known of a script that saves by itself are its saves alone: the first is the moment.
    at: float = progress.first_step + (0 if progress.phase == UNTOLD else 20)
    at = limits.drill_at * progress.total_steps if progress.total_steps else at
    return Drill(node_id=node_id) if progress.step >= at else None


def _last_to_take(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> str | None:
    spot = {one.node.id for one in snapshot.nodes if one.node.pool.market is Market.SPOT}
    able = (member.node_id for member in reversed(attempt.members))
    return next((node_id for node_id in able if node_id in spot or not goal.drills_spot), None)
