"""How long a job will still take, from its own pace."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.agentstatus import Progress
from gpucloud.domain.quantities import span_of
from gpucloud.domain.supervision.membership import progress_of
from gpucloud.domain.supervision.seen import Seen


def time_left(seen: Seen) -> timedelta | None:
    """Return the time to the last step at the pace of the last steps; None while it cannot be known."""
    attempt = seen.state.attempt
    return time_to_go(progress_of(attempt, seen) if attempt else None)


def time_to_go(progress: Progress | None) -> timedelta | None:
    """Return the time to the last step at that pace; None while it cannot be known."""
    if progress is None or progress.total_steps is None or progress.step_seconds is None:
        return None
    return span_of(max(0, progress.total_steps - progress.step) * progress.step_seconds)
