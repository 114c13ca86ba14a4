"""How fast a job works: what is left, how long its starts take, and when it makes no step at all (hangs)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.node.status import Progress, RunState
from gpucloud.domain.state.state import Attempt, ExitReason, JobState
from gpucloud.domain.supervision.membership import members_of, part_of
from gpucloud.domain.supervision.seen import Limits, Seen

_MANY_STEPS = 10  # from so many on, the clock says what a step takes with all that goes on between
_MANY_STARTS = 3  # so many speak for themselves; before, the guess counts as one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The job's whole work and what is left of it, as times without interruption; None while nobody knows.

    `changeover` passes from the launch of machines to their first step that is new, the steps that are lost meanwhile
    included; `handover` is what remains of it where the new machines stand ready while the old ones work.
    """

    work: timedelta | None
    left: timedelta | None
    changeover: timedelta
    handover: timedelta


def pace_of(state: JobState, work: timedelta | None, now: datetime, limits: Limits, nodes: int) -> Pace:
    """Return the job's pace: measured where it can be, else by what its file says of the work, and by the guess.

    Times of work are those of `nodes` nodes. A step that was only timed on fewer is taken to be as many times longer
    there: the same samples, divided over fewer.
    """
    whole, left = _work(state, work, now, nodes)
    return Pace(
        work=whole,
        left=left,
        changeover=_p95(_changeovers(state, limits), limits.changeover),
        handover=_p95(_handovers(state), limits.changeover / 2),
    )


def timed(attempt: Attempt, now: datetime) -> Attempt:
    """Return the attempt, which made its `last_step` just now, with the time of its first step and of one step.

    The median of single steps knows nothing of what goes on between them: saving, evaluating, waiting for data.
    """
    if attempt.first_step is None or attempt.last_step is None:
        return attempt
    made, median_s = attempt.last_step - attempt.first_step, attempt.step_seconds or 0.0
    first = attempt.stepped_at or max(attempt.started_at, now - span_of(made * median_s))
    by_clock_s = (now - first).total_seconds() / made if made >= _MANY_STEPS else 0.0
    return replace(attempt, stepped_at=first, last_step_at=now, pace_s=max(by_clock_s, median_s) or attempt.pace_s)


def _work(
    state: JobState, told: timedelta | None, now: datetime, nodes: int
) -> tuple[timedelta | None, timedelta | None]:
    """Return all work and what is left, from the steps where they are known, else from what the job file says."""
    total = next((a.total_steps for a in reversed(state.attempts) if a.total_steps), None)
    pace_s = _pace_s(state, nodes)
    done = _steps_done(state, pace_s, now)
    if total is not None and pace_s is not None:
        return span_of(total * pace_s), span_of(max(0.0, total - done) * pace_s)
    if told is None:
        return None, None
    share = done / total if total else done * (pace_s or 0.0) / told.total_seconds()
    return told, told * max(0.0, 1 - share)


def _pace_s(state: JobState, nodes: int) -> float | None:
    """Return what a step takes on so many nodes: the newest attempt that had them tells, else the newest at all."""
    timed = [(a.pace_s, len(a.members)) for a in reversed(state.attempts) if a.pace_s]
    return next((pace_s for pace_s, had in timed if had == nodes), timed[0][0] * timed[0][1] / nodes if timed else None)


def _steps_done(state: JobState, pace_s: float | None, now: datetime) -> float:
    """Return the steps done: those that are saved, or made by an attempt that runs, with a part of the next one."""
    saved = max((a.saved_step or 0 for a in state.attempts), default=0)
    saved = max(saved, state.checkpoint.step if state.checkpoint is not None else 0)
    running = state.attempt
    if running is None or running.last_step is None:
        return saved
    since_s = (now - running.last_step_at).total_seconds() if running.last_step_at is not None else 0.0
    return max(saved, running.last_step + min(1.0, since_s / pace_s if pace_s else 0.0))


def _changeovers(state: JobState, limits: Limits) -> list[timedelta]:
    launched = {life.node_id: life.launched_at for life in state.nodes}
    found, before = [], None
    for attempt in state.attempts:
        since = max((launched[m.node_id] for m in attempt.members if m.node_id in launched), default=None)
        is_new = since is not None and (before is None or since > before.started_at)
        grown = before is not None and before.reason is ExitReason.RESIZED  # its machines had stood ready
        if is_new and since is not None and attempt.stepped_at is not None and not grown:
            span = attempt.stepped_at - since
            # The first machines may have stood ready for long, since `up`.
            found.append((min(span, limits.boot) if before is None else span) + _lost(before, attempt))
        before = attempt
    return found


def _lost(before: Attempt | None, attempt: Attempt) -> timedelta:
    """Return the time that the steps took which had to be made again."""
    if before is None or before.last_step is None or attempt.first_step is None:
        return timedelta(0)
    return span_of(max(0, before.last_step + 1 - attempt.first_step) * (before.pace_s or 0.0))


def _handovers(state: JobState) -> list[timedelta]:
    """Return what it took to save and leave on request, and with it the longest way from there to a step."""
    starts = [a.stepped_at - a.started_at for a in state.attempts if a.stepped_at is not None]
    ends = [a.ended_at - a.ending_at for a in state.attempts if a.ended_at and a.ending_at]
    return [start + max(ends, default=timedelta(0)) for start in starts]


def _p95(spans: Sequence[timedelta], guess: timedelta) -> timedelta:
    known = sorted(spans if len(spans) >= _MANY_STARTS else (*spans, guess))
    return known[math.ceil(0.95 * len(known)) - 1]


# When an attempt hangs: its machines answer, and no step is made.


_TRAINING = ("start", "train")
_REPORT = "what takes longer belongs in `with run.phase(...)`"
_LONGEST_START = 4  # times the limit
_AGAIN = 1.5  # times the longest step that came: the next evaluation may take somewhat longer


def hung(attempt: Attempt, seen: Seen, limits: Limits) -> str | None:
    """Return how the attempt hangs, in one line; None when it does not, or has no source of steps.

    Only while the script starts and while it trains: saving and other phases that it reports take their own time, and
    so does what it does after `run.done()`, or when its part is over while others still work.
    """
    part = part_of(attempt, members_of(attempt, seen)[0])
    progress = part.progress if part is not None and part.state is RunState.RUNNING else None
    if progress is None or progress.phase not in _TRAINING:
        return None
    if progress.phase == "start" or progress.step_seconds is None:
        return _hung_at_start(progress, seen, limits)
    if progress.age_s <= hang_limit(progress.step_seconds, seen.state.attempts, limits).total_seconds():
        return None
    median = f"{progress.step_seconds:.2g} s"
    return f"no step for {progress.age_s:.0f} s (median {median}; {_REPORT}); stacks are in the log"


def hang_limit(step_seconds: float, attempts: tuple[Attempt, ...], limits: Limits) -> timedelta:
    """Return how long a step may take: `hang_steps` times the median, at least `hang_at_least`.

    Doubled for each attempt in a row that hung: where it is no hang but a long evaluation that the script does not
    report, the job comes through. Once a step has come after so long, in any attempt, one may take that long again.
    """
    longest = max((attempt.longest_step_s or 0.0 for attempt in attempts), default=0.0)
    seconds = max(limits.hang_steps * step_seconds, _AGAIN * longest)
    once = max(limits.hang_at_least, span_of(seconds))
    return once * (1 << min(10, hangs_in_a_row(attempts)))


def start_limit(attempts: tuple[Attempt, ...], limits: Limits) -> timedelta:
    """Return how long a script may take from `resume.init` to its first step: `start`, what it loads and compiles too.

    Doubled for each attempt in a row that hung, four times `start` at most: such an attempt saves nothing, and what
    rightly takes longer can be reported as a phase.
    """
    return limits.start * min(_LONGEST_START, 1 << min(10, hangs_in_a_row(attempts)))


def hangs_in_a_row(attempts: tuple[Attempt, ...]) -> int:
    """Return how many of the newest attempts that are over hung, one after the other."""
    count = 0
    for attempt in reversed([a for a in attempts if a.reason is not None]):
        if attempt.reason is not ExitReason.HUNG:
            break
        count += 1
    return count


def _hung_at_start(progress: Progress, seen: Seen, limits: Limits) -> str | None:
    limit = start_limit(seen.state.attempts, limits)
    if progress.age_s <= limit.total_seconds():
        return None
    minutes = f"{limit.total_seconds() / 60:.0f} min"
    return f"no first step within {minutes} ({_REPORT}); stacks are in the log"
