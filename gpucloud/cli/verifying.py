"""`train --verify-resume`: the job as two short runs, one of them killed in the middle, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal

from gpucloud.cli.ending import end_unsaved
from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.supervising import Begun, run, say_what_lives
from gpucloud.cli.target import Target, read_target
from gpucloud.cli.training import begin
from gpucloud.cli.verdicts import hint_of, verdict_json, verdict_text
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job import Cloud, Job
from gpucloud.domain.quantities import format_usd
from gpucloud.domain.state import ExitReason
from gpucloud.domain.trial import Outcome, Verdict, read_trial
from gpucloud.store.commits import under
from gpucloud.usecases.checkpoints import Shelf
from gpucloud.usecases.comparing import compared
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.start import Asked as Wishes
from gpucloud.usecases.trials import STEPS, two_jobs
from gpucloud.wiring import Gpucloud, imports_resume

__all__ = ["STEPS", "require_alone", "verify_resume"]


def require_alone(given: list[str]) -> None:
    """UsageError for options of `train` that say nothing of a trial."""
    if given:
        raise UsageError(f"--verify-resume and {given[0]} are two things", hint="one of them at a time")


def verify_resume(
    target: str | None, steps: int, *, on: Cloud | None, budget_usd: Decimal | None, as_json: bool
) -> int:
    """Run the trial and return 0 when both runs are equal, 20 when they are not, else the code of the run that failed.

    Of a trial that is broken off nothing stays but its books. UsageError for a script that does not use the library.
    """
    cloud = Gpucloud()
    read = read_target(cloud, target, on)
    if budget_usd is not None:
        read = replace(read, job=replace(read.job, budget_usd=budget_usd))
    if not imports_resume(read.job.code):
        raise UsageError(
            f"nothing in {read.job.code} imports gpucloud.resume: there is no exact resume to verify",
            hint="import gpucloud.resume as resume; resume.init(model=…)",
        )
    jobs = two_jobs(read.job, steps)
    _introduce(read.job, jobs)
    trial = _Trial(cloud=cloud, read=read, jobs=jobs)
    try:
        return trial.run(as_json=as_json)
    except KeyboardInterrupt:
        trial.clear()
        tell("stopped: nothing is proved, and no checkpoint of the trial is left")
        return 130


def _introduce(job: Job, jobs: tuple[Job, Job]) -> None:
    calm, killed = jobs
    trial = read_trial(killed.trial)
    if trial is not None:
        tell(f"two short runs of {trial.steps} steps: {calm.name}, and {killed.name}, killed after {trial.killed_at}")
    tell(f"each may cost {format_usd(calm.budget_usd)} at the most: both stay inside {format_usd(job.budget_usd)}")


@dataclass(kw_only=True)
class _Trial:
    cloud: Gpucloud
    read: Target
    jobs: tuple[Job, Job]
    names: list[str] = field(default_factory=list)

    def run(self, *, as_json: bool) -> int:
        """Run both, compare them and say what that showed; return the exit code."""
        for job in self.jobs:
            code = self._run(replace(self.read, job=job))
            if code:
                return self._failed(code, as_json=as_json)
            self._require_saved()
        verdict = compared(*self._shelves())
        if verdict.outcome is Outcome.EQUAL:
            self.clear()
        self._answer(verdict, as_json=as_json)
        return 0 if verdict.outcome is Outcome.EQUAL else ExitReason.USER_ERROR.exit_code

    def clear(self) -> None:
        """Delete what the trial saved: manifests sort before data."""
        for shelf in self._shelves():
            for key in shelf.listed():
                shelf.store.delete(under(shelf.prefix, key))

    def _run(self, read: Target) -> int:
        """Return the run's exit code; 130 or 143 when the user left, and nothing of it is left."""
        begun = begin(self.cloud, read, Wishes())
        self.names.append(begun.name)
        try:
            run(begun, asks=False)
        except Leave as leave:
            self._end(begun)
            return leave.exit_code
        except GpucloudError:  # nobody comes back to a trial, and its order would have a later pass go on with it
            self._end(begun)
            raise
        report = begun.asker.report()
        tell(f"{begun.name}: {report.status.value}, spent {format_usd(report.spend.spent_usd)}")
        if report.message:
            tell(report.message)
        return report.exit_code or 0

    def _end(self, begun: Begun) -> None:
        """End the run that was begun; what cannot be ended now is told."""
        tell(f"ending {begun.name} as it stands")
        try:
            end_unsaved(self.cloud, begun.known)
        except Leave:
            say_what_lives(begun.asker.state_as_listed(), begun.asker.clock.now())
        except GpucloudError as error:
            tell(f"{error}: gpucloud down {begun.name} ends it")

    def _failed(self, code: int, *, as_json: bool) -> int:
        self.clear()
        tell(f"{self.names[-1]} did not come to its end: nothing is proved, and no checkpoint of the trial is left")
        if as_json:
            say_json({"outcome": Outcome.FAILED.value, "run": self.names[-1], "exit_code": code, "runs": self.names})
        return code

    def _require_saved(self) -> None:
        """UsageError when the run that ended well has saved nothing: it is not the library's."""
        if not self._shelves()[-1].standing():
            raise UsageError(
                f"{self.names[-1]} ended without one checkpoint: what it ran never called run.step() or run.done()",
                hint="let the script that `run` names use gpucloud.resume (README, “The script”)",
            )

    def _shelves(self) -> list[Shelf]:
        """Return the checkpoints of each run that was begun."""
        stores = [
            (JobStore(self.cloud.store(job), name), job) for job, name in zip(self.jobs, self.names, strict=False)
        ]
        return [Shelf(store=jobs.store, prefix=jobs.checkpoints, keep=job.checkpoint.keep) for jobs, job in stores]

    def _answer(self, verdict: Verdict, *, as_json: bool) -> None:
        if as_json:
            say_json({**verdict_json(verdict), "runs": self.names})
            return
        say(verdict_text(verdict))
        if (hint := hint_of(verdict)) is not None:
            tell(f"hint: {hint}")
        if verdict.outcome is not Outcome.EQUAL:
            tell(f"their checkpoints stay: `gpucloud checkpoints {self.names[0]}`, `… {self.names[1]}`")
