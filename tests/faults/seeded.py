"""Seeded bugs by function: what is named is replaced, so that a bug survives everything but the end of its function."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

Patch = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A function, class or constant of the product and what stands in its place.

    `patch` gets what is there and returns what stands there instead. It must stand alone, for its text is appended to a
    copy of the module and so reaches every process, a machine's agent too: imports are made inside. `found_by` is a
    goal's name, or pytest and its arguments.
    """

    name: str
    module: str
    target: str
    patch: Patch
    found_by: tuple[str, ...]
    quick: bool = False

    def stale(self) -> str | None:
        """Return what the product does not have any more, a fault of the table; None when all is there."""
        try:
            attrgetter(self.target)(import_module(self.module))
        except (ImportError, AttributeError) as error:
            return f"{self.module}:{self.target}: {error}"
        return None

    def put_into(self, root: Path) -> None:
        """Change a copy of the product."""
        path = root.joinpath(*self.module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n\n{_text(self.patch)}\n\n\n")
            file.write(f"{self.target} = {self.patch.__name__}({self.target})\n")


def _text(patch: Patch) -> str:
    """Return the function's source as any module can hold it: nothing of where it was written is left at its head."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(patch)))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.decorator_list, node.returns = [d for d in node.decorator_list if node is not tree.body[0]], None
            case ast.arg():
                node.annotation = None
    return ast.unparse(tree)


class Table:
    """Seeded bugs in the order in which they are written down."""

    def __init__(self) -> None:
        self._bugs: list[Bug] = []

    def __call__(self, place: str, *found_by: str, quick: bool = False) -> Callable[[Patch], Patch]:
        """Put the decorated patch into the table: `place` is `module:qualified name`, below `gpucloud`."""
        module, _, target = place.partition(":")

        def put(patch: Patch) -> Patch:
            self._bugs.append(
                Bug(
                    name=patch.__name__.replace("_", "-"),
                    module=f"gpucloud.{module}",
                    target=target,
                    patch=patch,
                    found_by=found_by,
                    quick=quick,
                )
            )
            return patch

        return put

    def bugs(self) -> tuple[Bug, ...]:
        """Return every bug."""
        return tuple(self._bugs)
