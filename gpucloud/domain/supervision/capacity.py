"""Which pool the machines come from, how long a refused one is left alone, and when interruptions come too thick.

An attempt has its machines in one pool, because its ranks must be near each other. A pool that refuses cools down: what
it gave is given back, and the cheapest pool that is not cooling is asked next. A machine that the cloud takes is first
asked for again in its own pool, where its peers are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import counted, format_moment, format_span, span_of
from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.policies import Mode, ZoneState
from gpucloud.domain.node.node import Fault, GroupView, Refusal
from gpucloud.domain.node.status import OUTPUT
from gpucloud.domain.offer import Offer, Pool
from gpucloud.domain.state.state import Attempt, CapacityDecision, Cooldown, ExitReason, JobState
from gpucloud.domain.supervision.action import Action, CoolDown, Finish, Move, Resize, Wait
from gpucloud.domain.supervision.membership import AGAIN, progress_of
from gpucloud.domain.supervision.quarantine import QUARANTINED
from gpucloud.domain.supervision.snapshot import CapacityChoice, Goal, Limits, NodeSnapshot, Snapshot

_ELSEWHERE = (Fault.CAPACITY, Fault.QUOTA)  # another pool may help
_LATER = (Fault.THROTTLING, Fault.TRANSIENT)  # the same call may help

NO_CAPACITY = "no capacity"


def other_pool(goal: Goal, snapshot: Snapshot, limits: Limits) -> Action | None:
    """Return what to do about a pool that does not give what is asked of it; None while it may."""
    if not is_cooling(snapshot.state, snapshot.state.pool, snapshot.now):
        return _judge(goal, snapshot, limits)
    offer = next((o for o in snapshot.candidates if not is_cooling(snapshot.state, o.pool, snapshot.now)), None)
    return _give_back(snapshot) or (Move(offer=offer) if offer is not None else _nothing_left(snapshot, limits))


def pool_to_stay_in(snapshot: Snapshot, *, by_policy: bool) -> Pool | None:
    """Return the pool that a job of which nothing trains asks again; None where it turns to whichever is best.

    As long as it has a group its pool is left only when it refuses; where a policy chooses (`deadline.situation`), also
    while no machine is there.
    """
    state = snapshot.state
    leaves = is_cooling(state, state.pool, snapshot.now) or (by_policy and not snapshot.group.most_alive)
    return None if state.group is None or leaves else state.pool


def pool_of_the_decision(goal: Goal, snapshot: Snapshot, to: CapacityChoice, limits: Limits) -> Action | None:
    """Return what to do so that machines come from where a job with a deadline is to have them; None when they may.

    While it waits it has none. No patience ends: the deadline does.
    """
    pool = to.offer.pool if to.offer is not None else snapshot.state.pool
    if to.mode is not Mode.IDLE and pool == snapshot.state.pool:
        return _judge(goal, snapshot, limits)
    back = _give_back(snapshot)
    if back is not None:
        return back
    if to.offer is not None:
        return Move(offer=to.offer)
    nowhere = all(is_cooling(snapshot.state, offer.pool, snapshot.now) for offer in snapshot.candidates)
    return (_never(snapshot) if nowhere else None) or Wait(why=f"waiting: {reasons(to, snapshot.now)}")


def reasons(to: CapacityChoice, now: datetime) -> str:
    """Return what it was decided on to run on that, and when, where that was earlier: its sums are of then."""
    return dated(to.capacity_decision.why, to.capacity_decision, now)


def dated(said: str, made: CapacityDecision, now: datetime | None) -> str:
    """Return what is said of a decision with the moment that its sums are of, where that is not now."""
    return said if made.decided_at == now else f"{said} (as of {format_moment(made.decided_at, now)})"


def _give_back(snapshot: Snapshot) -> Action | None:
    if snapshot.group.exists and snapshot.group.size > 0:
        return Resize(size=0)
    return Wait(why="giving machines back") if snapshot.group.counted else None


def too_late_to_start(goal: Goal, snapshot: Snapshot, limits: Limits) -> Finish | None:
    """Return the end of a job without machines that has less time left until its deadline than its shortest start."""
    state = snapshot.state
    if not no_start_fits(state, goal.deadline_at, snapshot.group, snapshot.now, limits):
        return None
    left = format_span(max(goal.deadline_at - snapshot.now, timedelta(0))) if goal.deadline_at is not None else ""
    start = format_span(shortest_start(state, limits))
    message = f"{left} left until the deadline, and a start takes {start} at the least: no machine is rented for it"
    return Finish(reason=ExitReason.DEADLINE, message=message)


def no_start_fits(
    state: JobState, deadline_at: datetime | None, group: GroupView, now: datetime, limits: Limits
) -> bool:
    """Whether what is rented now for a job without machines would surely be given back before its first new step.

    Machines that were asked for in time may still come.
    """
    if deadline_at is None or group.alive or state.pool.market is Market.OWNED:
        return False
    asked_at = state.bare_at if group.size > 0 else None
    return deadline_at - (asked_at or now) < shortest_start(state, limits)


def shortest_start(state: JobState, limits: Limits) -> timedelta:
    """Return the least that passes from a launch to a first step: the shortest that was seen, else half of the guess.

    A job is ended by this, so that nothing counts which a machine could say to make it longer than the guess; nor what
    began on machines that had stood there.
    """
    launched = {interval.node_id: interval.launched_at for interval in state.nodes}
    seen, before = [], None
    for attempt in state.attempts:
        since = max((launched[m.node_id] for m in attempt.members if m.node_id in launched), default=None)
        if since and attempt.stepped_at is not None and (before is None or since > before.started_at):
            seen.append(attempt.stepped_at - since)
        before = attempt
    return min((span for span in seen if timedelta(0) < span <= limits.changeover), default=limits.changeover / 2)


def has_enough(goal: Goal, snapshot: Snapshot) -> bool:
    """Whether a job that trains on a range of nodes has enough of them, though the pool may give no more."""
    there = sum(node.pool == snapshot.state.pool for node in snapshot.group.counted)
    return goal.is_range and there >= goal.fewest(snapshot.state.pool.market)


def refused(snapshot: Snapshot, pool: Pool, since: datetime | None) -> Refusal | None:
    """Return the pool's last refusal since the job turned to it."""
    found = [r for r in snapshot.group.refusals if r.pool == pool and (since is None or r.at >= since)]
    return max(found, key=lambda refusal: refusal.at, default=None)


def cool_down(goal: Goal, refusal: Refusal, limits: Limits) -> CoolDown:
    """Return the cooldown for a pool that refused.

    Where a deadline is to be kept, asking again costs nothing and waiting does: it does not become longer and longer.
    """
    length, longest = limits.cooldown, limits.cooldown_longest
    if goal.policy is not None:
        length = longest = limits.insist if refusal.pool.market is Market.ON_DEMAND else limits.cooldown
    return CoolDown(
        pool=refusal.pool,
        fault=refusal.fault,
        code=refusal.code,
        message=refusal.message,
        length=length,
        longest=longest,
    )


def partial(snapshot: Snapshot, pool: Pool, there: int, needed: int, limits: Limits) -> Refusal | None:
    """Return the refusal that it is when a pool has given some machines for long, and not those that are needed."""
    if snapshot.short_for is None or snapshot.short_for < limits.gang:
        return None
    message = f"{there} of {needed} machines after {limits.gang.total_seconds():.0f} s"
    return Refusal(pool=pool, fault=Fault.CAPACITY, code="Partial", message=message, at=snapshot.now)


def withheld(snapshot: Snapshot, limits: Limits) -> Refusal | None:
    """Return the refusal that it is when a pool has given no machine for long, and refuses none, or only for now."""
    since, pool = snapshot.state.bare_at, snapshot.state.pool
    if since is None or snapshot.now - since < limits.bare:
        return None
    last = refused(snapshot, pool, snapshot.state.pool_at)
    said = f"; its last word: {last.message} ({last.code})" if last is not None else ""
    message = f"no machine after {limits.bare.total_seconds() / 60:.0f} min{said}"
    return Refusal(pool=pool, fault=Fault.CAPACITY, code="Withheld", message=message, at=snapshot.now)


def is_cooling(state: JobState, pool: Pool, now: datetime) -> bool:
    """Whether the pool refused lately."""
    return any(cooldown.pool == pool and cooldown.until > now for cooldown in state.cooldowns)


def refused_lately(snapshot: Snapshot, limits: Limits) -> bool:
    """Whether the pool refused so lately that asking again would only be one more call."""
    refusal = refused(snapshot, snapshot.state.pool, snapshot.state.pool_at)
    return refusal is not None and snapshot.now - refusal.at < limits.ask_again


def cooled(state: JobState, action: CoolDown, now: datetime) -> tuple[Cooldown, ...]:
    """Return the state's cooldowns with one more; a pool that is cooled down again is left alone for longer.

    What is long ago says nothing of a pool of now: a try counts for as long as the longest cooldown after its end.
    """
    before = next((c for c in state.cooldowns if c.pool == action.pool and now - c.until < action.longest), None)
    tries = before.tries + 1 if before is not None else 1
    length = min(action.length * 2 ** min(tries - 1, 8), action.longest)
    new = Cooldown(
        pool=action.pool,
        first_at=before.first_at if before is not None else now,
        until=now + length,
        tries=tries,
        fault=action.fault,
        code=action.code,
        message=action.message,
    )
    return (*(c for c in state.cooldowns if c.pool != action.pool), new)


def _judge(goal: Goal, snapshot: Snapshot, limits: Limits) -> Action | None:
    if has_enough(goal, snapshot):
        return None
    refusal = refused(snapshot, snapshot.state.pool, snapshot.state.pool_at)
    if refusal is not None and refusal.fault not in (*_ELSEWHERE, *_LATER):
        step = f"; {refusal.hint}" if refusal.hint else ""
        message = f"{refusal.pool}: {refusal.message} ({refusal.code}){step}"
        return Finish(reason=ExitReason.REFUSED, message=message)
    waited = snapshot.short_for is not None and snapshot.short_for >= limits.gang
    if refusal is not None and refusal.fault in _ELSEWHERE and (waited or not snapshot.group.counted):
        return cool_down(goal, refusal, limits)
    there, needed = len(snapshot.group.counted), goal.fewest(snapshot.state.pool.market)
    short = (
        partial(snapshot, snapshot.state.pool, there, needed, limits)
        if 0 < there < needed
        else withheld(snapshot, limits)
    )
    return cool_down(goal, short, limits) if short is not None else None


def _nothing_left(snapshot: Snapshot, limits: Limits) -> Action:
    """Waiting costs nothing. A quota does not grow by waiting; capacity may."""
    cooling = [c for c in snapshot.state.cooldowns if c.until > snapshot.now]
    last = max(cooling, key=lambda c: c.until)
    ended = [one.ended_at for one in snapshot.state.nodes if one.ended_at is not None and one.let_go_until is None]
    since = max([min(c.first_at for c in cooling), *ended])
    waited = snapshot.now - since
    never = _never(snapshot)
    if never is not None:
        return never
    if waited >= limits.patience:
        hours = waited.total_seconds() / 3600
        message = f"no pool had machines for {hours:.1f} h; the last said: {last.message} ({last.code})"
        return Finish(reason=ExitReason.NO_CAPACITY, message=message)
    until = min(c.until for c in cooling)
    again, last_at = (format_moment(at, snapshot.now) for at in (until, since + limits.patience))
    return Wait(why=f"{NO_CAPACITY}: asking again at {again}, and until {last_at} at the most")


def _never(snapshot: Snapshot) -> Finish | None:
    """The end, where every pool that was asked refuses for a reason that time does not change."""
    cooling = [c for c in snapshot.state.cooldowns if c.until > snapshot.now]
    bad = next((c for c in cooling if c.code == QUARANTINED), None)
    if bad is not None:
        return Finish(reason=ExitReason.UNPREPARED, message=bad.message)
    if cooling and all(c.fault is Fault.QUOTA for c in cooling):
        last = max(cooling, key=lambda c: c.until)
        return Finish(reason=ExitReason.NO_CAPACITY, message=f"{last.message} ({last.code}): gpucloud quota request")
    return None


def zones_of(
    goal: Goal, snapshot: Snapshot, there: Sequence[NodeSnapshot], first_at: datetime
) -> tuple[ZoneState, ...]:
    """Return the spot pools as they are known: one that refused is down while it cools, and worth a try again then.

    So is the job's own for as long as it gives no more than a part of the nodes.
    """
    state = snapshot.state
    spot = [offer for offer in snapshot.candidates if offer.pool.market is Market.SPOT]
    if state.attempt is not None and state.pool.market is not Market.SPOT:
        spot = [offer for offer in spot if can_overlap(offer, state)]
    own = sum(node.node.pool == state.pool for node in there)
    part = own if goal.fewest(state.pool.market) <= own < goal.nodes else 0
    return tuple(_zone(offer, state, snapshot.now, part if offer.pool == state.pool else 0, first_at) for offer in spot)


def _zone(offer: Offer, state: JobState, now: datetime, part: int, first_at: datetime) -> ZoneState:
    cooldown = next((c for c in state.cooldowns if c.pool == offer.pool), None)
    up = (cooldown is None or cooldown.until <= now) and not part
    launches = [interval.launched_at for interval in state.nodes if interval.pool == offer.pool]
    if cooldown is None:
        since = min(launches, default=first_at)
    else:
        since = cooldown.until if up else max([cooldown.first_at, *launches])
    age_s = (now - since).total_seconds()
    return ZoneState(zone=str(offer.pool), up=up, age_s=age_s, usd_per_hour=float(offer.usd_per_hour), nodes=part)


# When interruptions come so thick that going on is not worth it: pauses between attempts, and when to give up.


PAUSING = "pausing until"
"""How the words of a pause begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSteps:
    """What the newest attempts paid in machine time for the steps that they newly saved.

    `times` is that over what as many steps take undisturbed, at the job's own median; infinite for no step. `made`:
    nobody sees what the script saves, and `saved` are the steps that it newly made.
    """

    attempts: int
    paid: timedelta
    saved: int
    times: float
    made: bool = False

    def __str__(self) -> str:
        cost = f", {self.times:.1f} times what they cost undisturbed" if self.saved else ""
        new, none = ("new step", "no new step") if self.made else ("newly saved step", "no saved step")
        steps = counted(self.saved, new) if self.saved else none
        return f"the last {self.attempts} attempts took {format_span(self.paid)} of machine time for {steps}{cost}"


def pause_until(state: JobState, limits: Limits) -> datetime | None:
    """Return until when no attempt starts and no machine is asked for; None when the next may start at once.

    One attempt that ends soon and saved nothing is bad luck; after two in a row there is a pause, longer each time.
    """
    attempts = state.attempts[state.reopened_after :]
    count = barren_in_a_row(state, limits)
    ended = attempts[-1].ended_at if attempts else None
    if count < 2 or ended is None:
        return None
    return ended + min(limits.pause * (1 << min(count - 2, 20)), limits.pause_longest)


def standing(state: JobState, now: datetime, limits: Limits) -> tuple[str, ...]:
    """Return how a job that goes on stands with its interruptions: the pause that it makes, what saved steps cost."""
    until = None if state.status.ended or state.attempt is not None else pause_until(state, limits)
    paused = (pause_line(state, until, now, limits),) if until is not None and now < until else ()
    cost = None if state.status.ended else saved_steps(state, now, limits)
    return (*paused, *((str(cost),) if cost is not None else ()))


def pause_line(state: JobState, until: datetime, now: datetime, limits: Limits) -> str:
    """Return the words of a pause."""
    count = barren_in_a_row(state, limits)
    return f"{PAUSING} {format_moment(until, now)}: {count} attempts in a row ended soon, without a new checkpoint"


def barren_in_a_row(state: JobState, limits: Limits) -> int:
    """Return how many of the newest attempts ended soon after they began without a newly saved step."""
    count, best = 0, 0
    for number, attempt in enumerate(state.attempts):
        best = 0 if attempt.begun_anew else best
        gained = (attempt.saved_step or 0) > best
        soon = attempt.ended_at is not None and attempt.ended_at - attempt.started_at < limits.soon
        forgiven = number < state.reopened_after
        count = count + 1 if soon and not gained and not forgiven else 0
        best = max(best, attempt.saved_step or 0)
    return count


def can_overlap(offer: Offer, state: JobState) -> bool:
    """Whether machines of the offer may be asked for while others work: in the same group, made for the same way.

    With EFA they are in one placement group, which is in the zone of those that work.
    """
    same = offer.pool.region == state.pool.region and offer.gpu == state.gpu and offer.efa in state.efa
    near = not offer.efa.interfaces or offer.pool.zone == state.pool.zone
    return same and near and state.group is not None


def saved_steps(state: JobState, now: datetime, limits: Limits) -> SavedSteps | None:
    """Return what newly saved steps cost lately; None before there are enough attempts and machine time to judge by."""
    first = max(state.reopened_after, len(state.attempts) - limits.backoff_attempts)
    window, before = state.attempts[first:], state.attempts[:first]
    seconds = [a.step_seconds * len(a.members) for a in state.attempts if a.step_seconds is not None]
    if len(window) < limits.backoff_attempts or not seconds:
        return None
    since = max((a.ended_at for a in before if a.ended_at is not None), default=None)
    paid = _machine_time(state, since, now)
    if paid < limits.backoff_paid:
        return None
    made = _saves_unseen(state.attempts)
    best = _made if made else _saved
    saved = max(0, best(window) - best(before))
    undisturbed_s = saved * statistics.median(seconds)
    times = paid.total_seconds() / undisturbed_s if undisturbed_s > 0 else math.inf
    return SavedSteps(attempts=len(window), paid=paid, saved=saved, times=times, made=made)


def _saves_unseen(attempts: tuple[Attempt, ...]) -> bool:
    """Whether the script prints its steps alone and no checkpoint of it is known: it may save by itself elsewhere."""
    return any(one.printed_step is not None for one in attempts) and all(one.saved_step is None for one in attempts)


def _made(attempts: tuple[Attempt, ...]) -> int:
    return max((attempt.last_step or 0 for attempt in attempts), default=0)


def is_deaf(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> bool:
    """Whether nothing shows that a script would hear that it should save: neither the library nor a wrapper has it."""
    progress = progress_of(attempt, snapshot)
    silent = attempt.first_step is None and progress is None
    return not goal.saves_alone and (silent or (progress is not None and progress.phase == OUTPUT))


def is_mute(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> bool:
    """Whether a script saves nothing and would not hear that it should: its own word counts more than its code."""
    return goal.saves_nothing and is_deaf(attempt, goal, snapshot)


def unsaved(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> timedelta:
    """Return what a script that saves only when it likes, or never, has trained since: a change has it trained again.

    Of one that saves by itself, steps are its saves.
    """
    if is_mute(attempt, goal, snapshot):
        return snapshot.now - attempt.started_at
    return snapshot.now - (attempt.last_step_at or attempt.started_at) if goal.saves_unasked else timedelta(0)


def is_overdue(attempt: Attempt, goal: Goal, snapshot: Snapshot) -> bool:
    """Whether a script that saves only when it likes has gone on without a save for longer than it ever did before one.

    It may do so for good: its folder is another, its disk full. Then it is dealt with as one that saves nothing; so is
    one of which no save was seen yet.
    """
    longest_s = max((one.apart_s or 0.0 for one in snapshot.state.attempts), default=0.0)
    return goal.saves_unasked and unsaved(attempt, goal, snapshot) > span_of(AGAIN * longest_s)


def with_distance(attempt: Attempt, state: JobState, now: datetime) -> Attempt:
    """Return the attempt, which has just saved, with how long that took since its last save, if nothing took longer.

    What it saved while nobody supervised was not seen.
    """
    before = attempt.last_step_at or attempt.started_at
    seen_from = max(before, state.owner.since) if state.owner is not None else before
    return replace(attempt, apart_s=max(attempt.apart_s or 0.0, (now - seen_from).total_seconds()))


def _saved(attempts: tuple[Attempt, ...]) -> int:
    return max((attempt.saved_step or 0 for attempt in attempts), default=0)


def _machine_time(state: JobState, since: datetime | None, now: datetime) -> timedelta:
    """Return for how long machines were paid since then; all of the job's for None."""
    intervals = (
        (max(interval.launched_at, since or interval.launched_at), interval.ended_at or now) for interval in state.nodes
    )
    spans = (min(end, now) - start for start, end in intervals)
    return sum((span for span in spans if span > timedelta(0)), timedelta(0))
