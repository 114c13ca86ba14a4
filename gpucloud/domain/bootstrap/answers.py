"""How a command that a step runs on the node says how it ended: its exit code, and a last line that names why."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.shown import in_one_line, lines_of

REFUSED = 102
"""The exit code of a command that knows why the node will not do: no repetition mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command said: `said` for the user, a hint if there is one, what it did and the seconds that took."""

    said: str
    hint: str = ""
    steps: tuple[tuple[str, float], ...] = ()


def parse_answer(stdout: bytes) -> Answer | None:
    """Return the answer in the last line; None when there is none."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(Answer, lines[-1]) if lines else None
    except Malformed:
        return None


SETUP_FAILED = 103
"""The exit code of the command that runs the job's own setup, where that failed; its last line is a FailedSetup."""

_SHOWN_LINES, _COMMAND_LETTERS, _LINE_LETTERS = 20, 300, 300

SETUP_LOG_BYTES = 256 << 10
"""Of a failed setup's log that a node hands over: its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A command of the job's setup that failed, its exit code, and the end of all that the setup wrote."""

    command: str
    exit_code: int
    log: str

    def __str__(self) -> str:
        return f"`{in_one_line(self.command)[:_COMMAND_LETTERS]}` ended with exit code {self.exit_code}"

    def shown(self) -> str:
        """Return what failed, and the last lines of what it wrote."""
        return "\n".join([f"{self}:", *self.log.splitlines()[-_SHOWN_LINES:]])

    def in_short(self) -> str:
        """Return what failed, and the last line of what it wrote, in one line."""
        last = next((line for line in reversed(lines_of(self.log)) if line.strip()), "")
        return f"{self}: {last.strip()[:_LINE_LETTERS]}" if last else str(self)


def parse_failed_setup(stdout: bytes) -> FailedSetup | None:
    """Return what the last line says of a setup; None when it says something else."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(FailedSetup, lines[-1]) if lines else None
    except Malformed:
        return None
