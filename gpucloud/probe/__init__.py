"""What the gate runs in the job's own Python: `python -m gpucloud.probe`, an order on standard input.

Workers answer with one JSON object a line. Nothing here imports torch: that it cannot be imported is an answer, too.
"""

from __future__ import annotations

import sys

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.gate.report import Said


def tell(said: Said) -> None:
    """Write one line."""
    sys.stdout.write(to_json(said) + "\n")
    sys.stdout.flush()


def reason(error: Exception) -> str:
    """Return the first line of what torch said: the rest is its stack."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
