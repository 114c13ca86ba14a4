"""A trial of resuming: the same few steps twice, the second time killed in the middle, and what differs then."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import CheckpointPolicy, Job
from gpucloud.domain.manifest import Commit

STEPS = 8
LEAST_STEPS = 4
"""Fewer have no step that is saved, one that is lost and one that comes after both."""

MOST_STEPS = 1000

_EVERY = 2
_LONGEST_NAME = 40


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


def two_jobs(job: Job, steps: int, token: str = "") -> tuple[Job, Job]:
    """Return the job as two short ones, each with half its budget: undisturbed, and killed after a middle step."""
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise UsageError(
            f"{steps} steps prove nothing: from {LEAST_STEPS} to {MOST_STEPS}", hint=f"--verify-steps {STEPS}"
        )
    token = token or secrets.token_hex(2)
    checkpoint = CheckpointPolicy(every_steps=_EVERY, keep=steps)
    plain = replace(job, budget_usd=job.budget_usd / 2, outputs=(), checkpoint=checkpoint, idle=None)
    # An odd step: the one before was saved, and this one is lost.
    trials = ("calm", Trial(steps=steps)), ("killed", Trial(steps=steps, killed_at=steps // 2 | 1))
    calm, killed = (replace(plain, name=_name(job.name, f"{token}-{word}"), trial=str(trial)) for word, trial in trials)
    return calm, killed


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


def _name(job: str, end: str) -> str:
    return f"{job[: _LONGEST_NAME - len(end) - 1].rstrip('-')}-{end}"
