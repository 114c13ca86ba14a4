"""Which tests a change can reach: pure, from what each file imports, starts and reads.

Nodes are paths in the repository. A Python file uses what it imports (late imports too), what its strings name as a
module (`monkeypatch.setattr("gpucloud.smi.query", …)`, a script in a string, `-m gpucloud`), and the other files whose
name or folder its strings name. A name that is only put together at run time is not seen: the whole check runs all.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import PurePosixPath

REACH_ALL = ("pyproject.toml", "tests/choosing.py", "tests/check.py")
"""What every test depends on, or the choice itself."""

_NAMED = re.compile(r"\b(?:gpucloud|tests)(?:\.\w+)+")
_IMPORTED = re.compile(r"\bfrom ((?:gpucloud|tests)[\w.]*) import (\w+)")
_STARTED = re.compile(r"^gpucloud$|-m gpucloud\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which test files and proofs a change reaches; sorted."""

    tests: tuple[str, ...]
    unreached: tuple[str, ...]
    """The other test files."""
    proofs: tuple[str, ...]
    """Modules of `tests/prove`."""


def choose(uses: Mapping[str, Collection[str]], changed: Collection[str]) -> Choice:
    """Return what to run; `changed` may name files that are gone."""
    tests = sorted(path for path in uses if is_test(path))
    reached = set(uses) if set(changed) & set(REACH_ALL) else reach(uses, changed)
    return Choice(
        tests=tuple(path for path in tests if path in reached),
        unreached=tuple(path for path in tests if path not in reached),
        proofs=tuple(sorted(path for path in reached if PurePosixPath(path).match("tests/prove/*.py"))),
    )


def reach(uses: Mapping[str, Collection[str]], changed: Collection[str]) -> set[str]:
    """Return the changed files and all that use them, however far away."""
    users = defaultdict(set)
    for path, used in uses.items():
        for one in used:
            users[one].add(path)
    found, new = set(changed), list(changed)
    while new:
        fresh = users[new.pop()] - found
        found |= fresh
        new += fresh
    return found


def is_test(path: str) -> bool:
    return PurePosixPath(path).match("test_*.py") and path.startswith("tests/")


def uses_of_all(texts: Mapping[str, str], files: Collection[str]) -> dict[str, set[str]]:
    """Return what each Python file uses; `texts` are the sources by path, `files` all paths of the repository."""
    known = set(files)
    return {path: uses_of(path, text, known) for path, text in texts.items()}


def uses_of(path: str, text: str, files: Collection[str]) -> set[str]:
    """Return the paths that one file uses, itself left out."""
    tree = ast.parse(text)
    strings = list(_strings(tree))
    names = set(_imports(tree))
    for string in strings:
        # The package's messages name modules too; its programs and scripts are the name alone, or an import.
        names |= set(_NAMED.findall(string) if path.startswith("tests/") else filter(_NAMED.fullmatch, [string]))
        names |= {f"{module}.{name}" for module, name in _IMPORTED.findall(string)}
    found = {file for name in names for file in files_of(name, files)}
    if path.startswith("tests/"):
        if any(map(_STARTED.search, strings)):
            found |= files_of("gpucloud.__main__", files)
        if any(string.endswith("*.py") for string in strings):
            found |= {file for file in files if file.startswith("gpucloud/") and file.endswith(".py")}
    pieces = {piece for string in strings for piece in string.split("/")}
    named = {file for file in files if _is_named(file, pieces)}
    # The package reads what travels with it; a test says which of the templates' scripts runs.
    found |= named if path.startswith("tests/") else {file for file in named if _travels(file)}
    found |= {file for file in files if _is_beside(path, file)}
    return found - {path}


def files_of(name: str, files: Collection[str]) -> set[str]:
    """Return the file of a dotted name's module, or of the module that holds it, and the heads of its folders."""
    parts, found = name.split("."), set()
    for length in range(1, len(parts) + 1):
        stem = "/".join(parts[:length])
        found |= {path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files}
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def _strings(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that are no docstrings."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def _is_named(file: str, pieces: Set[str]) -> bool:
    """Whether strings name a file that is no module of ours: by its name, or by the topmost two of its folders.

    A script of a template goes by its folder alone: tests have scripts of their own with such names.
    """
    *folders, name = file.split("/")
    if name.endswith(".py"):
        return file.startswith("templates/") and pieces.issuperset(folders[:2])
    if name in pieces and "." in name:
        return True
    ours = folders[:1] == ["gpucloud"]
    return bool(folders) and not ours and pieces.issuperset(folders[folders[0] == "tests" :][:2])


def _travels(file: str) -> bool:
    return file.startswith(("gpucloud/", "templates/", "terraform/")) and not file.endswith(".py")


def _is_beside(path: str, file: str) -> bool:
    """Whether a file comes with the module's folder: data of a room of the package, a conftest above a test."""
    if file.endswith("/conftest.py"):
        return path.startswith(file.removesuffix("conftest.py"))
    if file.endswith((".py", ".md")) or not file.startswith("gpucloud/"):
        return False
    return path.rpartition("/")[0] == file.rpartition("/")[0]
