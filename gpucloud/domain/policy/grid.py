"""The ticks in which the learned policy's program counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpucloud.domain.policy.observation import Holding, Mode, Task

_MOST_TICKS = 1200
_MOST_SLACK = 480
_MOST_STARTS = 24_000  # changeovers to the deadline that are counted one by one, where slack is small
_LEAST_TICK_S = 60.0
_MOST_PARTS = 16  # of a changeover; each is a situation more in every table
_FEWEST_PARTS = 0.6  # of the most that there may be
_EXACT = 1e-6  # of a tick: what rounding of seconds may leave over


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All spans in ticks of `tick_s`.

    `slack` is the time to the deadline that the work does not need. A launch takes `changeover` ticks, the last of
    which does some work when `lost` is less than 1: that is the part of it that is lost. `beside` ticks of it pass
    while on-demand machines still work, where machines may boot beside others (else 0).
    """

    tick_s: float
    work: int
    slack: int
    changeover: int
    beside: int
    lost: float = 1.0

    def hides_a_try(self, task: Task, slack_s: float) -> bool:
        """Whether there is time to try spot machines and still end in time, of which these ticks know nothing."""
        return self.lost < 1 and slack_s >= 2 * task.changeover_s and self.down(slack_s) < 2

    @property
    def span(self) -> int:
        """Ticks from submit to the deadline."""
        return self.work + self.slack

    @property
    def stages(self) -> int:
        """How many situations are told apart: idle, on demand by its boot left, spot beside it by its age."""
        return 1 + (self.changeover + 1) + self.beside

    def stage(self, holding: Holding) -> int:
        """Return which of the stages a holding is in, spot machines alone apart: those are kept."""
        if holding.mode is Mode.IDLE:
            return 0
        if holding.mode is Mode.ON_DEMAND:
            return 1 + min(self.up(holding.boot_s), self.changeover)
        return 1 + self.changeover + min(max(self.beside - self.up(holding.beside_s), 1), self.beside)

    def up(self, seconds: float) -> int:
        """Return the span in whole ticks, rounded up: of work, of a boot."""
        return math.ceil(seconds / self.tick_s - _EXACT)

    def down(self, seconds: float) -> int:
        """Return the span in whole ticks, rounded down: of time left."""
        return math.floor(seconds / self.tick_s + _EXACT)


def grid_of(task: Task) -> Grid:
    """Return ticks of which a changeover is a whole number, 1,200 of them to the deadline at about the most.

    With little slack, which makes the tables small, there may be more of them: one for each changeover. Where that too
    is too many, a changeover loses a part of a tick. Slack beyond 480 ticks is worth no more.
    """
    parts = _parts(task)
    tick_s = task.changeover_s / parts if parts else max(task.span_s / _MOST_TICKS, task.changeover_s, _LEAST_TICK_S)
    work = math.ceil(task.work_s / tick_s - _EXACT)
    slack = math.floor((task.span_s - task.work_s) / tick_s + _EXACT)  # of the difference: not of two roundings
    beside = 0 if task.handover_s is None or not parts else parts - math.ceil(task.handover_s / tick_s - _EXACT)
    return Grid(
        tick_s=tick_s,
        work=work,
        slack=min(max(slack, 0), _MOST_SLACK),
        changeover=max(parts, 1),
        beside=max(beside, 0),
        lost=1.0 if parts else task.changeover_s / tick_s,
    )


def _parts(task: Task) -> int:
    """Return how many ticks a changeover takes: of which a hand-over is most nearly a whole number, too.

    What it is rounded up by is lost in each, and makes the program shun them. 0 for a changeover within a tick.
    """
    most = round(task.changeover_s * _MOST_TICKS / task.span_s)
    most = min(most, int(task.changeover_s // _LEAST_TICK_S), _MOST_PARTS)

    def rounded_up(parts: int) -> float:
        handover = parts * (task.handover_s or 0.0) / task.changeover_s
        return round((math.ceil(handover - _EXACT) - handover) / parts, 3)

    if not most:
        return int(_is_small(task))
    return min(range(most, math.ceil(most * _FEWEST_PARTS) - 1, -1), key=rounded_up)


def _is_small(task: Task) -> bool:
    """Whether tables in ticks of a changeover are no larger than the largest of others."""
    starts, spare = (span_s / task.changeover_s for span_s in (task.span_s, task.span_s - task.work_s))
    return starts <= _MOST_STARTS and starts * spare <= _MOST_TICKS * _MOST_SLACK and task.changeover_s >= _LEAST_TICK_S
