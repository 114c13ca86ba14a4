"""A trial of resuming: the same few steps twice, the second time killed in the middle, and what differs then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.errors import UsageError
from gpucloud.domain.manifest import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run of so many steps; killed once after `killed_at` of them, None: undisturbed."""

    steps: int
    killed_at: int | None = None

    def __str__(self) -> str:
        """As `GPUCLOUD_TRIAL` says it to the script."""
        return str(self.steps) if self.killed_at is None else f"{self.steps}:{self.killed_at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint holds, by readable names, each with what tells it from another: sums, or text."""

    parts: Mapping[str, str]


class Outcome(str, Enum):
    """What a trial showed; the value is what programs read."""

    EQUAL = "equal"
    DIFFERENT = "different"  # only after the resume
    NOT_DETERMINISTIC = "not_deterministic"  # before it already
    NOT_RESUMED = "not_resumed"  # the script ended before it was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a trial showed: `step` is the last one compared, or the first that differs, in `parts`."""

    outcome: Outcome
    step: int
    resumed_from: int | None
    compared: int = 0
    parts: tuple[str, ...] = ()


def read_trial(text: str) -> Trial | None:
    """Return the trial that a script is to be; None for empty text. UsageError for other words."""
    steps, _, killed_at = text.partition(":")
    if not text:
        return None
    if not steps.isdigit() or not (killed_at or "1").isdigit():
        raise UsageError(f"GPUCLOUD_TRIAL={text!r} is no trial", hint="set it to 8, or to 8:5, or not at all")
    return Trial(steps=int(steps), killed_at=int(killed_at) if killed_at else None)


def differences(one: Content, other: Content) -> tuple[str, ...]:
    """Return the names of all that differs, or is in one of them only."""
    names = sorted({*one.parts, *other.parts})
    return tuple(name for name in names if one.parts.get(name) != other.parts.get(name))


def judged(step: int, parts: tuple[str, ...], resumed_from: Commit | None) -> Outcome:
    """Return what it means that these parts differ at that step, the first where any do."""
    if resumed_from is None:
        return Outcome.NOT_RESUMED
    if not parts:
        return Outcome.EQUAL
    return Outcome.NOT_DETERMINISTIC if step <= resumed_from.step else Outcome.DIFFERENT
