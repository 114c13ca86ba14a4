"""What a proof is: a goal with a name, how it is run, and the figures that show whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """How much is run: SHORT within seconds, for every change (counts only, no times); LONG what docs/proofs.md has."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value beside its limit; `least`: the limit is the least that will do, not the most.

    `name` starts with the goal's name; the goal's own name alone counts what went wrong.
    """

    name: str
    value: float
    limit: float
    least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value keeps the limit."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        return f"FIGURE {self.name} {self.value:g} {self.limit:g} {'pass' if self.holds else 'fail'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One promise. `real` names what takes part as it is, `simulated` what stands for something else.

    `run` yields figures as they are known, and says on standard error what went wrong, with what repeats it (a seed).
    """

    promise: str
    real: str
    simulated: str
    run: Callable[[Form], Iterator[Figure]]
