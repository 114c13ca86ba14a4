"""A job as two short ones, to see whether its script resumes to the bit."""

from __future__ import annotations

import secrets
from dataclasses import replace

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import CheckpointPolicy, Job
from gpucloud.domain.trial import Trial

STEPS = 8
LEAST_STEPS = 4
"""Fewer have no step that is saved, one that is lost and one that comes after both."""

MOST_STEPS = 1000

_EVERY = 2
_LONGEST_NAME = 40


def two_jobs(job: Job, steps: int, token: str = "") -> tuple[Job, Job]:
    """Return the job as two short ones, each with half its budget: undisturbed, and killed after a middle step."""
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise UsageError(
            f"{steps} steps prove nothing: from {LEAST_STEPS} to {MOST_STEPS}", hint=f"--verify-steps {STEPS}"
        )
    token = token or secrets.token_hex(2)
    checkpoint = CheckpointPolicy(every_steps=_EVERY, keep=steps)
    resources = replace(job.resources, least_nodes=0)  # bits are those of one number of nodes
    plain = replace(
        job, budget_usd=job.budget_usd / 2, outputs=(), checkpoint=checkpoint, idle=None, resources=resources
    )
    # An odd step: the one before was saved, and this one is lost.
    trials = ("calm", Trial(steps=steps)), ("killed", Trial(steps=steps, killed_at=steps // 2 | 1))
    calm, killed = (replace(plain, name=_name(job.name, f"{token}-{word}"), trial=str(trial)) for word, trial in trials)
    return calm, killed


def _name(job: str, end: str) -> str:
    return f"{job[: _LONGEST_NAME - len(end) - 1].rstrip('-')}-{end}"
