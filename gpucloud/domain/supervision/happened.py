"""What has happened to a job between two of its states, as events: pure, and the only place where events are made.

Every state that is written is compared with the one before it, so that an event is of something that the store says,
and is made by whoever wrote that. What happens to many machines at once is one event; of steps the newest mark counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import groupby
from typing import Any

from gpucloud.domain.checkpoint.manifest import Counts, Why
from gpucloud.domain.job.quantities import counted, format_span, format_usd
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.state.event import Event, EventKind
from gpucloud.domain.state.state import Attempt, ExitReason, Interruption, InterruptionKind, JobState, UsageInterval
from gpucloud.domain.supervision.membership import since_anew, unit_of

MARKS = (50, 80, 100)  # percent of a budget that are told
_TENTH, _WHOLE = 10, 100
_LACKS = timedelta(minutes=1)  # for so long a group may have fewer machines than it is to have: they boot
_NAMED = 4
_TAKEN = {
    InterruptionKind.NOTICE: ("has a notice of its interruption", "have a notice of their interruption"),
    InterruptionKind.LOST: ("is gone without notice", "are gone without notice"),
    InterruptionKind.FROZEN: ("does not answer, and is given up", "do not answer, and are given up"),
}
_ENDED = {
    None: "",
    EndCause.INTERRUPTED: ", taken by the cloud",
    EndCause.SCHEDULE: ", for the paid time was over",
    EndCause.CHOICE: " by gpucloud",
    EndCause.CRASH: ", for the embedded fleet itself died",
}
_SAVED_FOR = {
    Why.DUE: ", as was due",
    Why.NOTICE: ", for a machine is to be interrupted",
    Why.BUDGET: ", for the paid time comes to its end",
    Why.ASKED: ", as the script asked",
    Why.STOP: ", for somebody ends the run",
    Why.LAST: ", for the script came to its end",
    Why.TRIAL: ", for a trial of resuming",
}


def submitted(state: JobState, now: datetime) -> JobState:
    """Return a job's first state with what that tells."""
    return replace(state, began_at=now, pending_events=(_submitted(state, now), _planned(state, now)))


def happened(before: JobState, after: JobState, now: datetime) -> tuple[Event, ...]:
    """Return what has happened between the two states; `now` dates what the later one does not date."""
    return (
        *_begun(before, after, now),
        *_waits(before, after, now),
        *_machines(before, after),
        *_unhealthy(before, after, now),
        *_interrupted(before, after),
        *_attempts(before, after, now),
        *_milestone(before, after, now),
        *_checkpoint(before, after, now),
        *_resumed(before, after, now),
        *_money_and_time(before, after, now),
        *_ended(before, after, now),
    )


def with_budget_reached(state: JobState, spent_usd: Decimal, budget_usd: Decimal) -> JobState:
    """Return the state that says which mark of its budget is passed, and of which budget."""
    share = _WHOLE * spent_usd / budget_usd if budget_usd > 0 else Decimal(0)
    mark = max((mark for mark in MARKS if share >= mark), default=0)
    if (mark, budget_usd) == (state.budget_mark, state.budget_mark_of):
        return state
    return replace(state, budget_mark=mark, budget_mark_of=budget_usd)


# The run: that it was ordered, on what, and how it ended.


def _begun(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    again = before.status.ended and not after.status.ended
    if again:
        yield _submitted(after, now, again=True)
    if again or before.pool != after.pool:
        yield _planned(after, now)


def _submitted(state: JobState, now: datetime, *, again: bool = False) -> Event:
    message = f"{state.job} goes on" if again else f"{state.job} is ordered"
    return _event(EventKind.SUBMITTED, state, now, _stamp(now), message)


def _planned(state: JobState, now: datetime) -> Event:
    usd = state.cap_usd_per_hour
    message = f"{state.pool}, at most {format_usd(usd)} an hour each"
    return _event(EventKind.PLANNED, state, now, f"{_stamp(now)}-{state.pool}", message, usd=usd)


def _ended(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    if before.status.ended or not after.status.ended:
        return
    at, reason = after.ended_at or now, after.exit_reason
    why = reason.value if reason is not None else after.status.value
    message = f"{after.status.value}{f' ({why})' if why != after.status.value else ''}"
    said = f"{message}: {after.message}" if after.message else message
    yield _event(EventKind.ENDED, after, at, _stamp(at), said, reason=why, code=after.exit_code)


# Machines: that there are none, that some came, ended, or are not fit.


def _waits(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    known = {(one.pool, one.first_at) for one in before.cooldowns}
    for one in after.cooldowns:
        if (one.pool, one.first_at) not in known:
            message = f"{one.pool} refused: {one.message} ({one.code})"
            which = f"{_stamp(one.first_at)}-{one.pool}"
            yield _event(EventKind.WAITING, after, one.first_at, which, message, reason=one.code)
    for since, was, lacks in (
        (after.bare_at, before.bare_at, "no machine"),
        (after.short_at, before.short_at, "fewer machines than are needed"),
    ):
        if since is not None and _lasts(after, since) and not (was == since and _lasts(before, since)):
            message = f"{after.pool} gives {lacks} for {format_span(_LACKS)}"
            yield _event(EventKind.WAITING, after, now, f"{_stamp(since)}-{lacks}", message, reason="none_came")
    made, old = after.capacity_decision, before.capacity_decision
    if made is not None and made.mode == Mode.IDLE.value and (old is None or old.mode != made.mode):
        yield _event(EventKind.WAITING, after, made.since, _stamp(made.since), made.why, reason="decided")


def _lasts(state: JobState, since: datetime) -> bool:
    return state.looked_at is not None and state.looked_at - since >= _LACKS


def _machines(before: JobState, after: JobState) -> Iterator[Event]:
    known = {one.node_id: one for one in before.nodes}
    if new := [one for one in after.nodes if one.node_id not in known]:
        message = f"{_named(new)} came: {', '.join(dict.fromkeys(str(one.pool) for one in new))}"
        yield _of_machines(EventKind.MACHINES, after, max(one.launched_at for one in new), new, message)
    ended = [one for one in after.nodes if one.ended_at is not None and not _has_ended(known.get(one.node_id))]
    for cause, group in groupby(sorted(ended, key=_cause), key=_cause):
        some = list(group)
        at = max(one.ended_at for one in some if one.ended_at is not None)
        message = f"{_named(some)} ended{_ENDED[some[0].end_cause]}"
        yield _of_machines(EventKind.MACHINES_ENDED, after, at, some, message, reason=cause or None)


def _has_ended(known: UsageInterval | None) -> bool:
    return known is not None and known.ended_at is not None


def _cause(interval: UsageInterval) -> str:
    return interval.end_cause.value if interval.end_cause is not None else ""


def _of_machines(
    kind: EventKind, state: JobState, at: datetime, some: list[UsageInterval], message: str, reason: str | None = None
) -> Event:
    ids = tuple(one.node_id for one in some)
    return _event(kind, state, at, ids[0], message, nodes=ids, reason=reason)


def _unhealthy(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    told = {one.node_id for one in before.quarantined}
    for one in after.quarantined:
        if one.node_id not in told:
            told.add(one.node_id)
            message = f"{one.node_id} takes no part any more: {one.why}"
            yield _event(EventKind.UNHEALTHY, after, one.at, one.node_id, message, nodes=(one.node_id,))
    given_up = {one.node_id for one in before.nodes if one.given_up is not None}
    for node in after.nodes:
        if node.given_up is not None and node.node_id not in given_up | told:
            message = f"{node.node_id} is given up: {node.given_up}"
            yield _event(EventKind.UNHEALTHY, after, now, node.node_id, message, nodes=(node.node_id,))


# Interruptions, and that training goes on after them.


def _interrupted(before: JobState, after: JobState) -> Iterator[Event]:
    new = after.interruptions[len(before.interruptions) :]
    for (kind, number), group in groupby(new, key=lambda one: (one.kind, one.attempt)):
        some, attempt = list(group), _numbered(after, number)
        ids, at = tuple(one.node_id for one in some), min(one.noticed_at for one in some)
        step, saved = _step_of(after, attempt), _saved(after)
        part = f"{_at(after, attempt)}, {_kept(after)}" if attempt is not None else ", with no part in an attempt"
        yield _event(
            EventKind.INTERRUPTED,
            after,
            at,
            f"{len(before.interruptions) + new.index(some[0]) + 1}-{ids[0]}",
            f"{_listed(ids)} {_TAKEN[kind][len(ids) > 1]}{part}",
            attempt=number,
            nodes=ids,
            step=step,
            saved=saved,
            reason=kind.value,
        )


def _resumed(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    known = before.interruptions
    fresh = [
        one
        for at, one in enumerate(after.interruptions)
        if one.resumed_at is not None and not (at < len(known) and known[at].resumed_at is not None)
    ]
    if not fresh or (attempt := after.attempts[-1] if after.attempts else None) is None:
        return
    at, without = max(one.resumed_at or now for one in fresh), max(map(_pause, fresh))
    step = attempt.first_step
    on = f" with {unit_of(attempt, after.checkpoint).named(step)}" if step is not None else ""
    yield _event(
        EventKind.RESUMED,
        after,
        at,
        str(attempt.number),
        f"training goes on{on}, {format_span(without)} after it stopped",
        attempt=attempt.number,
        nodes=tuple(one.node_id for one in fresh),
        step=step,
        seconds=_seconds(without),
    )


def _pause(interruption: Interruption) -> timedelta:
    stopped = interruption.stopped_at or interruption.noticed_at
    return max(timedelta(0), (interruption.resumed_at or stopped) - stopped)


# Attempts: begun, at work, hung, over.


def _attempts(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    known = {one.number: one for one in before.attempts}
    for attempt in after.attempts:
        if (old := known.get(attempt.number)) is not attempt:
            yield from _between(old, attempt, after, now)


def _between(old: Attempt | None, attempt: Attempt, after: JobState, now: datetime) -> Iterator[Event]:
    number = attempt.number
    if old is None:
        ids = tuple(member.node_id for member in attempt.members)
        message = f"attempt {number} begins on {_listed(ids)}"
        yield _of_attempt(
            EventKind.ATTEMPT, after, attempt, attempt.started_at, message, nodes=ids, saved=_saved(after)
        )
    if _first_at(attempt, now) is not None and (old is None or _first_at(old, now) is None):
        yield _started(after, attempt, now)
    why = attempt.reason or attempt.ending_reason
    if why is not None and why is not ((old.reason or old.ending_reason) if old is not None else None):
        yield from _stopped(after, attempt, why, now)
    if attempt.reason is not None and (old is None or old.reason is None):
        yield _over(after, attempt, attempt.reason, now)


def _first_at(attempt: Attempt, now: datetime) -> datetime | None:
    """Return when its first step was; of a script that tells its saves alone, when the first is known."""
    return attempt.stepped_at or (now if attempt.last_step is not None else None)


def _started(after: JobState, attempt: Attempt, now: datetime) -> Event:
    at, parts = _first_at(attempt, now) or now, _parts(after, attempt, now)
    took = timedelta(seconds=sum(seconds for _, seconds in parts))
    words = ", ".join(f"{name.replace('_', ' ')} {format_span(timedelta(seconds=span))}" for name, span in parts)
    step = attempt.first_step
    message = f"{unit_of(attempt, after.checkpoint).named(step or 1)} is made after {format_span(took)}: {words}"
    return _of_attempt(EventKind.STARTED, after, attempt, at, message, step=step, seconds=_seconds(took), parts=parts)


def _parts(after: JobState, attempt: Attempt, now: datetime) -> tuple[tuple[str, float], ...]:
    """Return what a start consisted of: waiting for machines, preparing them, and the script until its first step."""
    ids, began = {member.node_id for member in attempt.members}, attempt.started_at
    last = next((one.ended_at for one in reversed(after.attempts) if one.number < attempt.number), None)
    if after.began_at is not None and after.began_at <= began:  # until then nothing was to train
        last = max(last or after.began_at, after.began_at)
    launched = max((one.launched_at for one in after.nodes if one.node_id in ids), default=began)
    waited = [("machines", launched - last)] if last is not None and launched > last else []
    ready = max(launched, last) if last is not None else launched
    first = (_first_at(attempt, now) or now) - began
    spans = (*waited, ("preparation", began - ready), ("first_step", first))
    return tuple((name, max(0.0, _seconds(span))) for name, span in spans)


def _stopped(after: JobState, attempt: Attempt, why: ExitReason, now: datetime) -> Iterator[Event]:
    """Yield what is told of an attempt that is to end, or has ended at once, for one of these reasons."""
    kind = {ExitReason.HUNG: EventKind.HUNG, ExitReason.IDLE: EventKind.IDLE}.get(why)
    if kind is None:
        return
    step = attempt.last_step
    does = "makes no step any more" if kind is EventKind.HUNG else "uses its GPUs too little"
    said = f": {after.message}" if after.message else ""
    at = attempt.ending_at or attempt.ended_at or now
    message = f"attempt {attempt.number} {does}{_at(after, attempt)}{said}"
    yield _of_attempt(kind, after, attempt, at, message, step=step, saved=_saved(after))


def _over(after: JobState, attempt: Attempt, reason: ExitReason, now: datetime) -> Event:
    at, step = attempt.ended_at or now, attempt.last_step
    took = max(timedelta(0), at - attempt.started_at)
    message = f"attempt {attempt.number} ended{_at(after, attempt)}: {reason.value}, {_kept(after)}"
    return _of_attempt(
        EventKind.ATTEMPT_ENDED,
        after,
        attempt,
        at,
        message,
        step=step,
        saved=_saved(after),
        seconds=_seconds(took),
        reason=reason.value,
    )


# How far it is, what is saved, what it has cost, and whether it comes in time.


def _milestone(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    attempt = after.attempts[-1] if after.attempts else None
    if attempt is None or attempt.last_step is None or unit_of(attempt, after.checkpoint) is not Counts.STEPS:
        return
    known = since_anew(after.attempts)
    old = tuple(one for one in before.attempts if one.number >= known[0].number)
    total, best, had = _total(known), _best(known), _best(old)
    mark = _mark(best, total)
    if not mark or attempt.last_step != best or best <= had or (_total(old) == total and _mark(had, total) >= mark):
        return
    which, percent = (f"{mark}-of-{total}", mark) if total else (f"step-{mark}", None)
    which += f"-anew-{known[0].number}" if known[0].begun_anew else ""
    of = f" of {total}: {percent} %" if total else ""
    heard = {one.last_step_at for one in old if one.number == attempt.number}  # a step of a later word is later
    at = now if attempt.last_step_at is None or attempt.last_step_at in heard else attempt.last_step_at
    number = attempt.number
    yield _event(EventKind.MILESTONE, after, at, which, f"step {best}{of}", attempt=number, step=best, percent=percent)


def _best(attempts: tuple[Attempt, ...]) -> int:
    steps = (one.last_step or 0 for one in attempts if one.counts is not Counts.SAVES)
    return max(steps, default=0)


def _total(attempts: tuple[Attempt, ...]) -> int | None:
    return next((one.total_steps for one in reversed(attempts) if one.total_steps), None)


def _mark(step: int, total: int | None) -> int:
    """Return the last mark that a run at that step has passed: a percentage, without a total a power of ten."""
    if total is not None:
        return min(step * _TENTH // total, _TENTH) * _TENTH
    return 10 ** (len(str(step)) - 1) if step > 0 else 0


def _checkpoint(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    saved, old = after.checkpoint, before.checkpoint
    attempt = after.attempts[-1] if after.attempts else None
    if saved is None or attempt is None or saved == old:
        return
    begins = attempt.first_step
    first = old is None or (begins is not None and old.step < begins <= saved.step)
    if saved.why is Why.DUE and not first:
        return
    which = f"{attempt.number}-first" if saved.why is Why.DUE else f"{attempt.number}-{saved.step}"
    said, number, step = f"the checkpoint of {saved} is saved{_SAVED_FOR[saved.why]}", attempt.number, saved.step
    told = {"attempt": number, "step": step, "saved": step, "reason": saved.why.value}
    yield _event(EventKind.CHECKPOINT, after, now, which, said, **told)


def _money_and_time(before: JobState, after: JobState, now: datetime) -> Iterator[Event]:
    mark, budget = after.budget_mark, after.budget_mark_of
    if _ends_at_budget(after) and not _ends_at_budget(before):
        mark = _WHOLE
    old = before.budget_mark if before.budget_mark_of == budget else 0
    if mark > old and budget is not None and mark:
        message = f"{mark} % of {format_usd(budget)} are spent"
        if mark == _WHOLE and after.budget_mark < _WHOLE:
            message = f"the budget of {format_usd(budget)} pays for no more"
        yield _event(EventKind.BUDGET, after, now, f"{mark}-of-{budget:f}", message, percent=mark, usd=budget)
    made, was = after.capacity_decision, before.capacity_decision
    if made is not None and made.warning is not None and (was is None or was.warning is None):
        which = f"{len(after.attempts)}{f'-of-{_stamp(made.deadline_at)}' if made.deadline_at is not None else ''}"
        yield _event(EventKind.DEADLINE, after, made.decided_at, which, made.warning, reason=_short(after))


def _ends_at_budget(state: JobState) -> bool:
    ending = state.attempt.ending_reason if state.attempt is not None else None
    return ExitReason.BUDGET in (ending, state.exit_reason)


def _short(state: JobState) -> str | None:
    made = state.capacity_decision
    return made.shortfall.value if made is not None and made.shortfall is not None else None


# What all of them share.


def _event(kind: EventKind, state: JobState, at: datetime, which: str, message: str, **told: Any) -> Event:
    return Event(kind=kind.value, at=at, job=state.job, which=which, message=message, **told)


def _of_attempt(kind: EventKind, state: JobState, attempt: Attempt, at: datetime, message: str, **told: Any) -> Event:
    return _event(kind, state, at, str(attempt.number), message, attempt=attempt.number, **told)


def _stamp(at: datetime) -> str:
    return f"{at:%Y%m%dT%H%M%S}"


def _seconds(span: timedelta) -> float:
    return round(span.total_seconds(), 3)


def _numbered(state: JobState, number: int | None) -> Attempt | None:
    return next((one for one in state.attempts if one.number == number), None)


def _step_of(state: JobState, attempt: Attempt | None) -> int | None:
    """Return an attempt's newest step as far as it was heard; None where a later one is saved: it went on unheard."""
    step = attempt.last_step if attempt is not None else None
    return step if step is None or step >= (_saved(state) or 0) else None


def _at(state: JobState, attempt: Attempt) -> str:
    step = _step_of(state, attempt)
    return f" at {unit_of(attempt, state.checkpoint).named(step)}" if step is not None else ""


def _saved(state: JobState) -> int | None:
    return state.checkpoint.step if state.checkpoint is not None else None


def _kept(state: JobState) -> str:
    return f"{state.checkpoint} is saved" if state.checkpoint is not None else "nothing is saved"


def _named(some: Iterable[UsageInterval]) -> str:
    return _listed(tuple(one.node_id for one in some))


def _listed(ids: tuple[str, ...]) -> str:
    more = f" and {counted(len(ids) - _NAMED, 'machine')} more" if len(ids) > _NAMED else ""
    return f"{', '.join(ids[:_NAMED])}{more}"
