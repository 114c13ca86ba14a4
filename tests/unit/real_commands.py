"""Reads words as the real command line would, and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from gpucloud.cli.app import app


def read_as_typed(words: Sequence[str]) -> dict[str, Any]:
    """Return what the words after `gpucloud` mean to their command; its usage error for what it does not know."""
    command = get_command(app)
    context = command.make_context("gpucloud", [*words])
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context.params
