"""Arguments and options that several commands have, as typer reads them, and how a shell completes them."""

from __future__ import annotations

import re
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
import typer.completion as typers

from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.job.spec import Cloud

ASKED_BY = "_GPUCLOUD_COMPLETE"
"""Set while a shell asks: typer answers in `main` then, and no command runs."""

_HARMLESS = re.compile(r"[\w@%+=:,./~ -]+")  # zsh evaluates what it is answered, a backslash before `$(...)` too


class Shell(str, Enum):
    """What `completion` writes for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def named(incomplete: str) -> list[str]:
    """Return what a shell completes a job to: the known jobs, and job files and folders here, that begin so."""
    from gpucloud.wiring import Gpucloud  # noqa: PLC0415  (only a shell asks, at a key press)

    jobs: list[str] = []
    with suppress(GpucloudError, OSError):  # whatever is wrong is said when a command runs
        jobs = [known.name for known in Gpucloud().home.known()]
    typed = Path(incomplete or ".")
    folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
    files: list[str] = []
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                files.append(f"{path}/")
            elif path.suffix in (".yaml", ".yml"):
                files.append(str(path))
    return [word for word in (*jobs, *files) if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]


def topics(incomplete: str) -> list[str]:
    """Return what a shell completes a topic to: the pages of the handbook that begin so."""
    from gpucloud.wiring import handbook  # noqa: PLC0415  (only a shell asks, at a key press)

    return [page.name for page in handbook() if page.name.startswith(incomplete)]


Target = Annotated[
    Optional[str],  # noqa: UP045  (typer reads this at run time on Python 3.10)
    typer.Argument(
        metavar="[JOB|FILE]", help="A job's name, or a job file; gpucloud.yaml here if left out.", autocompletion=named
    ),
]
OnCloud = Annotated[
    Optional[Cloud],  # noqa: UP045
    typer.Option("--cloud", help="Another cloud than the job file names."),
]
Drilled = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="[NODE|JOB|FILE]", help="A machine's name, or a job; gpucloud.yaml here if left out."),
]
OneNode = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--node", help="Which machine of the job; the first if left out."),
]
JsonAlready = Annotated[bool, typer.Option("--json", help="The same: the document is JSON already.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]


def completion_script(shell: Shell) -> str:
    """Return what the shell reads once, to complete commands, options, jobs and job files."""
    script: str = typers.get_completion_script(prog_name="gpucloud", complete_var=ASKED_BY, shell=shell.value)  # type: ignore[attr-defined]
    return script


def answer_a_shell() -> None:
    """Have typer answer a shell that asks."""
    typers.completion_init()  # type: ignore[attr-defined]  # typer has it here, and does not list it
