"""How a worker speaks: one JSON object a line, at once, so that what was found outlives a hang."""

from __future__ import annotations

import sys

from gpucloud.domain.codec import to_json
from gpucloud.domain.gate.probing import Said


def tell(said: Said) -> None:
    """Write one line."""
    sys.stdout.write(to_json(said) + "\n")
    sys.stdout.flush()


def reason(error: Exception) -> str:
    """Return the first line of what torch said: the rest is its stack."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
