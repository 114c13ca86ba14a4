"""Proves what gpucloud promises: `python -m tests.prove [--short] [--list] [NAME …]`.

Each goal runs in a process of its own and prints lines `FIGURE name value limit pass|fail`; the exit code is 1 if one
fails, or a goal breaks. The long form takes its time, one goal after the other; the short form is for every change and
runs four at once, those that take longest first: most of them wait.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.prove.goal import Form, Goal

ROOT = Path(__file__).resolve().parent.parent.parent
_NO_GOALS = {
    *("__init__", "__main__", "answers", "asking", "cells", "claims", "disturbing", "entrances", "framework_cells"),
    *("goal", "kinds", "moments"),
}
_MODULES = (path.stem for path in Path(__file__).parent.glob("*.py"))
GOALS = tuple(sorted(stem.replace("_", "-") for stem in _MODULES if stem not in _NO_GOALS))
_LONGEST = ("resume-exact", "ckpt-torn", "kill-points", "signals", "one-decision", "ci", "mutants", "wall")
_LIMIT_S = {Form.SHORT: 900.0, Form.LONG: 7200.0}


def goal(name: str) -> Goal:
    """Return the goal of that name: `GOAL` of the module of that name."""
    found: Goal = importlib.import_module(f"tests.prove.{name.replace('-', '_')}").GOAL
    return found


def main(arguments: list[str]) -> int:
    """Run what is asked and return the exit code."""
    # A shell without job control has what it starts with `&` ignore SIGINT, and so would all that is struck with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.names if name not in GOALS]
    if unknown:
        sys.exit(f"there is no goal {unknown[0]}: {', '.join(GOALS)}")
    names = tuple(options.names) or GOALS
    form = Form.SHORT if options.short else Form.LONG
    if options.list:
        return _tell_goals(names)
    if options.here:
        return max(_run_here(name, form) for name in names)
    with ThreadPoolExecutor(max_workers=4 if form is Form.SHORT else 1) as pool:
        ordered = sorted(names, key=lambda name: name not in _LONGEST)
        return max(pool.map(lambda name: _run_beside(name, form), ordered))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="goals; all if left out")
    parser.add_argument("--short", action="store_true", help="the form for every change: counts, no times")
    parser.add_argument("--list", action="store_true", help="say what each goal promises, and what of it is simulated")
    parser.add_argument("--here", action="store_true", help="run in this process")
    return parser


def _tell_goals(names: tuple[str, ...]) -> int:
    for name in names:
        one = goal(name)
        print(f"{name}: {one.promise}\n    real: {one.real}\n    simulated: {one.simulated}")
    return 0


def _run_here(name: str, form: Form) -> int:
    code = 0
    for figure in goal(name).run(form):
        print(figure, flush=True)
        code = code if figure.holds else 1
    return code


def _run_beside(name: str, form: Form) -> int:
    """Run the goal in a process of its own; print what it said whole, so that what runs at once does not mix."""
    short = ("--short",) if form is Form.SHORT else ()
    argv = (sys.executable, "-m", "tests.prove", "--here", *short, name)
    started = time.monotonic()
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=os.environ, timeout=_LIMIT_S[form], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = 1, (error.stdout or b"") + f"{name} did not end within {_LIMIT_S[form]:.0f} s\n".encode()
    figures = [line for line in said.splitlines(keepends=True) if line.startswith(b"FIGURE ")]
    broken = code != 0 or not figures
    sys.stdout.buffer.write(said if broken else b"".join(figures))
    sys.stdout.flush()
    sys.stderr.write(f"{name}: {'FAILED' if broken else 'holds'} after {time.monotonic() - started:.1f} s\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
