"""What is done in one way only: a second one would have to be learnt, and mended, beside the first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucloud

PACKAGE = Path(gpucloud.__file__).parent

# Sent alone to machines that have nothing else of gpucloud: they import the standard library only.
SENT_ALONE = frozenset({"adapters/hosts/onhost.py", "adapters/transfer/receiver.py"})


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def locks(tree: ast.AST) -> Iterator[ast.Call]:
    return (call for call in calls(tree) if isinstance(call.func, ast.Attribute) and call.func.attr in LOCKS)


LOCKS = ("flock", "lockf")


def found(wanted) -> set[str]:
    files = (path for path in PACKAGE.rglob("*.py") if "bundled" not in path.parts)
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in files
        if any(True for _ in wanted(ast.parse(path.read_text(encoding="utf-8"))))
    }


def test_files_are_locked_by_one_module():
    assert found(locks) - SENT_ALONE == {"locks.py"}


@pytest.mark.parametrize("text", ["fcntl.flock(file, fcntl.LOCK_EX)", "fcntl.lockf(file, 2)"])
def test_a_second_way_to_lock_would_be_seen(text):
    assert list(locks(ast.parse(text)))
