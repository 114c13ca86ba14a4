"""When interruptions come so thick that going on is not worth it: pauses between attempts, and when to give up."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.quantities import format_span
from gpucloud.domain.state import Attempt, JobState
from gpucloud.domain.supervision.seen import Limits

PAUSING = "pausing until"
"""How the words of a pause begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSteps:
    """What the newest attempts paid in machine time for the steps that they newly saved.

    `times` is that over what as many steps take undisturbed, at the job's own median; infinite for no step.
    """

    attempts: int
    paid: timedelta
    saved: int
    times: float

    def __str__(self) -> str:
        cost = f", {self.times:.1f} times what they cost undisturbed" if self.saved else ""
        steps = f"{self.saved} newly saved step{'s' if self.saved != 1 else ''}" if self.saved else "no saved step"
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
    paused = (pause_line(state, until, limits),) if until is not None and now < until else ()
    cost = None if state.status.ended else saved_steps(state, now, limits)
    return (*paused, *((str(cost),) if cost is not None else ()))


def pause_line(state: JobState, until: datetime, limits: Limits) -> str:
    """Return the words of a pause."""
    count = barren_in_a_row(state, limits)
    return f"{PAUSING} {until:%H:%M:%S} UTC: {count} attempts in a row ended soon and saved nothing"


def barren_in_a_row(state: JobState, limits: Limits) -> int:
    """Return how many of the newest attempts ended soon after they began without a newly saved step."""
    count, best = 0, 0
    for number, attempt in enumerate(state.attempts):
        gained = (attempt.saved_step or 0) > best
        soon = attempt.ended_at is not None and attempt.ended_at - attempt.started_at < limits.soon
        forgiven = number < state.reopened_after
        count = count + 1 if soon and not gained and not forgiven else 0
        best = max(best, attempt.saved_step or 0)
    return count


def saved_steps(state: JobState, now: datetime, limits: Limits) -> SavedSteps | None:
    """Return what newly saved steps cost lately; None before there are enough attempts and machine time to judge by."""
    first = max(state.reopened_after, len(state.attempts) - limits.storm_attempts)
    window, before = state.attempts[first:], state.attempts[:first]
    seconds = [a.step_seconds * len(a.members) for a in state.attempts if a.step_seconds is not None]
    if len(window) < limits.storm_attempts or not seconds:
        return None
    since = max((a.ended_at for a in before if a.ended_at is not None), default=None)
    paid = _machine_time(state, since, now)
    if paid < limits.storm_paid:
        return None
    saved = max(0, _saved(window) - _saved(before))
    undisturbed_s = saved * statistics.median(seconds)
    times = paid.total_seconds() / undisturbed_s if undisturbed_s > 0 else math.inf
    return SavedSteps(attempts=len(window), paid=paid, saved=saved, times=times)


def _saved(attempts: tuple[Attempt, ...]) -> int:
    return max((attempt.saved_step or 0 for attempt in attempts), default=0)


def _machine_time(state: JobState, since: datetime | None, now: datetime) -> timedelta:
    """Return for how long machines were paid since then; all of the job's for None."""
    lives = ((max(life.launched_at, since or life.launched_at), life.ended_at or now) for life in state.nodes)
    spans = (min(end, now) - start for start, end in lives)
    return sum((span for span in spans if span > timedelta(0)), timedelta(0))
