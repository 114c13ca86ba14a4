"""What a judgement is made of: findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

REFUSED = 14
"""The exit code of the node's `gate` command, and of the CLI, where a machine is not fit (DESIGN §10)."""

# What the next machine would show as well: the job's Python, its environment, the ways out of its network; and what
# somebody does there now. Another machine is taken then, and this one again when no other is left.
_NOT_THE_MACHINES = ("no-torch", "cpu-torch", "wheel-too-new", "torch-count", "store", "choice", "in-use")


class Severity(str, Enum):
    """What a finding means for the machine."""

    FAIL = "fail"  # it takes no part
    WARN = "warn"  # it does, and the user is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be: the figure, what was expected, and what to do about it.

    `gpu` is the device's index, None for the machine's own.
    """

    code: str
    severity: Severity
    text: str
    hint: str
    gpu: int | None = None

    def __str__(self) -> str:
        who = f"GPU {self.gpu}: " if self.gpu is not None else ""
        return f"{who}{self.text}"


def fail(code: str, text: str, hint: str, gpu: int | None = None) -> Finding:
    """Return a finding that keeps the machine out."""
    return Finding(code=code, severity=Severity.FAIL, text=text, hint=hint, gpu=gpu)


def warn(code: str, text: str, hint: str, gpu: int | None = None) -> Finding:
    """Return a finding that the user is told."""
    return Finding(code=code, severity=Severity.WARN, text=text, hint=hint, gpu=gpu)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return those that keep the machine out."""
    return tuple(finding for finding in findings if finding.severity is Severity.FAIL)


def is_machines(findings: Iterable[Finding]) -> bool:
    """Whether one of these keeps the machine out by a fault of its own, which another machine need not have."""
    return any(finding.code not in _NOT_THE_MACHINES for finding in failures(findings))


def is_in_use(findings: Iterable[Finding]) -> bool:
    """Whether nothing keeps the machine out but what others do there now."""
    failed = failures(findings)
    return bool(failed) and all(finding.code == "in-use" for finding in failed)


def why(findings: Iterable[Finding]) -> str:
    """Return the failures in one line, empty for none."""
    return "; ".join(str(finding) for finding in failures(findings))
