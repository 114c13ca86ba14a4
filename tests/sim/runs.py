"""Runs by their seed, each in a folder of its own."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.sim.setting import Setting
from tests.sim.world import Run, Verdict


def verdict(seed: int, draw: Callable[[random.Random], Setting]) -> Verdict:
    """Return how the run of that seed ended."""
    with tempfile.TemporaryDirectory() as folder:
        return Run(seed, draw(random.Random(seed)), Path(folder)).run()


def tell(goal: str, seed: int, wrong: list[str]) -> None:
    """Say on standard error what went wrong, and with what seed it comes again."""
    for line in wrong[:3]:
        sys.stderr.write(f"{goal}: seed {seed}: {line}\n")
