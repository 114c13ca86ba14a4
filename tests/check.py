"""Runs every check: `python -m tests.check [pytest arguments]`.

One line per stage with its seconds, the output of a stage that fails, then pytest's output and the short proofs. The
exit code is the worst of all stages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "ruff format": ["ruff", "format", "--check", "."],
    "ruff check": ["ruff", "check", "."],
    "mypy": ["mypy"],
    "lint-imports": ["lint-imports"],
    "bandit": ["bandit", "--quiet", "--configfile", "pyproject.toml", "-ll", "--recursive", "gpucloud", "templates"],
    "shellcheck": ["shellcheck", ".ci/run"],
    "terraform fmt": ["terraform", "fmt", "-check", "-recursive", "terraform"],
}
# Most tests wait (for processes, for Terraform, for machines) and run side by side, a file after the other in the order
# of their names: those that take longest are not among the last, when the other workers have nothing left. Those
# marked `alone` look at how quick things are.
_BESIDE = ["--dist", "loadfile", "--no-loadscope-reorder"]
TESTS = {
    "tests": ["-m", "not alone and not slow and not cloud and not emulated", "-n", "3", *_BESIDE],
    "tests alone": ["-m", "alone and not slow and not cloud and not emulated"],
    "tests on AWS": ["-m", "emulated and not slow and not cloud", "-n", "3", *_BESIDE],
}
MISSING = 127  # what a shell answers for a program that is not there
NONE_CHOSEN = 5  # what pytest answers when no test was


def main(arguments: list[str]) -> int:
    """Return 0 when every stage passed, else the highest exit code."""
    codes = [stage(name, argv) for name, argv in STAGES.items()]
    codes += [tests(name, [*chosen, *arguments]) for name, chosen in TESTS.items()]
    return max(*codes, proofs())


def tests(name: str, arguments: list[str]) -> int:
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode
    tell(name, code, time.monotonic() - started)
    return 0 if code == NONE_CHOSEN else code


def proofs() -> int:
    """Every promise in its short form: counts, no times."""
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "tests.prove", "--short"], cwd=ROOT).returncode
    tell("proofs", code, time.monotonic() - started)
    return code


def stage(name: str, argv: list[str]) -> int:
    started = time.monotonic()
    try:
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        code, output = done.returncode, done.stdout
    except FileNotFoundError:
        code, output = MISSING, f"{argv[0]} is not installed\n"
    tell(name, code, time.monotonic() - started)
    if code:
        print(output, end="", flush=True)
    return abs(code)


def tell(name: str, code: int, seconds: float) -> None:
    print(f"{name:<14} {'ok' if code == 0 else f'FAILED ({code})':<14} {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
