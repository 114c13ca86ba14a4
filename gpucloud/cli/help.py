"""How commands are written: arguments that several have, how a shell completes them, and how `--help` reads.

Commands stand in groups with one short line each, an example under the usage, no Python types.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import typer.completion as typers
from typer.core import TyperCommand, TyperGroup

from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.spec import Cloud

GROUPS = {
    "Start": {
        "init": "Write a job file",
        "plan": "What would be rented, its cost and its end",
        "train": "Run a job to its end, or go on with it",
        "up": "Start a job's machines without training",
        "docs": "The handbook: its pages, or one of them",
    },
    "See": {
        "status": "Where a job stands; without one, all jobs",
        "events": "What happened to a job, in order",
        "logs": "The output of a job's script",
        "watch": "Steps, GPUs and money, live",
        "cost": "What jobs have cost, and may still cost",
    },
    "Reach": {
        "ssh": "A shell on a machine, or one command",
        "cp": "Copy files to and from machines",
        "checkpoints": "List, verify, delete or bring checkpoints",
    },
    "Change": {
        "budget": "Show, raise or lower a job's budget",
        "down": "Save and end a job and its machines",
        "rm": "Delete what is kept of a job that is over",
    },
    "Choose": {
        "offers": "GPU machines of AWS with prices, best first",
        "simulate": "Rehearse a job on recorded spot markets",
        "quota": "What the AWS account may rent",
    },
    "Trust": {
        "doctor": "Whether machines and their GPUs are fit",
        "keys": "Whose orders may start something here",
    },
    "Set up": {
        "iam": "The rights that gpucloud needs on AWS",
        "catalog": "AWS's machines and list prices",
        "tools": "Programs that gpucloud calls",
        "ci": "gpucloud in a repository's CI",
        "schema": "The JSON Schema of job files",
        "completion": "What bash, zsh or fish completes by",
    },
    "Practise": {
        "local": "Take and freeze embedded machines",
    },
    "Automate": {
        "reconcile": "One pass for a job, for cron and CI",
        "gc": "Find and remove what belongs to no job",
        "metrics": "A machine's figures for Prometheus",
    },
}
"""Every command under what it is for, each with its summary."""

EXAMPLES = {
    "gpucloud": "gpucloud init && gpucloud plan && gpucloud train",
    "init": "gpucloud init --run train.py",
    "plan": "gpucloud plan gpucloud.yaml",
    "train": "gpucloud train gpucloud.yaml --drill",
    "events": "gpucloud events digits -f",
    "logs": "gpucloud logs digits -f --tail 20",
    "cost": "gpucloud cost --all --by day",
    "ssh": "gpucloud ssh digits nvidia-smi",
    "cp": "gpucloud cp digits:results/ .",
    "budget": "gpucloud budget digits 40 USD",
    "rm": "gpucloud rm digits --with-checkpoints",
    "offers": "gpucloud offers --gpu H100 --gpus 8",
    "simulate": "gpucloud simulate gpucloud.yaml --sweep",
    "docs": "gpucloud docs money",
    "completion": 'eval "$(gpucloud completion bash)"',
}

_SAID_ELSEWHERE = {
    **dict.fromkeys(("ls", "list", "ps", "queue"), "gpucloud status lists all jobs"),
    **dict.fromkeys(("job", "jobs"), "gpucloud status lists all jobs, gpucloud train runs one"),
    **dict.fromkeys(
        ("stop", "kill", "cancel", "end", "destroy", "pause"),
        "gpucloud down JOB saves and ends a job, gpucloud train JOB goes on with it",
    ),
    **dict.fromkeys(("run", "launch", "submit", "apply"), "gpucloud train runs a job"),
    **dict.fromkeys(("start", "resume", "restart", "recover"), "gpucloud train JOB goes on with a job, or begins it"),
    **dict.fromkeys(
        ("autostop", "autodown"),
        "nothing is to be set: machines end with their job; gpucloud train --keep leaves them up while they are paid",
    ),
    **dict.fromkeys(("delete", "remove"), "gpucloud rm JOB deletes what is kept of a job"),
    **dict.fromkeys(("exec", "shell"), "gpucloud ssh JOB opens a shell on a machine, or runs one command there"),
    **dict.fromkeys(("attach", "tail"), "gpucloud logs JOB -f follows a job's output"),
    **dict.fromkeys(("gpus", "show-gpus", "gpu", "prices"), "gpucloud offers lists GPU machines with prices"),
    **dict.fromkeys(
        ("check", "validate"), "gpucloud plan says whether a job can run, gpucloud doctor looks at machines"
    ),
    **dict.fromkeys(("storage", "volumes", "files"), "gpucloud cp JOB:@store/outputs . copies from a job's store"),
    "cost-report": "gpucloud cost --all",
    **dict.fromkeys(("login", "auth", "configure"), "aws sso login, or aws configure: gpucloud uses AWS's own login"),
    "uninstall": "gpucloud docs operations-and-security, under Uninstall",
    "version": "gpucloud --version",
}
"""Commands of other tools, and what is one here."""

_ANEW = ("--restart", "--resume", "--continue", "--fresh", "--new")
"""Options of other tools that begin a run, of which `train` and `up` have one."""

_METAVARS = (
    (re.compile(r" <list\[(str|int)\]>| <str>"), " TEXT"),
    (re.compile(r" <(int|float)( range)?>"), " N"),
    (re.compile(r" <list\[([a-z_|]+)\]>| <([a-z_-]+(\|[a-z_-]+)+)>"), r" [\1\2]"),
)


class Command(TyperCommand):
    """A command whose help names what an option takes in plain words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the line; UsageError for an option that begins a run anew elsewhere, with what does here."""
        word = next((one for one in args if one in _ANEW), None) if ctx.info_name in ("train", "up") else None
        if word is not None:
            hint = "--again begins a new run after success, an error or its deadline; any other run goes on"
            raise UsageError(f"there is no option {word!r}", hint=hint)
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, and an example under it."""
        super().format_usage(ctx, formatter)
        _write_example(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what may be given, each in capitals, and in brackets what may be left out."""
        return [_usage(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options."""
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                is_argument = one.param_type_name == "argument"
                (arguments if is_argument else options).append(_plain(record, is_argument=is_argument))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """The root: its commands in groups."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, and an example under it."""
        super().format_usage(ctx, formatter)
        _write_example(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; UsageError for one that is called so elsewhere, and for `help`, with what is meant."""
        word = args[0] if args else ""
        if word == "help":
            meant = " ".join(["gpucloud", *args[1:], "--help"])
            raise UsageError("help is an option here", hint=meant)
        if word in _SAID_ELSEWHERE:  # exactly: what is close to one may mean the opposite (`deploy`, `destroy`)
            raise UsageError(f"there is no command {word!r}", hint=_SAID_ELSEWHERE[word])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group with its commands."""
        del ctx
        width = max(len(name) for commands in GROUPS.values() for name in commands)
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), about) for name, about in commands.items()])


class Below(TyperGroup):
    """A group of commands below the root: each with its whole first line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, (one.help or "").partition("\n")[0]) for name, one in self.commands.items()])


class App(typer.Typer):
    """A typer whose commands have that help."""

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        """Register a command."""
        return super().command(name, **{"cls": Command, **given})


def _write_example(ctx: Any, formatter: Any) -> None:
    known = "gpucloud" if ctx.parent is None else ctx.info_name or ""
    example = EXAMPLES.get(known) if ctx.parent is None or ctx.parent.parent is None else None
    if example is not None:
        formatter.write(f"Example: {example}\n")


def _usage(piece: str) -> str:
    """Return a piece of the usage in one pair of brackets: typer puts its own around those that are there."""
    found = re.fullmatch(r"\[(.+)\](?:\.\.\.)?", piece)
    if found is None:
        return piece.strip("{}").upper()
    inner = found[1]
    many = "..." if piece.endswith("...") and "] [" not in inner else ""
    inner = inner.removesuffix("...")
    return f"{inner if inner.startswith('[') else f'[{inner.upper()}]'}{many}"


def _plain(record: tuple[str, str], *, is_argument: bool) -> tuple[str, str]:
    name, about = record
    if is_argument:
        return re.sub(r" <[^>]*>", "", name).removesuffix("...").upper(), about
    for shape, word in _METAVARS:
        name = shape.sub(word, name)
    return name, about


# Arguments and options that several commands have, as typer reads them, and how a shell completes them.


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
    typer.Option("--node", metavar="ID", help="Which machine of the job; the first if left out."),
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
