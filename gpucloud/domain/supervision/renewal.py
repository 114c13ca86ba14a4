"""What goes on beside attempts: prepaid time, machines in place of interrupted ones, bootstrap, telling; results.

And whether another attempt is worth its start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import takewhile

from gpucloud.domain.job.quantities import format_moment, format_span, span_of
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule, may_launch, sooner
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.node.status import LEAVES_AHEAD, LEAVES_SHARE, SAVES, Outcome, Stop
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import NOT_THERE, Attempt, ExitReason, InterruptionKind, JobState, MissingOutput
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    EndAttempt,
    Prepare,
    Relieve,
    Replace,
    Tell,
)
from gpucloud.domain.supervision.capacity import is_deaf, is_mute
from gpucloud.domain.supervision.membership import (
    TAKEN_WITHIN,
    all_silent,
    has_notice,
    interrupted_at,
    is_gone,
    is_out_of_reach,
    members_of,
    outcomes_of,
    progress_of,
    quarantined,
    some_leave,
    time_left,
    warned_until,
)
from gpucloud.domain.supervision.quarantine import is_in_doubt
from gpucloud.domain.supervision.snapshot import (
    Goal,
    Limits,
    NodeSnapshot,
    Readiness,
    Rules,
    Snapshot,
    are_left,
    asked_of,
    is_awaited,
    place_of,
    waits,
    where_they_lie,
)

HOMING = "waiting for the outputs"


def prepare(snapshot: Snapshot) -> Prepare | None:
    """Bootstrap what runs and is not prepared; a machine whose host key is not known yet is not spoken to.

    Whether one that did not answer does so now is only known when it is tried again.
    """
    waiting = tuple(
        n.node.id
        for n in snapshot.nodes
        if n.node.state is NodeState.RUNNING
        and n.node.host_key is not None
        and n.readiness is Readiness.NO
        and not n.node.relieved
        and not has_notice(n)
    )
    return Prepare(node_ids=waiting) if waiting else None


def unfit(snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    """Return the machines that no attempt can have: not to be prepared, out of reach, long without a host key.

    One whose setup failed is kept until another one's has shown whose fault that is.
    """
    return tuple(n.node.id for n in snapshot.nodes if _is_unfit(n, snapshot, limits) and not is_in_doubt(n, snapshot))


def tell(snapshot: Snapshot) -> Tell | None:
    """Write to every agent that has not read what is wanted of it."""
    untold = tuple(
        n.node.id
        for n in snapshot.nodes
        if n.readiness is Readiness.READY and not n.told and not is_gone(n) and n.silent_for == timedelta(0)
    )
    return Tell(node_ids=untold) if untold else None


def make_room(goal: Goal, snapshot: Snapshot, prepaid_rule: PrepaidRule) -> Action | None:
    """Ask for another machine while the one with a notice still saves: if the budget has the money for both.

    The notice is the machine's own word, and code that runs on it can make one up: it stays in its group, behind the
    shut-off, and is ended when nobody has taken it. A job that drives itself does so only within the time that is
    armed: its machines move no shut-off for it.
    """
    alive = [n for n in snapshot.nodes if not is_gone(n)]
    outstaying = tuple(
        n.node.id for n in alive if n.node.relieved and snapshot.now >= warned_until(n, snapshot) + TAKEN_WITHIN
    )
    if outstaying:
        return Replace(node_ids=outstaying)
    relieved = sum(n.node.relieved for n in alive)
    known = {i.node_id for i in snapshot.state.interruptions}  # from when it was written down, its time is counted
    taken_over = snapshot.state.successor is not None  # those that were asked for beside it come in its place
    noticed = [
        n.node.id for n in alive if n.node.id in known and not n.node.relieved and not taken_over and has_notice(n)
    ]
    if noticed and relieved < goal.nodes and not goal.within_rights and _is_time_to_start(snapshot, prepaid_rule):
        lower = _lower(snapshot, snapshot.payable_with_another) if snapshot.payable_with_another is not None else None
        if lower is None or not goal.self_driving:
            return lower or Relieve(node_id=noticed[0])
    # Given up is given up: a frozen node that wakes later would bring its old ranks back.
    given_up = {i.node_id for i in snapshot.state.interruptions if i.kind is InterruptionKind.FROZEN}
    frozen = tuple(n.node.id for n in alive if not n.node.relieved and n.node.id in given_up)
    return Replace(node_ids=frozen) if frozen else None


def _is_time_to_start(snapshot: Snapshot, prepaid_rule: PrepaidRule) -> bool:
    """Whether the budget pays for one more machine, and the cloud would still start one before the shut-off."""
    return may_launch(snapshot.payable_with_another, snapshot.now, prepaid_rule) and may_launch(
        snapshot.group.armed_until, snapshot.now, prepaid_rule
    )


def promise(snapshot: Snapshot) -> datetime | None:
    """Return until when the machines can be paid, None when it is not worth a start.

    While one is being interrupted and its replacement is still to come, the time pays for both: promised for the
    machines of now, it would be raised and lowered in turns for as long as the notice stands. One that is relieved is
    counted beside the level anyway.
    """
    counted = [n for n in snapshot.nodes if not is_gone(n) and not n.node.relieved]
    noticed = any(has_notice(n) for n in counted)
    if noticed and snapshot.payable_with_another is not None:
        return snapshot.payable_with_another
    return snapshot.payable_until


def renew(goal: Goal, snapshot: Snapshot, prepaid_rule: PrepaidRule, limits: Limits) -> Arm | None:
    """Renewed when half of the horizon is gone, and only if it is worth a call; lowered whenever it must be.

    Towards the end of the budget, machines cost less than was kept for them: then smaller gains are worth a call too.
    Machines of which none answers end their work at the time that they were told: a later one would only be paid for.
    A machine that drives its own job may end its time sooner, and never later. A job that ends for good needs what an
    end takes, and no more: whoever asked for it may be gone before it is over.
    """
    payable = (snapshot.payable_until if goal.self_driving else promise(snapshot)) or snapshot.lasts_until
    until = snapshot.group.armed_until
    if payable is None:
        return None
    if until is None:  # somebody removed it, or something holds it back: machines without an end are armed anew
        return Arm(until=payable) if snapshot.group.exists and not goal.self_driving else None
    lower = _lower(snapshot, payable) if not goal.within_rights else None
    if lower is not None or goal.self_driving:
        return lower
    ends = until - snapshot.now < min(2 * limits.save, prepaid_rule.horizon / 4)
    least = prepaid_rule.least_gain if ends else min(timedelta(seconds=60), prepaid_rule.horizon / 4)
    attempt = snapshot.state.attempt
    if attempt is not None and attempt.ends_for_good:
        return _for_the_end(until, payable, snapshot, limits)
    worth = payable - until >= least and not all_silent(snapshot, limits)
    return Arm(until=payable) if worth and until - snapshot.now < prepaid_rule.horizon / 2 else None


def _for_the_end(until: datetime, payable: datetime, snapshot: Snapshot, limits: Limits) -> Arm | None:
    """Let the script save and its outputs come home: while they do, the time is moved on bit by bit."""
    wanted = min(payable, snapshot.now + 2 * limits.overdue)
    if until - snapshot.now >= limits.overdue or wanted <= until or all_silent(snapshot, limits):
        return None
    return Arm(until=wanted)


def is_unheard(snapshot: Snapshot, limits: Limits) -> bool:
    """Whether whoever took the job over has not heard yet how far its attempt has come since anybody last did."""
    attempt, owner = snapshot.state.attempt, snapshot.state.owner
    if attempt is None or owner is None or progress_of(attempt, snapshot) is not None:
        return False
    known_at, lately = attempt.last_step_at or attempt.started_at, snapshot.now - owner.since < limits.alone
    return known_at < owner.since and lately and not is_gone(members_of(attempt, snapshot)[0])


# What an attempt wrote comes home from rank 0's machine, and needs some of the time that is left to it.


_UNHEARD = "what the script wrote needs the time that is left, and it did not leave"
_SAVES_NOTHING = "its script saves nothing, and is ended in time for its outputs to come home"


def for_results(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> EndAttempt | None:
    """End the attempt in time for its outputs to come home, where its script would train until its machines go."""
    if not goal.has_outputs and not attempt.outputs:
        return None
    by_time = _before_its_time_ends if goal.self_driving else _before_the_budget_ends
    return _before_the_interruption(attempt, goal, snapshot) or by_time(attempt, goal, snapshot, rules)


def _before_the_interruption(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> EndAttempt | None:
    noticed = (i for i in snapshot.state.interruptions if i.attempt == attempt.number)
    heard = {i.node_id: i.noticed_at for i in noticed if i.kind is InterruptionKind.NOTICE}
    for node in members_of(attempt, snapshot):
        until = interrupted_at(node, snapshot) if node is not None and node.node.id in heard else None
        if node is not None and until is not None and not is_gone(node):
            span = until - heard[node.node.id]
            return _end_of_the_deaf(attempt, goal, snapshot, until - span / 2, ExitReason.INTERRUPTED)
    return None


def _before_the_budget_ends(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> EndAttempt | None:
    """As long before its paid time ends as a script that saves is asked to, which its own agent sees to."""
    until, rule = snapshot.group.armed_until, rules.prepaid_rule
    ahead = min(_leaves(attempt, snapshot), LEAVES_AHEAD)
    if until is None or until - snapshot.now >= ahead:
        return None
    goes_on = renew(goal, snapshot, rule, rules.limits) is not None or worth_a_start(snapshot, rule)
    if goes_on or some_leave(snapshot):
        return None
    return _end_of_the_deaf(attempt, goal, snapshot, until - ahead / 2, ExitReason.BUDGET)


def _end_of_the_deaf(
    attempt: Attempt, goal: Goal, snapshot: Snapshot, half: datetime, reason: ExitReason
) -> EndAttempt | None:
    """Kill what saves nothing at once, unless it will be done by `half` of the time; then all that was not heard."""
    if not is_deaf(attempt, goal, snapshot):
        return None
    mute, left = is_mute(attempt, goal, snapshot), time_left(snapshot)
    if snapshot.now < half and (not mute or (left is not None and snapshot.now + left <= half)):
        return None
    return EndAttempt(how=Stop.KILL, reason=reason, message=_SAVES_NOTHING if mute else _UNHEARD)


def _before_its_time_ends(attempt: Attempt, goal: Goal, snapshot: Snapshot, rules: Rules) -> EndAttempt | None:
    """Nobody prolongs the time of machines that drive their job: what they wrote needs some of it to reach the store.

    So the attempt ends that much before it would for its last save alone. Who does not hear of that by the time that
    the results need is killed, but no script whose save is under way; one that saves by itself is ended by its wrapper.
    """
    until = snapshot.group.armed_until
    if until is None:
        return None
    rule, mute = rules.prepaid_rule, is_mute(attempt, goal, snapshot)
    leaves = timedelta(0) if mute else _leaves(attempt, snapshot)
    ahead = min(rules.limits.results + leaves, LEAVES_SHARE * rule.horizon, rule.least)
    if until - snapshot.now >= ahead:
        return None
    if mute:
        return _end_of_the_deaf(attempt, goal, snapshot, until - ahead / 2, ExitReason.INTERRUPTED)
    limit = max(ahead - rules.limits.results, min(rules.limits.save, ahead / 2))
    progress, asked_at = progress_of(attempt, snapshot), attempt.ending_at
    saves = goal.saves_alone or (progress is not None and progress.phase == SAVES)
    if saves or asked_at is None or snapshot.now - asked_at < limit:
        return EndAttempt(how=Stop.SAVE, reason=ExitReason.INTERRUPTED)
    return EndAttempt(how=Stop.KILL, reason=ExitReason.INTERRUPTED, message=f"{_UNHEARD} in {format_span(limit)}")


def _leaves(attempt: Attempt, snapshot: Snapshot) -> timedelta:
    """Return how long before its paid time ends the attempt leaves, as its agents tell."""
    told = (node.status.leaves_s for node in members_of(attempt, snapshot) if node is not None and node.status)
    return span_of(max((seconds for seconds in told if seconds is not None), default=0.0))


def homing_words(snapshot: Snapshot, limits: Limits) -> str:
    """Return until when the end waits for outputs."""
    until = snapshot.group.armed_until
    return f"{HOMING} while they come, {_homing_limit(until, snapshot.state.pool, limits, snapshot.now)}"


def ended_words(state: JobState, limits: Limits, now: datetime, *, has_outputs: bool) -> str:
    """Return what a job that has ended and still has machines waits for: outputs of an attempt that none follows."""
    ends, last = f"{state.job} has ended: its machines are being ended", state.attempts[-1] if state.attempts else None
    if not has_outputs or last is None or not is_awaited(last, state.pool):
        return ends
    is_there = any(one.node_id == last.members[0].node_id for one in state.alive)
    if not is_there and state.pool.market is not Market.OWNED:
        return ends
    return f"{ends}, its outputs brought first: {_homing_limit(state.paid_until, state.pool, limits, now)}"


def _homing_limit(until: datetime | None, pool: Pool, limits: Limits, now: datetime) -> str:
    """Return how long outputs are waited for: nobody renews machines' time any more, and an own host stays."""
    at_most = f"no longer than {format_span(limits.homing)} without any of them"
    if until is None or pool.market is Market.OWNED:
        return at_most
    return f"{at_most}, and no later than {format_moment(until, now)}, when the machines shut themselves off"


def can_renew(snapshot: Snapshot) -> bool:
    """Whether the budget can promise a later time than the one that is promised."""
    until = snapshot.group.armed_until
    return snapshot.payable_until is not None and (until is None or snapshot.payable_until > until)


def worth_a_start(snapshot: Snapshot, prepaid_rule: PrepaidRule) -> bool:
    """Whether an attempt that left at the end of its paid time is followed by another.

    Not when all that is left is what its machines cost less than was kept for them: a start would use that up. The
    paid time may also have been prolonged just after the ranks were asked to leave.
    """
    least = max(prepaid_rule.least, prepaid_rule.horizon / 15)
    armed = snapshot.group.armed_until
    prolonged = armed is not None and armed - snapshot.now >= least
    payable = snapshot.payable_until is not None and snapshot.payable_until - snapshot.now >= least
    return payable and (can_renew(snapshot) or prolonged)


def is_refused(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Whether its script has come to its end, and the store did not take its last state, which another time may do."""
    progress = progress_of(attempt, snapshot)
    unsaved = progress.unsaved if progress is not None else attempt.unsaved
    return unsaved is not None and Outcome.BARRED in outcomes_of(attempt, snapshot)


def worth_another_save(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether another attempt follows one whose last state the store did not take.

    It pays once more for all that was trained since the newest checkpoint. Once that is worth it: an outage passes.
    What has refused a second one, and has taken no checkpoint between, somebody has to mend. A script that begins anew
    each time makes checkpoints each time: so it goes on no oftener than attempts that make nothing.
    """
    saved = snapshot.saved
    newest = saved.step if saved is not None else 0
    before = snapshot.state.attempts[snapshot.state.reopened_after :]
    refused = [one for one in before if one.number != attempt.number and one.unsaved is not None]
    again = any((one.saved_step or 0) >= newest for one in refused)
    return not again and len(refused) + 1 < limits.fruitless_attempts


UNTRAINED = "the script ended without having trained a step"


def trained_nothing(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> bool:
    """Whether a script that counts its steps has ended without one, in this attempt and in all before it.

    What it said last counts, of which the state may know nothing yet. One that goes on from a checkpoint of an earlier
    attempt has trained, whatever was seen of that.
    """
    progress = progress_of(attempt, snapshot)
    if progress is None or goal.saves_alone or any(one.last_step is not None for one in snapshot.state.attempts):
        return False
    is_first = progress.first_step <= 1 or len(snapshot.state.attempts) == 1
    return is_first and progress.step < progress.first_step


def _is_unfit(node: NodeSnapshot, snapshot: Snapshot, limits: Limits) -> bool:
    silent = node.readiness is Readiness.READY and is_out_of_reach(node, snapshot, limits)
    keyless = node.node.host_key is None and snapshot.now - node.node.launched_at >= limits.boot
    broken = node.readiness is Readiness.FAILED or silent or keyless
    return not is_gone(node) and not node.node.relieved and broken


def _lower(snapshot: Snapshot, payable: datetime) -> Arm | None:
    """The shut-off comes closer when more machines are alive than it was reckoned for."""
    until = sooner(snapshot.group.armed_until, payable)
    return Arm(until=until) if until is not None else None


# Which results an attempt has, and where they lie that did not come home.


FindNode = Callable[[str], Node | None]


def to_bring(attempts: Sequence[Attempt], outputs: tuple[str, ...], known: FindNode) -> tuple[str, ...]:
    """Return what is brought home of the last attempt where it is there, and of those before that lie beside it."""
    return tuple(dict.fromkeys((*(path for one in _beside(attempts, known) for path in one.outputs), *outputs)))


def still_to_bring(attempts: Sequence[Attempt]) -> tuple[Sequence[Attempt], ...]:
    """Return, for each attempt whose outputs are to come, it and all before: the last one, and those told lost."""
    comes = [are_left(a) or (a is attempts[-1] and (a.reason is None or a.reason.retried)) for a in attempts]
    return tuple(attempts[: n + 1] for n, one in enumerate(attempts) if comes[n] and not one.outputs_came)


def without_unasked(missing: Sequence[MissingOutput], asked: tuple[str, ...]) -> tuple[MissingOutput, ...]:
    """Return what is missing of an attempt: that something is not there that its script was not to make is no news."""
    return tuple(one for one in missing if one.why != NOT_THERE or one.path in asked)


def lost_outputs(attempts: Sequence[Attempt], outputs: tuple[str, ...], known: FindNode) -> tuple[MissingOutput, ...]:
    """Return the outputs of the last attempt as lost with the machine of its rank 0, or where its host has them.

    With them go those of the attempts before that ran their rank 0 there: what they had written lay beside its own.
    """
    last, node = attempts[-1], known(attempts[-1].members[0].node_id)
    where = where_they_lie(node, last.tree) if node is not None else None
    beside = _beside(attempts, known)
    asked = dict.fromkeys(path for one in beside for path in asked_of((one,), outputs))
    numbers = sorted(one.number for one in beside)
    whose = f"attempt {numbers[0]}" if len(numbers) == 1 else f"attempts {numbers[0]} to {numbers[-1]}"
    lies = f"lies on {where}" if where else f"goes with {last.members[0].node_id}, the machine of rank 0"
    why = f"of {whose} did not come home: whatever was written there {lies}"
    return tuple(MissingOutput(path=path, why=why, attempt=last.number) for path in asked)


def is_beside(attempt: Attempt, node_id: str, tree: str, known: FindNode) -> bool:
    """Whether what runs there on that tree of the code writes beside what the attempt wrote."""
    return _place(attempt, known) == (place_of(node_id, known), tree)


def _beside(attempts: Sequence[Attempt], known: FindNode) -> tuple[Attempt, ...]:
    """Return the last attempt's row of those whose outputs lie in one place, the first of them first."""
    last = attempts[-1]
    same = takewhile(lambda one: _place(one, known) == _place(last, known) and waits(one), attempts[-2::-1])
    return (*reversed(tuple(same)), last)


def _place(attempt: Attempt, known: FindNode) -> tuple[str, str]:
    """Return the machine and the tree of the code that its outputs lie in."""
    return place_of(attempt.members[0].node_id, known), attempt.tree


def rank_0_leaves(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Whether the machine of rank 0 is gone, or will be before anything comes from there."""
    left = {i.node_id for i in snapshot.state.interruptions} | quarantined(snapshot.state)
    return attempt.members[0].node_id in left or snapshot.group.there(attempt.members[0].node_id) is None


def rank_0_answering(attempt: Attempt, snapshot: Snapshot) -> Node | None:
    """Return the machine of rank 0 if it is heard, which an agent may still be, with a notice, for a minute or two."""
    first = members_of(attempt, snapshot)[0]
    frozen = {i.node_id for i in snapshot.state.interruptions if i.kind is not InterruptionKind.NOTICE}
    heard = first is not None and not is_gone(first) and not first.silent_for and first.node.id not in frozen
    return first.node if first is not None and heard else None
