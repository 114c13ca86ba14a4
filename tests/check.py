"""Runs every check: `python -m tests.check [pytest arguments]`.

One line per stage with its seconds, the output of a stage that fails, pytest's output last. The exit code is the
worst of all stages.
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
    "terraform fmt": ["terraform", "fmt", "-check", "-recursive", "terraform"],
}
MISSING = 127  # what a shell answers for a program that is not there


def main(arguments: list[str]) -> int:
    """Return 0 when every stage passed, else the highest exit code."""
    codes = [stage(name, argv) for name, argv in STAGES.items()]
    started = time.monotonic()
    tests = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode
    tell("pytest", tests, time.monotonic() - started)
    return max(*codes, tests)


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
