"""Measures how the package is built, for its readers: `python -m tests.bench shape`.

Files and their lines of code (without blanks, comments and docstrings), modules that one other alone imports, folders
with many entries, the longest function, broad excepts, and what a drilled `train` on the embedded fleet loads. The
limits are where it should get to; cycles are import-linter's to find.
"""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import figure

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpucloud"
MOST_FILES, LEAST_MEDIAN, MOST_LINES, MOST_ENTRIES = 334, 110, 450, 15
# What a reader would have to learn first, where the field has a word that everybody knows.
PRIVATE = frozenset(
    {
        "arena",
        "announced",
        "beat",
        "books",
        "cashier",
        "condemned",
        "course",
        "depot",
        "discreet",
        "heading",
        "ill",
        "keeper",
        "knock",
        "lives",
        "loom",
        "preparer",
        "renter",
        "seat",
        "shelf",
        "station",
        "teller",
        "upkeep",
        "wall",
        "weather",
        "wish",
        "wished",
        "wishes",
    }
)
PRIVATE_PAIRS = frozenset({("shut", "off"), ("passed", "over"), ("node", "life"), ("node", "seen")})
_LOADED = """
import atexit, runpy, sys
def tell():
    print("LOADED", *sorted(name for name in sys.modules if name.partition(".")[0] == "gpucloud"), file=sys.stderr)
atexit.register(tell)
sys.argv = ["gpucloud", "train", sys.argv[1], "--drill"]
runpy.run_module("gpucloud", run_name="__main__")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module as its readers meet it; `imports` are the dotted names of ours that it names."""

    name: str
    lines: int
    code_lines: int
    longest_function: int
    broad_excepts: int
    imports: frozenset[str]


def main() -> int:
    modules = {module.name: module for module in map(read, sorted(PACKAGE.rglob("*.py")))}
    importers = defaultdict(set)
    for module in modules.values():
        for name in module.imports & modules.keys():
            importers[name].add(module.name)
    told = [module for module in modules.values() if module.code_lines > 1]  # not the heads of folders
    loaded = modules_of_a_train()
    kept = [
        figure("shape.files", len(modules), MOST_FILES),
        figure("shape.median_code_lines_short_of", LEAST_MEDIAN - statistics.median(m.code_lines for m in told), 0),
        figure("shape.modules_too_long", sum(m.lines > MOST_LINES for m in modules.values()), 0),
        figure("shape.folders_too_full", sum(n > MOST_ENTRIES for n in entries().values()), 0),
        figure("shape.private_names", len(private := private_names()), 0),
    ]
    if private:
        print("private:", *private)
    figure("shape.median_code_lines", statistics.median(m.code_lines for m in told))
    figure("shape.imported_once", sum(len(importers[m.name]) == 1 for m in told))
    figure("shape.longest_function_lines", max(m.longest_function for m in modules.values()))
    figure("shape.broad_excepts", sum(m.broad_excepts for m in modules.values()))
    figure("shape.modules_loaded_by_train", len(loaded))
    figure("shape.folders_of_train", len({name.rpartition(".")[0] for name in loaded}))
    return 0 if all(kept) else 1


def private_names() -> list[str]:
    """Return the names in the code with a private word among their parts, in order."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                words = parts_of(token.string)
                if PRIVATE & set(words) or PRIVATE_PAIRS & set(itertools.pairwise(words)):
                    found.add(token.string)
    return sorted(found)


def parts_of(name: str) -> list[str]:
    """Return the words of `a_name`, `AName` or `A_NAME`, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def read(path: Path) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    imports = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            imports |= {one.name for one in node.names}
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return Module(
        name=name,
        lines=len(text.splitlines()),
        code_lines=code_lines(text, tree),
        longest_function=max([f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno], default=0),
        broad_excepts=sum(map(is_broad, ast.walk(tree))),
        imports=frozenset(imports),
    )


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold more than blanks, comments and docstrings."""
    held = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in held:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text and node.end_lineno:
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def is_broad(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and (
        node.type is None or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
    )


def entries() -> dict[Path, int]:
    """Count the modules and folders of each folder; its own head is none of them."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    return {
        folder: sum(path.suffix == ".py" and path.name != "__init__.py" for path in folder.iterdir())
        + sum(path in folders for path in folder.iterdir())
        for folder in folders
    }


def modules_of_a_train() -> list[str]:
    """Return the modules of ours that the supervising process of a drilled job has loaded at its end."""
    with tempfile.TemporaryDirectory() as home:
        job = str(ROOT / "templates" / "jobs" / "digits.yaml")
        done = subprocess.run(
            [sys.executable, "-c", _LOADED, job],
            env={**os.environ, "GPUCLOUD_HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    return line.split()[1:]


if __name__ == "__main__":
    sys.exit(main())
