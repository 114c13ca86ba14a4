"""What is done in one way only: a second one would have to be learnt, and mended, beside the first."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import gpucloud
from gpucloud.domain import variables

PACKAGE = Path(gpucloud.__file__).parent

# Sent alone to machines that have nothing else of gpucloud: they import the standard library only.
SENT_ALONE = frozenset({"adapters/hosts/onhost.py", "adapters/transfer/node_trees.py"})


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in nodes(tree) if isinstance(node, ast.Call))


def locks(tree: ast.AST) -> Iterator[ast.Call]:
    return (call for call in calls(tree) if isinstance(call.func, ast.Attribute) and call.func.attr in LOCKS)


LOCKS = ("flock", "lockf")

# What is put in a file's place, and is no file that we wrote just for that.
PUT_IN_PLACE = {
    "adapters/keys.py": "a key, linked where there must be none",
    "adapters/local/records.py": "a folder that is removed",
    "adapters/local/sshd.py": "what SFTP's client moves",
    "adapters/transfer/node_program.py": "a received part, with its time",
    "agent/data/fetching.py": "a proven part, with its time",
    "agent/data/staging.py": "a link",
    "agent/attempt/composing.py": "what Apptainer wrote",
    "agent/scripts/script.py": "a script's checkpoint, moved",
    "store/directory.py": "an object, under the store's conditions",
    "store/filling.py": "a file that was filled in pieces",
    "store/landing.py": "parts, below open folders that nobody can exchange",
}


def called(call: ast.Call) -> str:
    """Return the last word of what is called, where it is an attribute."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def puts(tree: ast.AST) -> Iterator[ast.Call]:
    """Find `path.replace(other)` and its kin; `replace` of texts has two arguments, that of dates and values names."""
    for call in calls(tree):
        if called(call) in ("replace", "rename", "renames") and (
            (called(call) != "renames" and len(call.args) == 1 and not call.keywords)
            or ast.unparse(call.func) in ("os.replace", "os.rename", "os.renames")
        ):
            yield call


def names(tree: ast.AST) -> Iterator[ast.Constant]:
    """Find whole names of variables of ours; those in texts for users are none of these."""
    texts = (node for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return (node for node in texts if re.fullmatch("GPUCLOUD_[A-Z_]+", node.value))


# What goes round for other reasons than that something failed.
NO_RETRIES = {
    "adapters/aws/nodes/arming.py": "a begin is waited for",
    "adapters/local/session.py": "an end is waited for",
    "agent/attempt/running.py": "an end is waited for",
    "agent/drive/controller.py": "a daemon's rounds",
    "agent/network.py": "a watch, for as long as the node lives",
    "agent/scripts/watcher.py": "an end is waited for",
    "agent/scripts/taking.py": "a watch, for as long as the attempt lasts",
    "usecases/jobstore/lease.py": "a lease's renewals",
}


def retries(tree: ast.AST) -> Iterator[ast.AST]:
    """Find loops in which an error is caught and then time is let pass."""
    for loop in (node for node in nodes(tree) if isinstance(node, ast.While | ast.For)):
        within = list(inside(loop))
        names = {called(call) or ast.unparse(call.func) for call in within if isinstance(call, ast.Call)}
        if {name.strip("_") for name in names} & {"sleep", "wait"} and any(
            isinstance(one, ast.ExceptHandler) for one in within
        ):
            yield loop


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Walk, but not into functions that are defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from inside(child)


@cache
def trees() -> dict[str, ast.AST]:
    """The package's modules, each parsed once."""
    files = (path for path in PACKAGE.rglob("*.py") if "bundled" not in path.parts)
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def found(wanted: Callable[[ast.AST], Iterator[ast.AST]]) -> frozenset[str]:
    tree_of = trees()
    return frozenset(path for path in tree_of if any(True for _ in wanted(tree_of[path])))


def test_files_are_locked_by_one_module():
    assert found(locks) - SENT_ALONE == {"system/processes.py"}


def test_names_of_variables_stand_in_one_module_and_are_their_own():
    here_document = {"adapters/aws/machine.py"}  # it ends by such a word
    assert found(names) - SENT_ALONE - here_document == {"domain/variables.py"}
    declared = {name: value for name, value in vars(variables).items() if name.startswith("GPUCLOUD_")}
    assert declared == {name: name for name in declared}


def test_each_declared_variable_is_used():
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "variables.py")
    unused = {
        name for name in vars(variables) if name.startswith("GPUCLOUD_") and not re.search(rf"\b{name}\b", sources)
    }
    assert unused == set()


def test_files_are_written_whole_by_one_module():
    assert found(puts) - SENT_ALONE - set(PUT_IN_PLACE) == {"system/wholefile.py"}
    assert set(PUT_IN_PLACE) <= found(puts)


@pytest.mark.parametrize("text", ["beside.replace(path)", "os.replace(a, b)", "Path('a').rename(b)"])
def test_a_second_way_to_write_a_file_whole_would_be_seen(text):
    assert list(puts(ast.parse(text)))


def test_what_failed_is_tried_again_by_one_module():
    assert found(retries) == set(NO_RETRIES)


@pytest.mark.parametrize("wait", ["time.sleep(1)", "self._sleep(wait_s)", "clock.sleep(2)", "closing.wait(0.2)"])
def test_a_second_way_to_try_again_would_be_seen(wait):
    loop = f"for _ in range(3):\n try:\n  work()\n except OSError:\n  {wait}"
    assert list(retries(ast.parse(loop)))


def test_a_declared_policy_and_a_loop_that_only_looks_are_no_second_way():
    declared = "while True:\n try:\n  work()\n except OSError:\n  if not tries.again():\n   raise"
    looks = "while not done():\n time.sleep(1)"
    assert not list(retries(ast.parse(f"{declared}\n{looks}")))


@pytest.mark.parametrize("text", ["text.replace('a', 'b')", "now.replace(hour=1)", "dataclasses.replace(a, b=1)"])
def test_what_replaces_no_file_is_none(text):
    assert not list(puts(ast.parse(text)))


@pytest.mark.parametrize("text", ["fcntl.flock(file, fcntl.LOCK_EX)", "fcntl.lockf(file, 2)"])
def test_a_second_way_to_lock_would_be_seen(text):
    assert list(locks(ast.parse(text)))
