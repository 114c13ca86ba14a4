"""The learned policy's tables for a job as it is measured now: made beside everything else, anew when it differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.supervision.situation import Lesson

MakeTables = Callable[[Lesson], Tables]
_SAME = 0.1  # tables hold for a task that differs by so little


@dataclass(slots=True)
class Learning:
    """Has tables made, a few seconds in a thread of `pool`; until there are some, there are none."""

    make: MakeTables | None
    pool: ThreadPoolExecutor
    _lesson: Lesson | None = None
    _making: Future[Tables] | None = None
    _tables: Tables | None = None

    def tables(self, lesson: Lesson | None) -> Tables | None:
        """Return the newest tables, and have others made where the job is not any more what they were made for."""
        if self._making is not None and self._making.done():
            self._tables, self._making = self._making.result(), None
        if self.make is not None and lesson is not None and self._making is None and not self._knows(lesson):
            self._lesson, self._making = lesson, self.pool.submit(self.make, lesson)
        return self._tables

    def _knows(self, lesson: Lesson) -> bool:
        known = self._lesson
        if known is None or (known.zones, known.gpus) != (lesson.zones, lesson.gpus):
            return False
        pairs = (
            (known.task.work_s, lesson.task.work_s),
            (known.task.span_s, lesson.task.span_s),
            (known.task.changeover_s, lesson.task.changeover_s),
            (known.task.on_demand_usd_per_hour, lesson.task.on_demand_usd_per_hour),
        )
        return all(math.isclose(old, new, rel_tol=_SAME) for old, new in pairs)
