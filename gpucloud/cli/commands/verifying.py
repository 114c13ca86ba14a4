"""`train --verify-resume`: the job as two short runs, one of them killed in the middle, compared bit by bit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from gpucloud.cli.commands.passes import end_unsaved
from gpucloud.cli.commands.supervising import Begun, run, say_what_is_left
from gpucloud.cli.commands.training import begin
from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render.words import left, say, say_json, tell
from gpucloud.cli.target import Target, read_target
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.protection import LossGap, Outcome, Verdict, read_trial
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.quantities import format_usd
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.untrusted import in_one_line
from gpucloud.store.checkpoints import under
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.checkpoint.comparing import compared, two_jobs
from gpucloud.usecases.job.start import Asked as StartRequest
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.wiring import Gpucloud, imports_resume


def require_alone(given: list[str]) -> None:
    """UsageError for options of `train` that say nothing of a trial."""
    if given:
        raise UsageError(f"--verify-resume and {given[0]} are two things", hint="one of them at a time")


def verify_resume(
    target: str | None, steps: int, *, on: Cloud | None, budget_usd: Decimal | None, as_json: bool
) -> int:
    """Run the trial and return 0 when both runs are equal, 20 when they are not, else the code of the run that failed.

    Of a trial that is broken off nothing stays but its state. UsageError for a script that does not use the library.
    """
    cloud = Gpucloud()
    read = read_target(cloud, target, on, to_start=True)
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
        why = "stopped: nothing is proved, and no checkpoint of the trial is left"
        tell(why)
        return left(130, why, as_json=as_json)


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
        for stored_checkpoints in self._shelves():
            for key in stored_checkpoints.listed():
                stored_checkpoints.store.delete(under(stored_checkpoints.prefix, key))

    def _run(self, read: Target) -> int:
        """Return the run's exit code; 130 or 143 when the user left, and nothing of it is left."""
        begun = begin(self.cloud, read, StartRequest())
        self.names.append(begun.name)
        try:
            run(begun, asks=False)
        except Leave as leave:
            self._end(begun)
            return leave.exit_code
        except GpucloudError:  # nobody comes back to a trial, and its order would have a later pass go on with it
            self._end(begun)
            raise
        report = begun.report()
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
            say_what_is_left(begun.asker.left_job(), begun.asker.clock.now())
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
                hint="let the script that `run` names use gpucloud.resume (gpucloud docs scripts-and-checkpoints)",
            )

    def _shelves(self) -> list[StoredCheckpoints]:
        """Return the checkpoints of each run that was begun."""
        stores = [
            (JobStore(self.cloud.store(job), name), job) for job, name in zip(self.jobs, self.names, strict=False)
        ]
        return [
            StoredCheckpoints(store=jobs.store, prefix=jobs.checkpoints, keep=job.checkpoint.keep)
            for jobs, job in stores
        ]

    def _answer(self, verdict: Verdict, *, as_json: bool) -> None:
        if as_json:
            say_json({**verdict_json(verdict), "runs": self.names})
            return
        say(verdict_text(verdict))
        if (hint := hint_of(verdict)) is not None:
            tell(f"hint: {hint}")
        if verdict.outcome is not Outcome.EQUAL:
            tell(f"their checkpoints stay: `gpucloud checkpoints {self.names[0]}`, `… {self.names[1]}`")


# What a trial of resuming showed, as text for people and as JSON for programs.


_NAMED, _GENERATORS = 3, "randomness"
_A_RANKS = re.compile(r"rank (\d+): (.*)", re.DOTALL)


def verdict_text(verdict: Verdict) -> str:
    """Return what was found, with which parts of the state differ and the first step whose loss does.

    Each part is named in JSON; a generator of Python's alone has 625.
    """
    found = _first_line(verdict) + (f": {_named(verdict.parts)}" if verdict.parts else "")
    return "\n".join([found, *([_gap_text(verdict.loss)] if verdict.loss is not None else [])])


def _named(parts: tuple[str, ...]) -> str:
    """Return a few words on all parts: those of one kind as the first of them."""
    kinds: dict[str, list[str]] = {}
    for part in parts:
        kinds.setdefault(_kind(part), []).append(part)
    named = [_first_of(kind, alike) for kind, alike in list(kinds.items())[:_NAMED]]
    rest = sum(map(len, list(kinds.values())[_NAMED:]))
    return ", ".join([*named, *([f"{rest} more"] if rest else [])])


def _kind(part: str) -> str:
    return _bare(part).partition(".")[0]


def _bare(part: str) -> str:
    own = _A_RANKS.fullmatch(part)
    return own[2] if own else part


def _first_of(kind: str, parts: list[str]) -> str:
    if kind == _GENERATORS:
        names = dict.fromkeys(_bare(part).split(".")[1] for part in parts if "." in _bare(part))
        ranks = dict.fromkeys(own[1] for part in parts if (own := _A_RANKS.fullmatch(part)))
        of = f" of rank {', '.join(list(ranks)[:_NAMED])}{', …' if len(ranks) > _NAMED else ''}" if ranks else ""
        return in_one_line(f"the random generators{of} ({', '.join(names)})")
    more = f" and {len(parts) - 1} more of its kind" if len(parts) > 1 else ""
    return f"{in_one_line(parts[0])}{more}"


def hint_of(verdict: Verdict) -> str | None:
    """Return what to do about it; None when all is well."""
    if _of_other_code(verdict):
        return (
            "what is written into the code folder meanwhile, as a log, counts as code: keep it out by .gpucloudignore"
        )
    match verdict.outcome:
        case Outcome.DIFFERENT:
            return (
                "something that its steps depend on is not saved: give resume.init() every object with a state, and"
                " draw random numbers from torch, NumPy's and Python's own generators, not from one of the script's"
            )
        case Outcome.NOT_DETERMINISTIC:
            return "seed whatever is random before resume.init(), and call torch.use_deterministic_algorithms(True)"
        case Outcome.NOT_RESUMED:
            return "--verify-steps with fewer steps"
        case Outcome.EQUAL | Outcome.FAILED:
            return None


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the same as an object; a loss that is no number is a string."""
    return {
        "outcome": verdict.outcome.value,
        "step": verdict.step,
        "resumed_from": verdict.resumed_from,
        "compared": verdict.compared,
        "different": list(verdict.parts),
        "loss": codec.plain(verdict.loss),
    }


def _of_other_code(verdict: Verdict) -> bool:
    return any(part.endswith("surroundings.code") for part in verdict.parts)


def _first_line(verdict: Verdict) -> str:
    step, base, count = verdict.step, verdict.resumed_from, f"{len(verdict.parts)} of {verdict.compared} parts"
    if _of_other_code(verdict):
        return f"nothing is proved: the files of the code folder changed between the runs; {count} differ"
    same = f"all {verdict.compared} parts of the state at step {step} are the same to the bit"
    match verdict.outcome:
        case Outcome.EQUAL:
            return f"equal: killed and resumed from step {base}, {same}"
        case Outcome.DIFFERENT if not verdict.parts:
            return f"not equal: resumed from step {base}; {same}, but not every loss is"
        case Outcome.DIFFERENT:
            return f"not equal: resumed from step {base}; step {step} is the first saved one that differs, in {count}"
        case Outcome.NOT_DETERMINISTIC:
            where = f"the state at step {step} differs in {count}" if verdict.parts else f"{same}, but not every loss"
            return f"not deterministic: the runs differ before the resume from step {base} already; {where}"
        case Outcome.NOT_RESUMED:
            return f"not resumed: the script ended after step {step}, before it was killed"
        case Outcome.FAILED:
            return "nothing is proved: a run did not come to its end"


def _gap_text(gap: LossGap) -> str:
    calm, killed = ("none" if loss is None else repr(loss) for loss in (gap.calm, gap.killed))
    return f"the loss differs from step {gap.step} on: {calm} undisturbed, {killed} resumed (rank {gap.rank})"
