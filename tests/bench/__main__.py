"""Runs every benchmark, or those named: `python -m tests.bench [aws_up …]`.

Each prints FIGURE lines, and the exit code is 1 if one fails. Only what is run is imported: each needs what it needs.
"""

from __future__ import annotations

import sys
from importlib import import_module

BENCHES = ("help", "sync", "main_job", "aws_up", "aws_traffic", "reading", "checkpoints", "simulate", "cost")

# Parts of `checkpoints`, what takes minutes, what needs a machine with GPUs, and what looks at the code alone.
ON_REQUEST = (
    "policies",
    "notice",
    "stall",
    "calls",
    "transport",
    "gpu",
    "gpu_memory",
    "gpu_saves",
    "gpu_sharded",
    "shape",
)


def main(names: list[str]) -> int:
    known = (*BENCHES, *ON_REQUEST)
    for name in names:
        if name not in known:
            sys.exit(f"there is no benchmark {name}: {', '.join(known)}")
    return max(import_module(f"tests.bench.bench_{name}").main() for name in names or BENCHES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
