"""What a job's `run:` line is: a Python script, or a command line; and what starts it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job, Launcher
from gpucloud.domain.quoting import brief

# From left to right, as a shell does: a quote inside the other kind of quotes is a letter.
_QUOTED = re.compile(r"""\\.|'[^']*'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A Python script and its words, which arrive byte for byte."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Anything else."""

    words: tuple[str, ...]


@cache
def parse_run(run: str) -> Script | CommandLine:
    """Return the form of a job's `run:`; UsageError when it cannot be split, or a script's line needs a shell."""
    try:
        words = tuple(shlex.split(run))
    except ValueError as error:
        raise UsageError(f"run: {error}: {brief(run, 100)}", hint="close the quote") from error
    if not words:
        raise UsageError("run: is empty", hint="run: train.py")
    if not words[0].endswith(".py"):
        return CommandLine(words=("/bin/sh", "-c", run) if needs_shell(run) else words)
    if needs_shell(run):
        raise UsageError(
            f"run: a script is started without a shell, but its line holds characters for one: {brief(run, 100)}",
            hint="put 'single quotes' around words with $ ` * ? [ ] { } ~ # | & ; < > ( )",
        )
    return Script(words=words)


def launcher_of(job: Job) -> Launcher:
    """Return what starts the job's workers, never AUTO. UsageError for a command line under torchrun."""
    script = isinstance(parse_run(job.run), Script)
    match job.launcher:
        case Launcher.AUTO:
            return Launcher.TORCHRUN if script else Launcher.PLAIN
        case Launcher.TORCHRUN if not script:
            raise UsageError(
                f"launcher: torchrun starts a Python script, not a command line: {brief(job.run, 100)}",
                hint="run: train.py, or launcher: plain",
            )
        case Launcher.TORCHRUN | Launcher.MPI | Launcher.TENSORFLOW | Launcher.PLAIN:
            return job.launcher


def workers_per_node(job: Job) -> int:
    """Return how many ranks a node has: one a GPU, or one where the launcher starts the job once a node."""
    once = launcher_of(job) in (Launcher.PLAIN, Launcher.TENSORFLOW)
    return 1 if once else job.resources.gpus


def needs_shell(run: str) -> bool:
    """Whether a shell would do more with the text than split it into words."""
    return re.search(r"[$`|&;<>()*?\[\]{}~#\n]|^\s*\w+=", _QUOTED.sub(_expanded, run.strip())) is not None


def _expanded(quoted: re.Match[str]) -> str:
    """Return what a shell would still act on: inside double quotes `$` and `` ` ``, escaped or not."""
    return "$" if quoted[1] and ("$" in quoted[1] or "`" in quoted[1]) else ""
