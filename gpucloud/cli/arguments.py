"""Arguments and options that several commands have, as typer reads them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Optional

import typer

from gpucloud.domain.job.spec import Cloud


class Shell(str, Enum):
    """What `completion` writes for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def named(incomplete: str) -> list[str]:
    """Return what a shell completes a job to."""
    from gpucloud.cli import completing  # noqa: PLC0415  (only a shell asks, at a key press)

    return completing.named(incomplete)


def topics(incomplete: str) -> list[str]:
    """Return what a shell completes a topic of the handbook to."""
    from gpucloud.cli import completing  # noqa: PLC0415  (only a shell asks, at a key press)

    return completing.topics(incomplete)


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
