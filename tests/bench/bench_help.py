"""Measures what it costs to open the command line, in turns: `python -m tests.bench help`.

`gpucloud --help` beside a typer app with the same commands, options and texts whose functions do nothing; and `status`
and `cost` of a local job that is over.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from typer.main import get_command

from gpucloud.cli.app import app
from tests.bench.figures import figure

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 15
RATIO_LIMIT = 1.15
LOOK_LIMIT_S = 0.35
_HEAD = """
from typing import Annotated, List, Optional
from enum import Enum
import typer
"""


def main() -> int:
    return 0 if all((help_beside_typer(), *looks())) else 1


def help_beside_typer() -> bool:
    with tempfile.TemporaryDirectory() as name:
        bare = Path(name) / "bare.py"
        bare.write_text(empty_app())
        theirs, ours = in_turns([sys.executable, str(bare), "--help"], [sys.executable, "-m", "gpucloud", "--help"])
    figure("help_cpu_s", ours)
    figure("empty_typer_help_cpu_s", theirs)
    return figure("help_to_empty_typer_cpu_ratio", ours / theirs, RATIO_LIMIT)


def looks() -> list[bool]:
    """Return whether `status` and `cost` of a job that ran on the embedded fleet keep their limit."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["GPUCLOUD_HOME"] = home
        job = str(ROOT / "templates" / "jobs" / "digits.yaml")
        cpu_seconds([sys.executable, "-m", "gpucloud", "train", job])
        asked = ("status", "cost")
        took = in_turns(*([sys.executable, "-m", "gpucloud", name, "digits"] for name in asked))
        return [figure(f"{name}_cpu_s", seconds, LOOK_LIMIT_S) for name, seconds in zip(asked, took, strict=True)]


def in_turns(*commands: list[str]) -> list[float]:
    """Return the least CPU seconds of each."""
    took = [[cpu_seconds(argv) for argv in commands] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*took, strict=True)]


def cpu_seconds(argv: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def empty_app() -> str:
    """Return a script with the commands, options and texts of ours, and nothing behind them."""
    root = get_command(app)
    lines = [_HEAD, *_group("app", root, root.commands), *_function("app", "root", root, "callback()"), "app()"]
    return "\n".join(lines)


def _group(name: str, group: Any, below: dict[str, Any]) -> Iterator[str]:
    yield f"{name} = typer.Typer(help={group.help!r}, rich_markup_mode=None, add_completion=False)"
    for word, one in below.items():
        inner = f"{name}_{word.replace('-', '_')}"
        if hasattr(one, "commands"):
            yield from _group(inner, one, one.commands)
            yield f"{name}.add_typer({inner}, name={word!r})"
        else:
            yield from _function(name, inner, one, f"command({word!r})")


def _function(typer_name: str, name: str, command: Any, registered: str) -> Iterator[str]:
    taken: list[str] = []
    for param in command.params:
        if param.name == "help":
            continue
        meant = param.type_descriptor.annotation
        kind = meant.__name__ if meant in (int, float, bool) else "str"
        if isinstance(meant, type) and issubclass(meant, Enum):
            kind = f"{name}_{param.name}"
            yield f"{kind} = Enum({kind!r}, {[(one.name, one.value) for one in meant]!r})"
        if param.multiple or param.nargs == -1:
            kind = f"List[{kind}]"
        texts = f"metavar={param.metavar!r}, help={getattr(param, 'help', None)!r}"
        if param.param_type_name == "argument":
            what = f"typer.Argument({texts})"
        else:
            names = [*("/".join(pair) for pair in [(param.opts[0], *param.secondary_opts[:1])]), *param.opts[1:]]
            what = f"typer.Option({', '.join(map(repr, names))}, {texts})"
        default = "False" if kind == "bool" else "None"
        kind = kind if kind == "bool" else f"Optional[{kind}]"
        taken.append(f"{param.name}: Annotated[{kind}, {what}] = {default}")
    yield f"@{typer_name}.{registered}"
    yield f"def {name}({', '.join(taken)}) -> None:"
    yield f"    {command.help or ''!r}"


if __name__ == "__main__":
    sys.exit(main())
