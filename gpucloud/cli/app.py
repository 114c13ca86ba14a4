"""The typer root. A command is made when it is asked for: `--help` names them all and needs none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from gpucloud import __version__
from gpucloud.cli.help import GROUPS, App, Group
from gpucloud.domain.errors import Interrupted

_CHAPTERS = {
    "jobs": (
        *("plan", "train", "up", "budget", "down", "rm", "reconcile"),
        *("status", "events", "logs", "watch", "cost", "ssh", "cp", "checkpoints", "metrics"),
    ),
    "choosing": ("init", "docs", "offers", "simulate", "doctor", "schema", "completion", "gc"),
}
"""Which module has the commands that are in no group below the root; `groups` has the others."""


class Commands(Mapping[str, Any]):
    """The root's commands by name, in the order of the help; a chapter is imported when the first of it is taken."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the command; KeyError for what is none."""
        if name not in self._made and name in set(self):
            self._made[name] = _made(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (name for commands in GROUPS.values() for name in commands)

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, GROUPS.values()))


def _made(name: str) -> Any:
    """Return that command alone: typer reads every option of what it makes."""
    chapter = next((chapter for chapter, names in _CHAPTERS.items() if name in names), None)
    match chapter:
        case "jobs":
            from gpucloud.cli.jobs import jobs as found
        case "choosing":
            from gpucloud.cli.choosing import choosing as found
        case _:
            from gpucloud.cli import groups

            group = typer.main.get_group(getattr(groups, name))
            group.name = name
            return group
    alone = App(rich_markup_mode=None)
    alone.registered_commands = [
        one for one in found.registered_commands if getattr(one.callback, "__name__", "") == name
    ]
    return typer.main.get_group(alone).commands[name]


class Root(Group):
    """The root, which has its commands only when they are asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands()  # type: ignore[assignment]  # nothing adds to it

    def make_context(self, *given: Any, **named: Any) -> Any:
        """Read the line. Raises Interrupted for Ctrl-C, of which typer would leave an exit code and no answer."""
        with _told():
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises Interrupted likewise."""
        with _told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as pressed:
        raise Interrupted from pressed


app = App(
    name="gpucloud",
    cls=Root,
    help="Train models on interruptible cloud GPUs, whose machines, disks and addresses cannot exceed your budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpucloud {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Write tracebacks of gpucloud's own faults to the log.")
    ] = False,
) -> None:
    """Train models on interruptible cloud GPUs, whose machines, disks and addresses cannot exceed your budget."""
    del version, debug
