"""Every error that a user can meet, with its exit code and a hint.

    GpucloudError                     1   our bug, or not mapped
    ├── UsageError                    2   job file, command line
    │   ├── JobFileError              2   many problems, each with file:line:column
    │   ├── PlanRefused               2   the plan cannot work; says which number must move
    │   ├── BudgetRefused             2   a running job may not have so little
    │   └── NeverStarted              2   there is no run of the job
    ├── CredentialsError              3
    │   ├── StrangersRun              3   somebody whom the user does not trust gave the run
    │   └── FleetElsewhere            3   its machines are processes of another home
    ├── LeaseHeld                     4   another supervisor holds the job
    │   ├── OrderChanged              4   another order was given in between
    │   └── RunIsOver                 4   another process has ended the run in between
    ├── ToolMissing                   5
    ├── BudgetTooSmall               10   what a run has left of it
    ├── NoCapacity                   11
    ├── ProvisionError               13
    ├── NodeError                    14   bootstrap, gate, SSH
    │   ├── HostUnreachable          14
    │   │   └── KeyRefused           14
    │   ├── HostKeyMismatch          14
    │   ├── RemoteCommandFailed      14
    │   ├── SetupFailed              20   the job's own setup, twice by the same command
    │   ├── GateRefused              14   its GPUs are not known good
    │   └── LandingRefused           14   what it sent would be written elsewhere, or without end
    ├── StoreError                   15
    ├── CleanupIncomplete            30   names what still costs money
    └── Interrupted            130, 143   the user's own Ctrl-C or signal

A job that ends is not an error: its exit code comes from `ExitReason` (state.py).
"""

from __future__ import annotations

from dataclasses import dataclass


class GpucloudError(Exception):
    """What failed, on what, with which value; `hint` is one command or one edit.

    `may_pass`: the same call may succeed later (throttled, unreachable), so that a running job waits a while.
    """

    code = "internal"
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, may_pass: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.may_pass = may_pass


class UsageError(GpucloudError):
    """The command line or the job file cannot be understood."""

    code = "usage"
    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault in a job file; `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}"
        text = f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text


class JobFileError(UsageError):
    """A job file with one or more problems, all of them; the message names the first twenty."""

    code = "job_file"
    shown = 20

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        lines = [str(problem) for problem in problems[: self.shown]]
        rest = len(problems) - len(lines)
        super().__init__("\n".join([*lines, *([f"… and {rest} more problems"] if rest else [])]))
        self.problems = problems


class PlanRefused(UsageError):
    """The plan cannot work; the hint names the number that must move."""

    code = "plan_refused"


class BudgetRefused(UsageError):
    """A job may not have so little: what is spent, a last save and the teardown cost more. Nothing was changed."""

    code = "budget_refused"


class NeverStarted(UsageError):
    """The job has no run: there is nothing to look at, or to end."""

    code = "never_started"


class CredentialsError(GpucloudError):
    """The cloud does not know the caller."""

    code = "credentials"
    exit_code = 3


class StrangersRun(CredentialsError):
    """The run of that name was ordered from another home by nobody whom the user trusts."""

    code = "strangers_run"


class FleetElsewhere(CredentialsError):
    """The job's machines are on the embedded fleet of another home, which is not looked into from here."""

    code = "fleet_elsewhere"

    @property
    def is_here(self) -> bool:
        """Whether that home is on this machine: the hint is what works there, and there is none for others."""
        return self.hint is not None


class LeaseHeld(GpucloudError):
    """Another supervisor holds the job; the message names owner, host and age."""

    code = "lease_held"
    exit_code = 4


class OrderChanged(LeaseHeld):
    """Somebody gave the job another order after this command had read the last one; the message names whom."""

    code = "order_changed"


class RunIsOver(LeaseHeld):
    """The run that was to go on has ended in another process's hands; a start now means a new run."""

    code = "run_is_over"


class ToolMissing(GpucloudError):
    """A program or plugin is not there; the hint is the command that installs it."""

    code = "tool_missing"
    exit_code = 5


class BudgetTooSmall(GpucloudError):
    """What a run has left of its budget cannot pay for a start, a save and the teardown."""

    code = "budget"
    exit_code = 10


class NoCapacity(GpucloudError):
    """The cloud has no machines of that kind now."""

    code = "no_capacity"
    exit_code = 11


class ProvisionError(GpucloudError):
    """Terraform or the cloud's own calls failed."""

    code = "provision"
    exit_code = 13


class NodeError(GpucloudError):
    """A node does not do what a node must."""

    code = "node"
    exit_code = 14


class HostUnreachable(NodeError):
    """No SSH answer within the deadline, or the connection was lost."""

    code = "host_unreachable"


class ShellClosed(HostUnreachable):
    """The command that would have reached the machine is ending: nothing is worth waiting for."""


class KeyRefused(HostUnreachable):
    """The host answers, and does not let us in."""

    code = "key_refused"


class HostKeyMismatch(NodeError):
    """The host's key is not the pinned one; nothing was sent."""

    code = "host_key_mismatch"


class RemoteCommandFailed(NodeError):
    """A command on a node ended with a non-zero exit code."""

    code = "remote_command"


class SetupFailed(NodeError):
    """The job's setup failed on a node, and once more by the same command; `log` is the end of what it wrote."""

    code = "setup"
    exit_code = 20

    def __init__(self, message: str, *, shown: str, log: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.shown = shown
        self.log = log


class GateRefused(NodeError):
    """A node's GPUs are not what the job pays for, or not known good: another node may be."""

    code = "gate"


class LandingRefused(NodeError):
    """What arrives from a machine, or from its part of the store, is nothing that may be written here; nothing was."""

    code = "landing"

    def __init__(self, message: str) -> None:
        super().__init__(
            message, hint="rename or remove it where the job runs: what runs there may have made it to harm"
        )


class StoreError(GpucloudError):
    """The object store does not answer, or refuses."""

    code = "store"
    exit_code = 15


class DataStoreError(StoreError):
    """The store of a data set refuses, or, where `unreached` names it, does not answer; the job's own may."""

    def __init__(
        self, message: str, *, hint: str | None = None, may_pass: bool = False, unreached: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, may_pass=may_pass)
        self.unreached = unreached


class CheckpointUnreadable(StoreError):
    """What was saved is there, and cannot be read here and now, which is no damage: nothing is begun without it."""


class StateUnreadable(StoreError):
    """A job's state is damaged, or of another version: nothing can be decided by it."""


class OrderUnreadable(StoreError):
    """A job's order is damaged or gone: nothing can be done by it; the job can be ended all the same."""


class CleanupIncomplete(GpucloudError):
    """Something may still cost money; the message names it and until when."""

    code = "cleanup_incomplete"
    exit_code = 30


class Interrupted(GpucloudError):
    """The user left before the answer: an error for programs alone, as people know what they pressed."""

    code = "interrupted"

    def __init__(
        self, message: str = "interrupted before its answer", *, exit_code: int = 130, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
