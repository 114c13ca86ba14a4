"""The proofs are strong enough: each of these seeded bugs, put into a copy of the product, is found by a named one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.bugs import Bug, bugs
from tests.prove.goal import Figure, Form, Goal

_ROOT = Path(__file__).resolve().parent.parent.parent
_LIMIT_S = 900.0


def run(form: Form) -> Iterator[Figure]:
    """Count the bugs that nothing found."""
    chosen = tuple(bug for bug in bugs() if form is Form.LONG or bug.quick)
    alive = [bug.name for bug in chosen if not is_found(bug)]
    for name in alive:
        sys.stderr.write(f"mutants: {name} was not found\n")
    yield Figure(name="mutants", value=len(alive), limit=0)
    yield Figure(name="mutants.bugs", value=len(chosen), limit=24 if form is Form.LONG else 3, least=True)


def is_found(bug: Bug) -> bool:
    """Whether what should find the bug fails with it; what the product does not have is a fault of the table."""
    if (gone := bug.stale()) is not None:
        sys.stderr.write(f"mutants: {bug.name}: {gone}\n")
        return False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "dist", "shared", "venv", ".venv")
        shutil.copytree(_ROOT, root, ignore=ignored, symlinks=True)
        bug.put_into(root)
        return _fails(root, bug.found_by)


def _fails(root: Path, found_by: tuple[str, ...]) -> bool:
    """Whether a pytest run ends with failed tests, or a goal with a figure that fails."""
    pytest = found_by[0] == "pytest"
    of_tests = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *found_by[1:])
    argv = of_tests if pytest else ("-m", "tests.prove", "--here", "--short", *found_by)
    env = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run((sys.executable, *argv), cwd=root, env=env, timeout=_LIMIT_S, capture_output=True)
    except subprocess.TimeoutExpired:
        return False  # whoever does not end names nothing
    if pytest:
        return done.returncode == 1
    return any(line.startswith(b"FIGURE ") and line.endswith(b" fail") for line in done.stdout.splitlines())


GOAL = Goal(
    promise="every seeded bug is found by the goal or the tests that are named beside it",
    real="a copy of the product with one function replaced; the short form of the goals, and tests",
    simulated="what those goals simulate",
    run=run,
)
