"""The learned policy: looks up what a dynamic program over recorded markets found best."""

from __future__ import annotations

from typing import Protocol

from gpucloud.domain.policy.choice import Choice
from gpucloud.domain.policy.observation import Observation, Task


class Tables(Protocol):
    """What was computed for one task on one market."""

    def best(self, task: Task, seen: Observation) -> Choice:
        """Return the choice with the least expected cost that keeps the deadline."""
        ...


def learned(tables: Tables, task: Task, seen: Observation) -> Choice:
    """Return what the tables say, on demand where they end."""
    return tables.best(task, seen)
