"""How a job's script saves, as far as its code and its job file tell, and what an interruption costs it so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.job.spec import Cloud, Job, MarketPolicy


class Saving(str, Enum):
    """How it saves."""

    RESUME = "resume"  # with gpucloud.resume
    DIRECTORY = "directory"  # by itself, into the job file's `checkpoint: {directory: …}`
    NONE = "none"  # not at all, and the job file says so
    NOTHING = "nothing"  # not at all, as far as can be seen
    UNKNOWN = "unknown"


NEVER = (Saving.NONE, Saving.NOTHING)
"""What an interruption takes back to the beginning."""

OTHERWISE = (*NEVER, Saving.DIRECTORY)
"""Of which gpucloud does not say how often it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What was found in a job's code: the script that `run` names, and where `gpucloud.resume` is imported."""

    script: str | None
    reached: bool = False
    """Whether the script, or what it imports of the code, does."""
    elsewhere: str | None = None
    """Another file that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a script saves, and what it is called."""

    saving: Saving
    row: str
    """For a plan: how it saves, and what an interruption costs."""
    script: str = "this script"
    comes_home: bool = True
    """Whether anything of it is left when its machines are gone: an output that the job file names, or a checkpoint."""

    @property
    def warning(self) -> str | None:
        """Why it should not be trained like this on machines that may be interrupted; None where it may be."""
        if self.saving is not Saving.NOTHING:
            return None
        return f"{self.script} does not save: an interruption starts it at the beginning"


NOTHING_COMES_HOME = "what the script writes goes with its machines; name it in `outputs:`"

REMEDY = (
    "four lines of gpucloud.resume in the script; or `checkpoint: {directory: …}` for what it saves by itself;"
    " or `checkpoint: none` where it is meant so"
)


def protection_of(job: Job, code: Code) -> Protection:
    """Return how the job's script saves; its own word, once it runs, counts more."""
    script = code.script or "this script"
    kept = job.checkpoint.directory
    if code.reached:
        row = "by gpucloud.resume; an interruption costs a restart"
        return Protection(saving=Saving.RESUME, row=row, script=script)
    if kept is not None:
        row = f"what is whole in {kept.path}/; an interruption costs the work since"
        return Protection(saving=Saving.DIRECTORY, row=row, script=script)
    if job.checkpoint.none:
        row = "nothing, as the job file says; an interruption starts it at the beginning"
        return Protection(saving=Saving.NONE, row=row, script=script, comes_home=bool(job.outputs))
    if code.script is not None and code.elsewhere is None:
        row = "NOTHING: an interruption starts it at the beginning"
        return Protection(saving=Saving.NOTHING, row=row, script=script, comes_home=bool(job.outputs))
    why = "no script of the code folder is named in `run`"
    if code.elsewhere is not None:
        why = f"{code.elsewhere} uses gpucloud.resume, and it may be that {code.script or 'the command'} uses it"
    return Protection(saving=Saving.UNKNOWN, row=f"not known before it runs: {why}", script=script)


def must_be_meant(job: Job, protection: Protection) -> bool:
    """Whether somebody is to say that it is meant so: machines that cost money and may be interrupted."""
    interruptible = job.cloud is Cloud.AWS and job.resources.market is not MarketPolicy.ON_DEMAND
    return protection.saving is Saving.NOTHING and interruptible and not job.trial
