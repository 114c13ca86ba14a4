"""`completion`: what a shell needs to complete commands, options, jobs and job files, and what it is answered."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import typer.completion as typers

from gpucloud.cli.render.words import say
from gpucloud.domain.errors import GpucloudError
from gpucloud.wiring import Gpucloud, handbook

ASKED_BY = "_GPUCLOUD_COMPLETE"
"""Set while a shell asks: typer answers in `main` then, and no command runs."""

_HARMLESS = re.compile(r"[\w@%+=:,./~ -]+")  # zsh evaluates what it is answered, a backslash before `$(...)` too


def completion(shell: str) -> int:
    """Write the script that the shell reads once; return the exit code."""
    script = typers.get_completion_script(prog_name="gpucloud", complete_var=ASKED_BY, shell=shell)  # type: ignore[attr-defined]
    say(script)
    return 0


def prepare() -> None:
    """Have typer answer a shell that asks."""
    typers.completion_init()  # type: ignore[attr-defined]  # typer has it here, and does not list it


def named(incomplete: str) -> list[str]:
    """Return the known jobs, and job files and folders here, that begin so."""
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
    """Return the pages of the handbook that begin so."""
    return [page.name for page in handbook() if page.name.startswith(incomplete)]
