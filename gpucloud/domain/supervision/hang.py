"""When an attempt hangs: its machines answer, and no step is made."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.agentstatus import Progress, RunState
from gpucloud.domain.quantities import span_of
from gpucloud.domain.state import Attempt, ExitReason
from gpucloud.domain.supervision.membership import members_of, part_of
from gpucloud.domain.supervision.seen import Limits, Seen

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
