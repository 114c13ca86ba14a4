"""Nodes of the embedded fleet that only tests need: cut off, parted, with namespaces and a network of their own.

The fleet is the product's. Its folder names this daemon in place of the product's, and the daemon puts nodes on
grounds of its own (`gpucloud/adapters/local/ground`).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_RUN = """
import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def program(module: str) -> tuple[str, ...]:
    """Return the command of a module of the tests, which runs in any folder and with any environment."""
    return (sys.executable, "-c", _RUN, str(ROOT), module)
