"""`train --verify-resume`: the job as two short runs, one of them killed in the middle, compared bit by bit."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.supervising import run, say_what_lives
from gpucloud.cli.target import Target, read_target
from gpucloud.cli.training import begin
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Cloud, Job
from gpucloud.domain.quantities import format_usd
from gpucloud.domain.state import ExitReason
from gpucloud.domain.supervision.seen import Goal
from gpucloud.domain.trial import Outcome, Verdict, read_trial
from gpucloud.store.commits import under
from gpucloud.usecases.checkpoints import Shelf
from gpucloud.usecases.comparing import compared
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.trials import STEPS, two_jobs
from gpucloud.wiring import Gpucloud, imports_resume

__all__ = ["STEPS", "require_alone", "verify_resume"]

_NAMED = 10


def require_alone(given: list[str]) -> None:
    """UsageError for options of `train` that say nothing of a trial."""
    if given:
        raise UsageError(f"--verify-resume and {given[0]} are two things", hint="one of them at a time")


def verify_resume(
    target: str | None, steps: int, *, on: Cloud | None, budget_usd: Decimal | None, as_json: bool
) -> int:
    """Run the trial and return 0 when both runs are equal, 20 when they are not, else the code of the run that failed.

    UsageError for a script that does not use the library.
    """
    cloud = Gpucloud()
    read = read_target(cloud, target, on)
    if budget_usd is not None:
        read = replace(read, job=replace(read.job, budget_usd=budget_usd))
    if not imports_resume(read.job.code):
        raise UsageError(
            f"nothing in {read.job.code} imports gpucloud.resume: there is no exact resume to verify",
            hint="README, “In the script”: import gpucloud.resume as resume; resume.init(model=…)",
        )
    jobs = two_jobs(read.job, steps)
    _introduce(read.job, jobs)
    names = []
    for job in jobs:
        name, code = _run(cloud, replace(read, job=job))
        names.append(name)
        if code:
            tell(f"{name} failed: nothing is proved")
            return code
    verdict = compared(*(_shelf(cloud, job, name) for job, name in zip(jobs, names, strict=True)))
    if verdict.outcome is Outcome.EQUAL:
        for job, name in zip(jobs, names, strict=True):
            _clear(_shelf(cloud, job, name))
    _answer(verdict, names, as_json=as_json)
    return 0 if verdict.outcome is Outcome.EQUAL else ExitReason.USER_ERROR.exit_code


def _introduce(job: Job, jobs: tuple[Job, Job]) -> None:
    calm, killed = jobs
    trial = read_trial(killed.trial)
    if trial is not None:
        tell(f"two short runs of {trial.steps} steps: {calm.name}, and {killed.name}, killed after {trial.killed_at}")
    tell(f"each may cost {format_usd(calm.budget_usd)} at the most: both stay inside {format_usd(job.budget_usd)}")


def _run(cloud: Gpucloud, read: Target) -> tuple[str, int]:
    """Return the run's name and exit code."""
    begun = begin(cloud, read)
    try:
        run(begun, Goal(nodes=read.job.resources.nodes))
    except Leave as leave:
        say_what_lives(begun.asker.state_as_listed())
        return begun.name, leave.exit_code
    report = begun.asker.report()
    tell(f"{begun.name}: {report.status.value}, spent {format_usd(report.spend.spent_usd)}")
    if report.message:
        tell(report.message)
    return begun.name, report.exit_code or 0


def _shelf(cloud: Gpucloud, job: Job, name: str) -> Shelf:
    jobs = JobStore(cloud.store(job), name)
    return Shelf(store=jobs.store, prefix=jobs.checkpoints, keep=job.checkpoint.keep)


def _clear(shelf: Shelf) -> None:
    """Delete what the trial saved: manifests sort before data."""
    for key in shelf.listed():
        shelf.store.delete(under(shelf.prefix, key))


def _answer(verdict: Verdict, names: list[str], *, as_json: bool) -> None:
    if as_json:
        say_json({**_json(verdict), "runs": names})
        return
    say(_text(verdict))
    if verdict.parts:
        rest = len(verdict.parts) - _NAMED
        say(
            "\n".join(
                [*(f"  {part}" for part in verdict.parts[:_NAMED]), *([f"  … and {rest} more"] if rest > 0 else [])]
            )
        )
    if verdict.outcome is not Outcome.EQUAL:
        tell(f"their checkpoints stay: `gpucloud checkpoints {names[0]}`, `gpucloud checkpoints {names[1]}`")


def _text(verdict: Verdict) -> str:
    match verdict.outcome:
        case Outcome.EQUAL:
            return (
                f"equal: killed and resumed from step {verdict.resumed_from}, all {verdict.compared} parts of the state"
                f" at step {verdict.step} are the same to the bit"
            )
        case Outcome.DIFFERENT:
            return (
                f"not equal: resumed from step {verdict.resumed_from}, step {verdict.step} is the first that differs:"
            )
        case Outcome.NOT_DETERMINISTIC:
            return (
                f"not deterministic: the two runs differ at step {verdict.step} already, before the resume from step"
                f" {verdict.resumed_from}; seed everything, and torch.use_deterministic_algorithms(True):"
            )
        case Outcome.NOT_RESUMED:
            return f"not resumed: the script ended after step {verdict.step}, before it was killed; take fewer steps"


def _json(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "step": verdict.step,
        "resumed_from": verdict.resumed_from,
        "compared": verdict.compared,
        "different": list(verdict.parts),
    }
